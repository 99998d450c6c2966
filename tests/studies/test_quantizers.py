"""The quantizer study against dense recomputation: a copy of the model with its quantized weights put in."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from small_study import cut, loaded_llama

from ternary_probe import anatomy, ternary
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import sha256_weights
from ternary_probe.records import QuantizedArm, load_record
from ternary_probe.studies.quantizers import QuantizeOptions, _Study, kinship, run_quantizers
from ternary_probe.studies.radial import find_writers, radial_fraction

SCHEMES = ("absmean", "optimal@g16")
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def loaded():
    return loaded_llama()


@pytest.fixture(scope="module")
def windows():
    return cut(2)


@pytest.fixture(scope="module")
def record(loaded, windows):
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    found = run_quantizers(loaded, windows, QuantizeOptions(schemes=SCHEMES, seeds=SEEDS))
    changed = [name for name, p in loaded.model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == [], "the study left weights behind"
    return found


def block_linears(model) -> dict[str, torch.nn.Linear]:
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n}


def ternarized(model, scheme: str):
    """A copy of the model whose block linears hold their quantized values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for linear in block_linears(other).values():
            linear.weight.copy_(ternary.quantize(linear.weight, scheme).dequantize(linear.weight.dtype))
    return other


def log_probabilities(model, windows) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=windows.inputs).logits.double().log_softmax(-1)


# Figures


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_damage_figure_equals_a_dense_recomputation(loaded, windows, record, scheme):
    arm = next(a for a in record.quantized if a.arm == "ternary" and a.scheme.startswith(scheme))
    other = ternarized(loaded.model, scheme)
    clean, now = (log_probabilities(model, windows) for model in (loaded.model, other))
    targets, scored = windows.targets[..., None], windows.scored
    delta = (clean.gather(-1, targets) - now.gather(-1, targets)).squeeze(-1)
    forward, reverse = (clean.exp() * (clean - now)).sum(-1)[scored], (now.exp() * (now - clean)).sum(-1)[scored]
    by_window = np.array([float(delta[i][scored[i]].mean()) for i in range(len(delta))])
    low, high = stats.t.interval(0.95, 1, loc=by_window.mean(), scale=stats.sem(by_window))
    base = -clean.gather(-1, targets).squeeze(-1)[scored].mean()
    squares = [(p.double() - q.double()).square().sum() for p, q in pairs(loaded.model, other)]
    norms = [p.double().square().sum() for p, _ in pairs(loaded.model, other)]

    assert arm.delta_nll == pytest.approx(float(delta[scored].mean()), abs=1e-5)
    assert (arm.ci_low, arm.ci_high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert arm.delta_ppl == pytest.approx(float((base + delta[scored].mean()).exp() - base.exp()), rel=1e-4)
    assert arm.kl == pytest.approx(float(forward.mean()), rel=1e-4)
    assert arm.kl_reverse == pytest.approx(float(reverse.mean()), rel=1e-4)
    assert arm.kl_quantiles == pytest.approx(
        [*np.quantile(forward, (0.5, 0.9, 0.99, 0.999)), float(forward.max())], rel=1e-4
    )
    same = (clean.argmax(-1) == now.argmax(-1))[scored]
    assert arm.top1_agreement == pytest.approx(float(same.double().mean()))
    assert arm.relative_norm == pytest.approx(float((sum(squares) / sum(norms)) ** 0.5), rel=1e-6)
    assert arm.checksum_before == arm.checksum_after != arm.checksum_during


def pairs(model, other):
    theirs = block_linears(other)
    return [(linear.weight, theirs[name].weight) for name, linear in block_linears(model).items()]


def test_matrix_figures_equal_dense_ones(loaded, record):
    linears = block_linears(loaded.model)
    rows = [m for m in record.matrices if m.scheme == "absmean@tensor"]

    assert {m.matrix for m in rows} == set(linears)
    for row in rows:
        w = linears[row.matrix].weight.double().numpy()
        scale = np.abs(w).mean()
        q = scale * np.clip(np.round(w / scale), -1, 1)
        assert row.cos2 == pytest.approx((w * q).sum() ** 2 / (w**2).sum() / (q**2).sum(), rel=1e-5)
        assert row.relative_error == pytest.approx(((q - w) ** 2).sum() / (w**2).sum(), rel=1e-5)
        assert row.sparsity == pytest.approx((q == 0).mean(), abs=1e-9)
        assert row.cos2_gaussian == pytest.approx(0.78696, abs=5e-6)
        assert row.bits_per_weight == pytest.approx(2 + 32 / w.size)
        assert row.grid is None


def test_the_record_has_every_arm_and_reads_back(record, tmp_path):
    arms = [(a.scheme, a.arm, a.seed) for a in record.quantized]
    kinds = [("ternary", None), *((kind, seed) for seed in SEEDS for kind in ("sign_flip", "magnitude"))]

    assert arms == [(scheme, *kind) for scheme in ("absmean@tensor", "optimal@g16") for kind in kinds]
    assert {(k.scheme, k.response) for k in record.kinship} == {
        (s, r) for s in ("absmean@tensor", "optimal@g16") for r in ("nll", "kl")
    }
    assert load_record(record.save(tmp_path / "record.json")) == record


def test_energies_are_those_of_the_quantized_copy(loaded, windows, record):
    first = windows.inputs[:1]
    clean, now = (
        norm_inputs(model, "model.norm", first) for model in (loaded.model, ternarized(loaded.model, "absmean"))
    )
    unit = clean / clean.norm(dim=-1, keepdim=True)
    change = now - clean
    along = (unit * change).sum(-1).square().sum()
    row = next(e for e in record.energies if (e.scheme, e.arm, e.norm) == ("absmean@tensor", "ternary", "model.norm"))

    assert row.position == "final"
    assert row.total == pytest.approx(float(change.square().sum() / clean.square().sum()), rel=1e-4)
    assert row.radial_fraction == pytest.approx(float(along / change.square().sum()), rel=1e-4)
    assert row.transverse == pytest.approx(row.total * (1 - row.radial_fraction), rel=1e-6)


def norm_inputs(model, name: str, inputs: torch.Tensor) -> torch.Tensor:
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].double()))
    with torch.no_grad():
        model(input_ids=inputs)
    handle.remove()
    return seen[0]


