"""Weight matrices: all are found, oriented as the model uses them, edited exactly, refused where that is impossible."""

from __future__ import annotations

import pytest
import torch
import zoo
from made_models import IDS, Unusual, seeded
from torch import nn

from ternary_probe import anatomy
from ternary_probe.anatomy._layout import WeightIndex
from ternary_probe.errors import ProbeError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss"]  # (out, in), (in, out), (experts, out, in), (experts, in, out)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def recorded_call(model, owner, ids):
    """Arguments of the owner's call in a forward."""
    kept = {}

    def keep(_module, args, kwargs, _output):
        kept.update(args=args, kwargs=kwargs)

    handle = owner.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return kept["args"], kept["kwargs"]


def test_a_storage_a_weight_has_left_is_never_taken_for_it_again():
    """bitsandbytes repacks weights in their first forward; the allocator gives the old place to the next tensors."""
    model = nn.Linear(64, 64, bias=False)
    index = WeightIndex(model)
    model.weight.data = model.weight.data.clone()

    later = [torch.empty(64, 64) for _ in range(100)]

    assert not any(index.is_weight(tensor) for tensor in later)


@pytest.mark.parametrize("name", [n for n in zoo.NAMES if n not in zoo.SPARSE])
def test_raising_one_entry_moves_only_its_output_by_its_input(name):
    model = zoo.build(name)
    checked = 0
    for matrix in anatomy.examine(model).matrices:
        if matrix.also_lookup:
            continue  # its owner is the table; the head is compared with dense logits elsewhere
        owner = model.get_submodule(matrix.parameter_name.rpartition(".")[0])
        args, kwargs = recorded_call(model, owner, zoo.token_ids())
        i, j = matrix.out_features // 3, matrix.in_features // 2
        entry = torch.tensor([i * matrix.in_features + j])
        original = matrix.read(entry)
        with torch.no_grad():
            before = owner(*args, **kwargs)
            matrix.write(entry, original + 1)
            moved = owner(*args, **kwargs) - before
        matrix.write(entry, original)
        assert torch.allclose(moved[..., i], args[0][..., j], atol=1e-4), matrix.name
        assert moved[..., torch.arange(matrix.out_features) != i].abs().max() == 0, matrix.name
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_expert_matrices_are_oriented_as_the_formula_written_out_says(implementation):
    model = zoo.build("mixtral", experts_implementation=implementation)
    found = anatomy.examine(model)
    x = torch.randn(12, zoo.WIDTH, generator=torch.Generator().manual_seed(3))
    weights = torch.softmax(x @ found.matrix("model.layers.1.mlp.gate.weight").view().T, -1)
    top, chosen = weights.topk(2)
    top = top / top.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(top[token], chosen[token], strict=True):
            up = found.matrix(f"model.layers.1.mlp.experts.gate_up_proj[{expert}]").view() @ x[token]
            down = found.matrix(f"model.layers.1.mlp.experts.down_proj[{expert}]").view()
            expected[token] += weight * (down @ (nn.functional.silu(up[:48]) * up[48:]))
    with torch.no_grad():
        measured = model.model.layers[1].mlp(x[None])[0]
    assert torch.allclose(measured, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_flip_negates_the_named_logical_entries_and_undoes_itself_bit_for_bit(name, dtype):
    # torch has no grouped product in float64
    model = zoo.build(name, dtype, **({"experts_implementation": "eager"} if name in zoo.SPARSE else {}))
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for matrix in anatomy.examine(model).block_matrices:
        expected = matrix.view().clone()
        entries = torch.randperm(expected.numel(), generator=generator)[:37]
        for entry in entries.tolist():
            row, column = divmod(entry, matrix.in_features)
            expected[row, column] *= -1
        matrix.flip_signs(entries)
        assert torch.equal(matrix.view(), expected), matrix.name
        assert torch.equal(matrix.read(entries), expected.flatten()[entries])
        matrix.flip_signs(entries)
    integer = INTEGERS[dtype.itemsize]
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.view(integer), before[key].view(integer)), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_flip_of_one_matrix_leaves_all_other_parameters_alone(name):
    model = zoo.build(name)
    matrix = anatomy.examine(model).block_matrices[-2]
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    matrix.flip_signs(torch.tensor([0, 5, matrix.numel - 1]))
    changed = {key: int((parameter != before[key]).sum()) for key, parameter in model.named_parameters()}
    assert {key: count for key, count in changed.items() if count} == {matrix.parameter_name: 3}


