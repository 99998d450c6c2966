"""Input activations: equal to what plain hooks see, expert by expert, and the amplitudes made from them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zoo
from transformers.activations import ACT2FN

from ternary_probe import anatomy
from ternary_probe.measure import Activations, InputMoments, NonFiniteError, measure_activations, outlier_amplitude
from ternary_probe.measure.activations import column_energy
from ternary_probe.perturb import top_columns


def text_of(ids):
    return SimpleNamespace(inputs=ids)


def inputs_of_modules(model, names, ids):
    """All inputs of some modules over a text, one window at a time, float64 ``[tokens, width]``."""
    seen = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, name=name: seen[name].append(args[0].detach().reshape(-1, args[0].shape[-1]).double())
        )
        for name in names
    ]
    with torch.no_grad():
        for row in ids:
            model(row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).numpy() for name, parts in seen.items()}


def assert_moments(moments, inputs, rtol):
    np.testing.assert_allclose(moments.energy, (inputs**2).mean(0), rtol=rtol, atol=1e-30)
    np.testing.assert_allclose(moments.mean_abs, np.abs(inputs).mean(0), rtol=rtol, atol=1e-30)
    assert moments.tokens == inputs.shape[0]
    assert moments.energy.dtype == moments.mean_abs.dtype == np.float64


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "granite"])
def test_moments_and_alpha_equal_a_dense_recomputation_with_hooks(name):
    model, ids = zoo.build(name), zoo.token_ids(3, 24)
    found = anatomy.examine(model)
    measured = measure_activations(found, text_of(ids))
    modules = {m.name: m.name.removesuffix(".weight") for m in found.block_matrices}
    dense = inputs_of_modules(model, modules.values(), ids)
    assert measured.moments.keys() == modules.keys()
    for matrix, module in modules.items():
        x = dense[module]
        assert_moments(measured.moments[matrix], x, 1e-6)
        alpha = measured.moments[matrix].alpha
        assert (alpha**2).sum() == pytest.approx(1, rel=1e-12)
        np.testing.assert_allclose(alpha, np.sqrt((x**2).mean(0) / (x**2).sum(1).mean()), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
    ids=str,
)
def test_accumulation_loses_nothing_in_any_dtype(dtype, rtol):
    model, ids = zoo.build("llama", dtype), zoo.token_ids(2, 24)
    found = anatomy.examine(model)
    name = "model.layers.1.mlp.down_proj"
    dense = inputs_of_modules(model, [name], ids)[name]
    measured = measure_activations(found, text_of(ids), [found.matrix(f"{name}.weight")])
    assert list(measured.moments) == [f"{name}.weight"]
    assert_moments(measured.moments[f"{name}.weight"], dense, rtol)


def test_measuring_leaves_no_hook_and_no_changed_weight():
    model = zoo.build("mixtral")
    found = anatomy.examine(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    measure_activations(found, text_of(zoo.token_ids()))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def routed_inputs(model, block, ids):
    """What each expert of a block is given, from the router's own choice: rows into gate_up, then rows into down."""
    experts = model.model.layers[block].mlp.experts
    calls = []
    handle = experts.register_forward_pre_hook(lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        for row in ids:
            model(row[None], use_cache=False)
    handle.remove()
    act = ACT2FN[model.config.hidden_act]
    up, down = {}, {}
    for args, kwargs in calls:
        hidden, chosen = (*args, *kwargs.values())[:2]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        for expert in range(model.config.num_local_experts):
            rows = hidden[(chosen == expert).any(-1)].double()
            if not rows.shape[0]:
                continue
            gate, value = (rows @ experts.gate_up_proj[expert].double().t()).chunk(2, -1)
            up.setdefault(expert, []).append(rows)
            down.setdefault(expert, []).append(act(gate) * value)
    return ({e: torch.cat(parts).numpy() for e, parts in side.items()} for side in (up, down))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("tokens", [24, 1])
def test_an_expert_sees_the_tokens_routed_to_it_and_no_other(implementation, tokens):
    model = zoo.build("mixtral", experts_implementation=implementation)
    found = anatomy.examine(model)
    ids = zoo.token_ids(2, tokens)
    measured = measure_activations(found, text_of(ids)).moments
    reached = 0
    for block in range(2):
        up, down = routed_inputs(model, block, ids)
        for expert in range(4):
            name = f"model.layers.{block}.mlp.experts.{{}}[{expert}]"
            if expert not in up:
                assert name.format("gate_up_proj") not in measured
                assert name.format("down_proj") not in measured
                continue
            reached += 1
            assert_moments(measured[name.format("gate_up_proj")], up[expert], 1e-5)
            assert_moments(measured[name.format("down_proj")], down[expert], 1e-4)
        assert sum(rows.shape[0] for rows in up.values()) == 2 * ids.numel()
    assert reached == 8 if tokens > 1 else reached < 8


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_the_head_is_measured_when_asked_for(name):
    model, ids = zoo.build(name), zoo.token_ids(2, 24)
    found = anatomy.examine(model)
    head = found.head_matrix
    assert head.block is None
    dense = inputs_of_modules(model, ["lm_head"], ids)["lm_head"]
    measured = measure_activations(found, text_of(ids), [head, found.block_matrices[0]])
    assert_moments(measured.moments[head.name], dense, 1e-6)
    assert measured.moments[found.block_matrices[0].name].tokens == ids.numel()


def test_windows_of_two_texts_add_up():
    model, ids = zoo.build("llama"), zoo.token_ids(4, 16)
    found = anatomy.examine(model)
    both, first, second = (measure_activations(found, text_of(part)).moments for part in (ids, ids[:1], ids[1:]))
    for name, moments in both.items():
        expected = (first[name].energy * first[name].tokens + second[name].energy * second[name].tokens) / ids.numel()
        np.testing.assert_allclose(moments.energy, expected, rtol=1e-12)


def test_a_value_that_is_not_finite_is_named():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj\.weight is not finite at feature 5"):
        measure_activations(found, text_of(zoo.token_ids()))


def moments(energy, mean_abs):
    return InputMoments(np.asarray(energy, dtype=float), np.asarray(mean_abs, dtype=float), 10)


def test_energy_and_mean_abs_may_choose_other_columns():
    # Column 1 is rarely large, column 3 is always middling.
    measured = Activations({"w": moments([1, 100, 2, 50, 3], [1, 2, 1.2, 7, 1.5])})
    assert measured.outlier_columns(0.2, "energy") == {"w": (1,)}
    assert measured.outlier_columns(0.2, "mean_abs") == {"w": (3,)}
    assert measured.outlier_columns(0.4, "energy") == measured.outlier_columns(0.4, "mean_abs") == {"w": (1, 3)}
    assert measured.outlier_columns(0.19, "energy") == {"w": ()}


@pytest.mark.parametrize("by", ["energy", "mean_abs"])
def test_outlier_columns_are_the_largest_of_a_dense_ranking(by):
    model, ids = zoo.build("gpt2"), zoo.token_ids(2, 24)
    found = anatomy.examine(model)
    chosen = measure_activations(found, text_of(ids)).outlier_columns(0.25, by)
    dense = inputs_of_modules(model, [name.removesuffix(".weight") for name in chosen], ids)
    for name, columns in chosen.items():
        x = dense[name.removesuffix(".weight")]
        score = (x**2).mean(0) if by == "energy" else np.abs(x).mean(0)
        assert len(columns) == int(0.25 * score.size)
        assert score[list(columns)].min() > np.delete(score, columns).max()


@pytest.mark.parametrize(("n", "count"), [(2048, 102), (5632, 281), (576, 28), (19, 0), (20, 1)])
def test_five_percent_of_the_columns_are_counted_as_in_the_paper(n, count):
    assert len(top_columns(np.arange(n), 0.05)) == count


def test_equal_scores_go_to_the_lower_column():
    assert top_columns(np.array([1.0, 3.0, 3.0, 3.0, 0.0]), 0.4) == (1, 2)
    assert top_columns(np.ones(10), 0.3) == (0, 1, 2)


def test_amplitudes_of_equal_columns_are_one():
    amplitude = outlier_amplitude(moments(np.full(20, 0.3), np.ones(20)), (3,), None)
    assert amplitude.n_alpha2_outlier == pytest.approx(1)
    assert amplitude.n_alpha2_other == pytest.approx(1)
    assert amplitude.weighted_outlier == pytest.approx(1)
    assert amplitude.energy_share == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_amplitudes_equal_the_damage_of_single_flips_counted_one_by_one(name):
    """A flip of W_ij moves output i by 2 W_ij x_j: the mean square over an outlier's entries against that over all."""
    model, ids = zoo.build(name), zoo.token_ids(2, 24)
    found = anatomy.examine(model)
    matrix = found.block_matrices[-1]
    module = matrix.name.removesuffix(".weight")
    x = inputs_of_modules(model, [module], ids)[module]
    weight = model.get_parameter(matrix.name).double()
    weight = (weight.t() if name == "gpt2" else weight).numpy()
    measured = measure_activations(found, text_of(ids))
    columns = measured.outlier_columns(0.1, "energy")[matrix.name]
    amplitude = outlier_amplitude(measured.moments[matrix.name], columns, matrix)
    assert column_energy(matrix) == pytest.approx((weight**2).mean(0), rel=1e-6)

    damage = np.array([[((2 * weight[i, j] * x[:, j]) ** 2).mean() for j in range(x.shape[1])] for i in range(8)])
    full = np.einsum("ij,j->ij", 4 * weight**2, (x**2).mean(0))
    np.testing.assert_allclose(full[:8], damage, rtol=1e-9)
    others = np.setdiff1d(np.arange(x.shape[1]), columns)
    assert amplitude.weighted_outlier == pytest.approx(full[:, columns].mean() / full.mean(), rel=1e-5)
    assert amplitude.weighted_other == pytest.approx(full[:, others].mean() / full.mean(), rel=1e-5)
    share = (x[:, columns] ** 2).sum() / (x**2).sum()
    assert amplitude.energy_share == pytest.approx(share, rel=1e-5)
    assert amplitude.n_alpha2_outlier == pytest.approx(x.shape[1] * share / len(columns), rel=1e-5)
    assert amplitude.n_alpha2_other == pytest.approx(x.shape[1] * (1 - share) / len(others), rel=1e-5)