# Controls of equal norm


@pytest.fixture(scope="module")
def controls(loaded, windows):
    """Energy of every matrix's change: quantizer, flips and magnitude noise by seed."""
    examined = anatomy.examine(loaded.model)
    options = QuantizeOptions(seeds=tuple(range(40)))
    study = _Study(examined, windows, options, lambda done, total, label: None)
    recipe = options.recipe("absmean")
    linears = block_linears(loaded.model)
    before = {name: linear.weight.double().clone() for name, linear in linears.items()}
    errors = {
        name: ternary.quantization_error(linear.weight, ternary.quantize(linear.weight, "absmean")).relative_error
        for name, linear in linears.items()
    }
    energies: dict[str, list[dict[str, float]]] = {"ternary": [], "sign_flip": [], "magnitude": []}
    for arm, perturbation in study._perturbations(recipe, errors):
        with perturbation.applied(examined):
            energies[arm].append({
                name: float((linear.weight.double() - before[name]).square().sum()) for name, linear in linears.items()
            })
    return energies


def test_sign_flips_have_the_quantizers_norm_in_expectation(controls):
    expected = controls["ternary"][0]
    for name, energy in expected.items():
        drawn = np.array([draw[name] for draw in controls["sign_flip"]])
        assert abs(drawn.mean() / energy - 1) < 0.01 + 4 * stats.sem(drawn) / energy, name
    total = np.mean([sum(draw.values()) for draw in controls["sign_flip"]])
    assert total == pytest.approx(sum(expected.values()), rel=0.02)


def test_magnitude_noise_has_its_flips_norm_in_every_matrix_and_draw(controls):
    assert len(controls["magnitude"]) == len(controls["sign_flip"]) == 40
    for flip, noise in zip(controls["sign_flip"], controls["magnitude"], strict=True):
        for name, energy in flip.items():
            assert noise[name] == pytest.approx(energy, rel=1e-4), name


def test_controls_differ_between_seeds(controls):
    assert controls["sign_flip"][0] != controls["sign_flip"][1]


# Radial fraction of each matrix's own error


NEXT_NORM = {
    "model.layers.0.self_attn.o_proj.weight": "model.layers.0.post_attention_layernorm",
    "model.layers.0.mlp.down_proj.weight": "model.layers.1.input_layernorm",
    "model.layers.1.self_attn.o_proj.weight": "model.layers.1.post_attention_layernorm",
    "model.layers.1.mlp.down_proj.weight": "model.norm",
}


@pytest.mark.parametrize("scheme", ["absmean", "sign"])
def test_radial_fractions_equal_what_arrives_at_the_next_norm(loaded, windows, scheme):
    examined = anatomy.examine(loaded.model)
    writers = find_writers(examined, windows, examined.block_matrices)
    found = {
        m.name: radial_fraction(writers[m.name], m, ternary.quantize(m.view(), scheme)) for m in examined.block_matrices
    }
    for name, norm in NEXT_NORM.items():
        other = copy.deepcopy(loaded.model)
        weight = other.get_parameter(name)
        with torch.no_grad():
            weight.copy_(ternary.quantize(weight, scheme).dequantize())
        y = norm_inputs(loaded.model, norm, windows.inputs[:1])
        change = norm_inputs(other, norm, windows.inputs[:1]) - y
        along = ((y / y.norm(dim=-1, keepdim=True)) * change).sum(-1).square().sum()
        assert found[name].note == norm
        assert found[name].value == pytest.approx(float(along / change.square().sum()), rel=1e-3), name


def test_a_matrix_that_does_not_write_to_the_stream_has_no_radial_fraction(record):
    for row in record.matrices:
        assert (row.radial_fraction is None) == (row.matrix not in NEXT_NORM), row.matrix
        if row.radial_fraction is None:
            assert row.radial_note == "does not write to the residual stream"


