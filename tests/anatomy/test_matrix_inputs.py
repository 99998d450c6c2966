"""Taps see what the matrices are contracted with; negated inputs are flipped columns."""

from __future__ import annotations

import pytest
import torch
import zoo
from made_models import IDS, Unusual, seeded
from torch import nn

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError


def tapped(found, ids, matrices=None):
    """Every row each matrix saw in one forward."""
    seen = {}
    watched = found.matrices if matrices is None else matrices
    with (
        torch.no_grad(),
        anatomy.tap_inputs(found, watched, lambda m, x: seen.setdefault(m.name, []).append(x.clone())),
    ):
        zoo.dense_logits(found.model, ids)
    return {name: torch.cat(parts) for name, parts in seen.items()}


def in_order(rows):
    """Rows sorted by their first entry: experts get their rows in an order of their own."""
    return rows[rows[:, 0].argsort()]


def column_entries(matrix, columns):
    return (torch.arange(matrix.out_features)[:, None] * matrix.in_features + columns).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in zoo.NAMES if n not in zoo.SPARSE])
def test_tapped_rows_times_the_matrix_are_what_the_owning_module_returns(name, dtype):
    model = zoo.build(name, dtype)
    found = anatomy.examine(model)
    outputs, biases, handles = {}, {}, []
    for matrix in found.block_matrices:
        owner = model.get_submodule(matrix.parameter_name.rpartition(".")[0])
        biases[matrix.name] = 0 if getattr(owner, "bias", None) is None else owner.bias.double()
        handles.append(owner.register_forward_hook(lambda _m, _a, o, n=matrix.name: outputs.update({n: o.double()})))
    seen = tapped(found, zoo.token_ids())
    for handle in handles:
        handle.remove()
    assert seen.keys() == {m.name for m in found.matrices}
    for matrix in found.block_matrices:
        expected = seen[matrix.name].double() @ matrix.view().double().T + biases[matrix.name]
        bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert (outputs[matrix.name].reshape(expected.shape) - expected).abs().max() <= bound, matrix.name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_an_expert_sees_exactly_the_rows_routed_to_it(implementation):
    model = zoo.build("mixtral", experts_implementation=implementation)
    found = anatomy.examine(model)
    seen = tapped(found, zoo.token_ids())
    layer = model.model.layers[0].mlp
    x = seen["model.layers.0.mlp.gate.weight"]
    chosen = torch.softmax(x @ layer.gate.weight.T, -1).topk(2).indices
    for expert in range(4):
        rows = x[(chosen == expert).any(-1)]
        gate, value = (rows @ layer.experts.gate_up_proj[expert].T).chunk(2, -1)
        hidden = nn.functional.silu(gate) * value
        for matrix, expected in (("gate_up_proj", rows), ("down_proj", hidden)):
            measured = seen[f"model.layers.0.mlp.experts.{matrix}[{expert}]"]
            assert torch.allclose(in_order(measured), in_order(expected), atol=1e-5)
    assert model.config._experts_implementation == implementation