def test_flip_of_a_zero_changes_only_its_sign_bit():
    matrix = anatomy.examine(zoo.build("llama")).block_matrices[0]
    matrix.write(torch.tensor([4]), torch.tensor([0.0]))
    matrix.flip_signs(torch.tensor([4]))
    flipped = matrix.read(torch.tensor([4]))
    assert flipped == 0
    assert flipped.signbit()


@pytest.mark.parametrize("name", LAYOUTS)
def test_columns_are_read_and_written_where_the_view_shows_them(name):
    for matrix in anatomy.examine(zoo.build(name)).block_matrices:
        columns = torch.tensor([matrix.in_features - 1, 0, 3])
        dense = matrix.view().clone()
        assert torch.equal(matrix.read_columns(columns), dense[:, columns])
        matrix.write_columns(columns, dense[:, columns] * 3)
        dense[:, columns] *= 3
        assert torch.equal(matrix.view(), dense)


def test_view_shares_the_live_storage_also_after_the_parameter_was_replaced():
    model = zoo.build("gpt2")
    matrix = anatomy.examine(model).block_matrices[0]
    owner = model.get_submodule(matrix.parameter_name.rpartition(".")[0])
    owner.weight = nn.Parameter(torch.zeros_like(owner.weight), requires_grad=False)
    assert not matrix.view().any()
    matrix.view()[2, 1] = 7
    assert owner.weight[1, 2] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_parameter_is_accounted_for_and_every_weight_of_a_product_is_found(name, dtype):
    found = zoo.examined(name, dtype)
    model = found.model
    assert found.accounted.total == sum(parameter.numel() for parameter in model.parameters())
    assert found.accounted.fraction == 1
    assert not found.unhandled
    contracted = {key for m in found.matrices for key in (m.parameter_name, *m.aliases)}
    head = model.get_output_embeddings().weight
    for key, parameter in model.named_parameters(remove_duplicate=False):
        table = any(
            part in key for part in ("embed_positions", "wpe", "word_embeddings", "embed_tokens", "wte", "embed_in")
        )
        expected = parameter.dim() >= 2 and "bias" not in key and (not table or parameter is head)
        assert (key in contracted) == expected, key


def test_tied_storage_appears_once_under_both_names():
    found = anatomy.examine(zoo.build("llama_tied"))
    outside = [m for m in found.matrices if m.block is None]
    assert len(outside) == 1
    assert {outside[0].name, *outside[0].aliases} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert outside[0].also_lookup
    assert outside[0].role == "lm_head"
    assert found.matrix("lm_head.weight") is found.matrix("model.embed_tokens.weight") is found.head_matrix