def test_radial_fractions_leave_every_bit_as_it_was(loaded, windows):
    before = sha256_weights(loaded.model)
    examined = anatomy.examine(loaded.model)
    find_writers(examined, windows, examined.block_matrices)
    assert sha256_weights(loaded.model) == before


# Planted outliers


@pytest.fixture(scope="module")
def planted(loaded, windows):
    options = QuantizeOptions(schemes=("absmean",), seeds=(), plant=(1.0, 4.0, 16.0, 0.25, 0.0625))
    before = sha256_weights(loaded.model)
    rows = run_quantizers(loaded, windows, options).planted
    assert sha256_weights(loaded.model) == before
    return {row.k: row for row in rows}


def test_planting_alone_changes_nothing_but_rounding(planted):
    assert len(planted) == 5
    assert all(abs(row.baseline_shift) < 1e-5 for row in planted.values())
    assert planted[1.0].baseline_shift == 0


def test_a_strength_of_one_is_the_plain_quantizer(record, planted):
    plain = next(a for a in record.quantized if a.arm == "ternary" and a.scheme == "absmean@tensor")
    assert planted[1.0].delta_nll == pytest.approx(plain.delta_nll, abs=1e-6)
    assert planted[1.0].relative_error == pytest.approx(plain.relative_norm**2, rel=1e-9)


def test_the_error_of_absmean_grows_with_the_strength_on_either_side(planted):
    shrunk, grown = ([planted[k].relative_error for k in side] for side in ((1.0, 4.0, 16.0), (1.0, 0.25, 0.0625)))

    assert shrunk == sorted(shrunk)
    assert shrunk[2] > 1.05 * shrunk[0]  # small columns pull the mean down, and round to 0
    assert grown == sorted(grown)
    assert grown[2] > 2 * grown[0]  # one scale for outlier weights and the rest


# Which noise does it resemble?


def made(arm: str, *figures: float | None) -> list[QuantizedArm]:
    bare = {"relative_norm": 0.5, "ci_low": None, "ci_high": None, "delta_ppl": None, "kl_reverse": None}
    proof = {"top1_agreement": None, "checksum_before": "1", "checksum_during": "2", "checksum_after": "1"}
    return [
        QuantizedArm(scheme="s", arm=arm, seed=seed, delta_nll=value, kl=value, recipe=arm, **bare, **proof)
        for seed, value in enumerate(figures)
    ]


@pytest.mark.parametrize(
    ("ternary_figure", "expected", "words"),
    [
        (0.99, "sign_flip", "within that control's interval"),
        (0.31, "magnitude", "within that control's interval"),
        (0.65, "between", "50% of the way"),
        (1.5, "beyond", "above"),
        (0.1, "beyond", "below"),
    ],
)
def test_the_verdict_is_taken_against_both_controls_intervals(ternary_figure, expected, words):
    arms = made("ternary", ternary_figure) + made("sign_flip", 0.98, 1.0, 1.02) + made("magnitude", 0.29, 0.3, 0.31)

    verdicts = list(kinship(arms))

    assert [v.response for v in verdicts] == ["nll", "kl"]
    for found in verdicts:
        assert found.acts_like == expected
        assert words in found.reason
        assert (found.ternary, found.sign_flip, found.magnitude) == (
            pytest.approx(ternary_figure),
            pytest.approx(1.0),
            pytest.approx(0.3),
        )


def test_a_verdict_is_undecided_without_two_finite_seeds_of_both_controls():
    arms = made("ternary", 0.5) + made("sign_flip", 1.0, 1.1) + made("magnitude", 0.3, None)
    assert {v.acts_like for v in kinship(arms)} == {"undecided"}


def test_a_verdict_is_undecided_where_both_intervals_hold_the_figure():
    arms = made("ternary", 0.5) + made("sign_flip", 0.2, 0.9) + made("magnitude", 0.1, 0.8)
    assert {v.acts_like for v in kinship(arms)} == {"undecided"}


# Refusals


def test_a_targeted_head_is_refused(loaded, windows):
    with pytest.raises(ProbeError, match=r"lm_head.*--exclude"):
        run_quantizers(loaded, windows, QuantizeOptions(include=("*",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ()}, "--scheme"),
        ({"schemes": ("absmean", "absmean@tensor")}, "twice"),
        ({"schemes": ("nf4",)}, "nf4"),
        ({"plant": (0.0,)}, "positive"),
        ({"plant": (float("inf"),)}, "positive"),
    ],
)
def test_options_that_name_nothing_are_refused(changes, message):
    with pytest.raises(ProbeError, match=message):
        QuantizeOptions(**changes)


def test_patterns_blocks_and_roles_choose_the_matrices(loaded, windows):
    options = QuantizeOptions(seeds=(), blocks="1", roles=("*_proj",), exclude=("*self_attn*", "*mlp.[gu]*"))
    found = run_quantizers(loaded, windows, options)
    assert [m.matrix for m in found.matrices] == ["model.layers.1.mlp.down_proj.weight"]
    assert [a.arm for a in found.quantized] == ["ternary"]