def test_an_expert_without_rows_is_not_called_back():
    found = anatomy.examine(zoo.build("mixtral"))
    seen = tapped(found, torch.tensor([[5, 5]]))
    assert len([name for name in seen if "layers.0.mlp.experts.down_proj" in name]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_negating_inputs_is_exactly_flipping_the_columns(name, dtype):
    model = zoo.build(name, dtype)
    found = anatomy.examine(model)
    ids = zoo.token_ids()
    clean = zoo.dense_logits(model, ids)
    seen = tapped(found, ids)
    for matrix in found.block_matrices[::3]:
        if matrix.name not in seen:
            continue
        columns = torch.tensor([1, matrix.in_features - 2])
        with anatomy.negate_inputs(found, {matrix.name: columns}):
            negated = zoo.dense_logits(model, ids)
        matrix.flip_signs(column_entries(matrix, columns))
        flipped = zoo.dense_logits(model, ids)
        matrix.flip_signs(column_entries(matrix, columns))
        assert torch.equal(negated, flipped), matrix.name
        assert not torch.equal(negated, clean), matrix.name
    assert torch.equal(zoo.dense_logits(model, ids), clean)


def test_several_matrices_are_negated_at_once():
    model = zoo.build("mixtral")
    found = anatomy.examine(model)
    columns = {m.name: torch.tensor([0, 7]) for m in found.block_matrices}
    with anatomy.negate_inputs(found, columns):
        negated = zoo.dense_logits(model, zoo.token_ids())
    for matrix in found.block_matrices:
        matrix.flip_signs(column_entries(matrix, columns[matrix.name]))
    assert torch.equal(negated, zoo.dense_logits(model, zoo.token_ids()))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_scaling_inputs_by_a_power_of_two_is_exactly_scaling_the_columns(name):
    model = zoo.build(name)
    found = anatomy.examine(model)
    matrix = next(m for m in reversed(found.block_matrices) if m.rows_seen)
    columns = torch.tensor([2, 3])
    clean = zoo.dense_logits(model, zoo.token_ids())
    with anatomy.scale_inputs(found, {matrix.name: columns}, 4.0):
        scaled = zoo.dense_logits(model, zoo.token_ids())
    matrix.write_columns(columns, matrix.read_columns(columns) * 4)
    assert torch.equal(scaled, zoo.dense_logits(model, zoo.token_ids()))
    assert not torch.equal(scaled, clean)


def test_other_readers_of_the_same_activation_are_not_touched():
    found = anatomy.examine(zoo.build("llama"))
    query, key = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    plain = tapped(found, zoo.token_ids())
    with anatomy.scale_inputs(found, {query: torch.tensor([3])}, 5.0):
        changed = tapped(found, zoo.token_ids())
    assert torch.equal(changed[key], plain[key])


def test_the_input_of_a_tied_head_can_be_scaled_but_not_negated_as_if_its_column_were_flipped():
    found = anatomy.examine(zoo.build("llama_tied"))
    clean = zoo.dense_logits(found.model, zoo.token_ids())
    columns = {"lm_head.weight": torch.tensor([0])}
    with pytest.raises(ProbeError, match="embedding"), anatomy.negate_inputs(found, columns):
        pass
    with anatomy.scale_inputs(found, columns, 2.0):
        assert not torch.equal(zoo.dense_logits(found.model, zoo.token_ids()), clean)


def test_a_change_below_autograd_would_give_wrong_gradients_so_it_is_refused():
    model = zoo.build("mixtral")
    found = anatomy.examine(model)
    model.model.embed_tokens.weight.requires_grad_(True)
    expert = next(m for m in found.matrices if m.module_name is None and m.rows_seen)
    with pytest.raises(ProbeError, match="no_grad"), anatomy.negate_inputs(found, {expert.name: torch.tensor([0])}):
        model(zoo.token_ids(), use_cache=False)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_nothing_is_left_behind_after_a_failure_inside(name):
    model = zoo.build(name)
    found = anatomy.examine(model)
    clean = zoo.dense_logits(model, zoo.token_ids())
    columns = {m.name: torch.tensor([0]) for m in found.block_matrices}
    with pytest.raises(KeyboardInterrupt), anatomy.negate_inputs(found, columns):
        raise KeyboardInterrupt
    assert torch.equal(zoo.dense_logits(model, zoo.token_ids()), clean)


def test_taps_work_in_inference_mode_too():
    for name in ("gpt2", "mixtral"):
        found = anatomy.examine(zoo.build(name))
        plain = tapped(found, zoo.token_ids())
        seen = {}
        with (
            torch.inference_mode(),
            anatomy.tap_inputs(found, found.matrices, lambda m, x, s=seen: s.update({m.name: x})),
        ):
            found.model(zoo.token_ids(), use_cache=False)
        assert seen.keys() == plain.keys()


def test_inputs_of_weights_outside_of_modules_are_watched_and_negated_like_their_columns():
    model = seeded(Unusual)
    found = anatomy.examine(model, input_ids=IDS)
    seen = {}
    with torch.no_grad(), anatomy.tap_inputs(found, found.matrices, lambda m, x: seen.setdefault(m.name, x.clone())):
        clean = model(IDS)
    x, layer = model.table(IDS).flatten(0, 1), model.layers[0]
    wide = torch.cat([x[:, :6] @ layer.grouped[0], x[:, 6:] @ layer.grouped[1]], 1).tanh()
    assert torch.equal(seen["layers.0.grouped[1]"], x[:, 6:])
    assert torch.allclose(seen["layers.0.left"], wide, atol=1e-6)
    assert torch.allclose(seen["layers.0.cast"], wide @ layer.left.T, atol=1e-5)
    for name in ("layers.1.grouped[1]", "layers.2.left", "layers.0.cast"):
        matrix, column = found.matrix(name), torch.tensor([4])
        with torch.no_grad():
            with anatomy.negate_inputs(found, {name: column}):
                negated = model(IDS)
            matrix.flip_signs(column_entries(matrix, column))
            flipped = model(IDS)
            matrix.flip_signs(column_entries(matrix, column))
        assert not torch.equal(flipped, clean)
        assert torch.allclose(negated, flipped, atol=1e-6), name


def test_a_linear_applied_to_a_transposed_activation_is_no_batch_of_matrices():
    """torch then repeats the weight for every sequence, as a view, and multiplies in batches."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 12)
            self.mixer = nn.Linear(12, 9, bias=False)
            self.head = nn.Linear(9, 40)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids).transpose(1, 2).contiguous()
            return self.head(self.mixer(x.transpose(1, 2)))

    model = seeded(Transposed)
    found = anatomy.examine(model, input_ids=IDS)
    matrix = found.matrix("mixer.weight")
    assert (matrix.shape, matrix.rows_seen) == ((9, 12), 24)
    seen = []
    with torch.no_grad(), anatomy.tap_inputs(found, [matrix], lambda _m, x: seen.append(x.clone())):
        model(IDS)
    assert torch.equal(seen[0], model.table(IDS).flatten(0, 1))