def test_a_config_that_lies_about_ties_is_not_believed():
    model = zoo.build("llama_tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    head = anatomy.examine(model).matrix("lm_head.weight")
    assert not head.aliases
    assert not head.also_lookup


def test_roles_blocks_and_execution_order_of_a_llama():
    found = anatomy.examine(zoo.build("llama"))
    roles = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    in_blocks = [(block, role) for block in (0, 1) for role in roles]
    assert [(m.block, m.role) for m in found.matrices] == [*in_blocks, (None, "lm_head")]
    assert found.block_matrices == found.matrices[:-1]


def test_experts_are_named_by_their_place_and_count_the_rows_they_saw():
    found = anatomy.examine(zoo.build("mixtral"))
    experts = [m for m in found.matrices if m.role == "down_proj" and m.block == 0]
    assert [m.name for m in experts] == [f"model.layers.0.mlp.experts.down_proj[{e}]" for e in range(4)]
    assert sum(m.rows_seen for m in experts) == 2 * 32  # two experts for each of the probe's 32 tokens
    assert all(m.module_name is None for m in experts)


def test_experts_no_token_reached_are_listed_with_zero_rows():
    found = anatomy.examine(zoo.build("mixtral"), input_ids=torch.tensor([[5, 5]]))
    experts = [m for m in found.matrices if m.role == "down_proj" and m.block == 0]
    assert sorted(m.rows_seen for m in experts) == [0, 0, 2, 2]


def test_experts_kept_as_modules_that_no_token_reached_are_oriented_like_their_siblings():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

        def forward(self, x):
            return x + self.experts[1](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 12)
            self.layers = nn.ModuleList(Sparse() for _ in range(2))
            self.head = nn.Linear(12, 40)

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    found = anatomy.examine(seeded(Model), input_ids=IDS)
    inside = {(m.name, m.block, m.rows_seen) for m in found.block_matrices}
    assert inside == {(f"layers.{b}.experts.{e}.weight", b, 24 if e == 1 else 0) for b in range(2) for e in range(3)}
    assert found.matrix("layers.1.experts.2.weight").module_name == "layers.1.experts.2"


def test_a_matrix_that_went_to_the_meta_device_is_refused():
    model = zoo.build("llama")
    matrix = anatomy.examine(model).block_matrices[0]
    owner = model.get_submodule(matrix.module_name)
    owner.weight = nn.Parameter(owner.weight.to("meta"), requires_grad=False)
    with pytest.raises(ProbeError, match=r"q_proj.*meta.*load the model wholly into memory"):
        matrix.flip_signs(torch.tensor([0]))


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(ProbeError, match=r"meta.*load the model wholly into memory"):
        anatomy.examine(zoo.build("llama").to("meta"))


def test_quantized_storage_is_refused():
    model = zoo.build("llama")
    matrix = anatomy.examine(model).block_matrices[0]
    owner = model.get_submodule(matrix.module_name)
    owner.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)
    entry = torch.tensor([0])
    for use in (matrix.view, lambda: matrix.flip_signs(entry), lambda: matrix.read_columns(entry)):
        with pytest.raises(ProbeError, match=r"q_proj.*uint8.*dequantize"):
            use()


def test_a_repacked_parameter_is_refused():
    model = zoo.build("llama")
    matrix = anatomy.examine(model).block_matrices[0]
    model.get_submodule(matrix.module_name).weight = nn.Parameter(torch.zeros(512, 2), requires_grad=False)
    with pytest.raises(ProbeError, match="shape"):
        matrix.view()


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ProbeError, match=r"model\.eval"):
        anatomy.examine(zoo.build("llama").train())


def test_an_unknown_name_is_refused():
    found = anatomy.examine(zoo.build("llama"))
    for look_up in (found.matrix, found.norm):
        with pytest.raises(ProbeError, match="nonsense"):
            look_up("nonsense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "gpt2", "opt_post"])
def test_examining_leaves_every_bit_and_every_hook_as_it_was(name, dtype):
    model = zoo.build(name, dtype)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    anatomy.examine(model)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]), key
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_weights_used_outside_of_any_linear_module_are_found_and_oriented():
    found = anatomy.examine(seeded(Unusual), input_ids=IDS)
    assert {m.name: (m.shape, m.axes[:3]) for m in found.matrices if m.block == 1} == {
        "layers.1.grouped[0]": ((9, 6), (2, 1, 0)),
        "layers.1.grouped[1]": ((9, 6), (2, 1, 0)),
        "layers.1.left": ((12, 18), (0, 1, None)),
        "layers.1.cast": ((12, 12), (1, 0, None)),
    }
    assert [entry.name for entry in found.unhandled] == ["idle"]
    assert found.accounted.names["unused"] == ("idle",)
    assert found.residual_stream.identity_skips is False  # no module owns the branch, so nothing can be silenced


def test_a_weight_used_along_both_axes_is_listed_as_unhandled():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 12)
            self.square = nn.Parameter(torch.randn(12, 12))
            self.head = nn.Linear(12, 40)

        def forward(self, ids):
            x = self.table(ids)
            return self.head(x @ self.square + x @ self.square.T)

    found = anatomy.examine(seeded(Both), input_ids=IDS)
    assert [(u.name, "different axes" in u.reason) for u in found.unhandled] == [("square", True)]
    assert "square" not in {m.name for m in found.matrices}
    assert found.accounted.fraction < 1
