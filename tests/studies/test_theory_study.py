"""Simulation bears out the closed forms, and a wrong form is caught."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from tiny import tiny_llama, tiny_tokenizer

from ternary_probe import anatomy, simulators, theory
from ternary_probe.errors import ProbeError
from ternary_probe.records import TheoryRecord, load_record
from ternary_probe.studies.real_stack import real_stack
from ternary_probe.studies.theory import TheoryOptions, critical_value, run_theory
from ternary_probe.text import Text, make_windows, read_text

QUICK = {"rates": (0.01, 0.1), "width": 256, "inputs": 64, "layers": 3}
TEXT = "Salt keeps the road clear and eats the bridge that carries it, a little every winter. " * 12


def quick(first: int = 0, number: int = 24, **changes) -> TheoryOptions:
    return TheoryOptions(**(QUICK | {"seeds": tuple(range(first, first + number))} | changes))


@pytest.fixture(scope="module")
def record() -> TheoryRecord:
    return run_theory(quick())


def test_every_closed_form_holds_on_one_run(record):
    assert (record.verdict, record.reason, record.status) == ("pass", "", "ok")
    assert record.comparisons == 2 * 5 + 6 * 6 + 2 * 3
    compared = [row.agrees for row in (*record.two_layer, *record.noise_shapes, *record.depth)]
    compared += [found.agrees for row in record.two_layer for found in (row.radial_sign, row.radial_magnitude)]
    compared += [found.agrees for row in record.quantizers for found in row.simulated.values()]
    assert len(compared) == record.comparisons
    assert all(compared)


@pytest.mark.parametrize("first", [100, 400])
def test_a_correct_program_passes_on_other_seeds(first):
    assert run_theory(quick(first)).verdict == "pass"


def test_simulated_figures_are_the_simulators_own(record):
    sample = simulators.two_layer(0.1, width=256, inputs=64, seeds=range(24))
    values = sample.ratio().per_seed.numpy()
    row = record.two_layer[1]

    low, high = stats.t.interval(0.95, 23, loc=values.mean(), scale=stats.sem(values))
    assert row.ratio_simulated == pytest.approx(values.mean(), rel=1e-9)
    assert row.standard_error == pytest.approx(stats.sem(values), rel=1e-9)
    assert (row.ci_low, row.ci_high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))
    assert row.ratio_exact == pytest.approx(2.2920, abs=5e-5)
    assert row.ratio_authors == pytest.approx(2.176, abs=5e-4)
    assert (row.ratio_paper, row.ratio_paper_spread) == (2.299, 0.008)


def test_quantizer_rows_carry_closed_forms_and_the_published_figure(record):
    rows = {row.scheme: row for row in record.quantizers}

    assert rows["sign"].cos2 == pytest.approx(2 / np.pi)
    assert rows["sign"].published == {"radial_post": 0.365}
    assert rows["absmean"].radial_post == pytest.approx(0.65918, abs=5e-6)
    assert rows["optimal"].output_cos2 == pytest.approx(float((2 * theory.kappa(rows["optimal"].cos2 ** 0.5)) ** 2))
    for row in rows.values():
        for name, found in row.simulated.items():
            assert found.simulated == pytest.approx(getattr(row, name), abs=0.03), (row.scheme, name)


def test_output_cosine_equals_a_dense_one():
    width, seed = 48, 3
    arm = {"half": lambda w: torch.where(w.abs() > w.abs().median(), w, 0)}
    sample = simulators.two_layer(
        0.1, noises=(), quantizers=arm, width=width, inputs=9, seeds=[seed], dtype=torch.float64, chunk=4
    )
    first, second = (
        simulators._gaussian((width, width), seed, purpose).div_(width**0.5).double()
        for purpose in (simulators._WEIGHT, simulators._SECOND)
    )
    x = torch.nn.functional.normalize(simulators._gaussian((9, width), seed, simulators._INPUT), dim=1).double()
    clean, other = (torch.relu(x @ w.T) @ second.T for w in (first, arm["half"](first)))
    along = ((clean * other).sum(1) / clean.norm(dim=1)).square().sum()

    assert float(sample.output_cos2("half").value) == pytest.approx(float(along / other.square().sum()), rel=1e-6)


def test_depth_rows_stand_beside_the_published_series(record):
    without = [row for row in record.depth if not row.residual]

    assert [row.published for row in without] == [3.617, 3.494, 3.351]
    assert [row.exact for row in without] == pytest.approx(list(theory.depth_ratio(0.01, 3, residual=False)))
    assert {row.weights for row in record.depth} == {"random"}


def test_the_verdict_shares_its_level_among_all_comparisons():
    options = quick()
    alone = stats.t.sf(critical_value(options), 23) * 2
    assert alone * options.comparisons == pytest.approx(0.01)


WRONG = {
    "ratio of the authors' asymptotics": ("exact_ratio", lambda rate, *, width=None: theory.authors_ratio(rate)),
    "depth without residual given for both": (
        "depth_ratio",
        lambda rate, layers, *, residual, width=None: theory.__dict__["_right_depth"](rate, layers, residual=False),
    ),
    "energy of flips 8 % too large": (
        "flip_transverse_energy",
        lambda rate, *, width=None: 1.08 * theory.__dict__["_right_energy"](rate),
    ),
}


@pytest.mark.parametrize(("name", "form"), WRONG.values(), ids=WRONG)
def test_a_wrong_closed_form_fails(monkeypatch, name, form):
    monkeypatch.setitem(theory.__dict__, "_right_depth", theory.depth_ratio)
    monkeypatch.setitem(theory.__dict__, "_right_energy", theory.flip_transverse_energy)
    monkeypatch.setattr(theory, name, form)

    found = run_theory(quick())

    assert (found.verdict, found.status) == ("fail", "failed")
    assert "missed by more than its interval allows" in found.reason


@pytest.mark.parametrize("scheme", ["sign", "planes:2"])
def test_a_wrong_quantizer_constant_fails_and_is_named(monkeypatch, scheme):
    right = theory.gaussian_quantizer

    def wrong(name: str) -> theory.QuantizerConstants:
        constants = right(name)
        return constants._replace(cos2=constants.cos2 - 0.02) if name == scheme else constants

    monkeypatch.setattr(theory, "gaussian_quantizer", wrong)

    found = run_theory(quick(depth=False))

    assert found.verdict == "fail"
    assert found.reason.endswith(f": cos2 of {scheme}")


def test_one_seed_or_a_coarse_run_tests_nothing():
    one, two = (run_theory(quick(number=number, depth=False)) for number in (1, 2))

    assert (one.verdict, one.two_layer[0].agrees, one.two_layer[0].ci_low) == ("inconclusive", None, None)
    assert two.verdict == "inconclusive"
    assert "use more --seeds" in two.reason


def test_a_record_reads_back_as_it_was(record, tmp_path):
    assert load_record(record.save(tmp_path / "theory.json")) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": (0.0,)}, "flip rate"),
        ({"rates": ()}, "no rate"),
        ({"rates": (0.01, 0.01)}, "twice"),
        ({"width": 64}, "at least 128"),
        ({"rates": (0.0001,)}, "--width 1000 or more"),
        ({"confidence": 1.0}, "--confidence"),
        ({"seeds": ()}, "--seeds"),
    ],
)
def test_what_cannot_be_tested_is_refused(changes, message):
    with pytest.raises(ProbeError, match=message):
        quick(**changes)


# A real model's matrices


@pytest.fixture(scope="module")
def tiny():
    model = tiny_llama(num_hidden_layers=3)
    windows = make_windows(Text(TEXT, "test", "none"), tiny_tokenizer(), window=40, windows=1)
    return model, anatomy.examine(model), windows


def test_a_real_stack_is_crops_of_one_role_and_the_first_ones_inputs(tiny):
    model, examined, windows = tiny
    seen = []
    first = model.model.layers[0].mlp.up_proj
    handle = first.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].clone()))
    with torch.no_grad():
        model(input_ids=windows.inputs[:1])
    handle.remove()

    stack = real_stack(examined, windows, role="up_proj", layers=2, inputs=10)

    assert (stack.role, len(stack.matrices), len(stack.names)) == ("up_proj", 2, 2)
    for layer, crop in enumerate(stack.matrices):
        torch.testing.assert_close(crop, model.model.layers[layer].mlp.up_proj.weight[:32, :32], rtol=0, atol=0)
    torch.testing.assert_close(stack.hidden_states, seen[0][:10], rtol=1e-5, atol=1e-6)


def test_the_default_role_is_the_widest_reader_of_the_stream(tiny):
    _, examined, windows = tiny
    assert real_stack(examined, windows).role == "gate_proj"
    with pytest.raises(ProbeError, match="there are q_proj, k_proj, v_proj, gate_proj, up_proj"):
        real_stack(examined, windows, role="down_proj")


def test_depth_runs_on_real_matrices_and_hidden_states(demo_model):
    text = read_text(None)
    windows = make_windows(text, demo_model.tokenizer, window=24, windows=1)
    before = {name: p.clone() for name, p in demo_model.model.named_parameters() if ".mlp.gate_proj" in name}
    options = quick(number=3, rates=(0.1,), layers=2)

    found = run_theory(options, loaded=demo_model, windows=windows, role="gate_proj")

    rows = [row for row in found.depth if row.weights == "gate_proj"]
    stack = real_stack(anatomy.examine(demo_model.model), windows, role="gate_proj", layers=2, inputs=64)
    assert stack.matrices[0].shape == (576, 576)
    assert stack.hidden_states.shape == (24, 576)
    for residual in (False, True):
        sample = simulators.depth(
            2, 0.01, residual=residual, matrices=stack.matrices, hidden_states=stack.hidden_states, seeds=range(3)
        )
        expected = (sample.sign / sample.magnitude).mean(0)
        measured = [row.simulated for row in rows if row.residual == residual]
        assert measured == pytest.approx(expected.tolist(), rel=1e-6)
        assert all(value > 1 for value in measured)  # signs matter more on trained weights as well
    assert all(row.agrees is None and row.exact is None for row in rows)
    assert [row.published for row in rows] == [3.494, 3.355, None, None]
    assert found.stack == stack.names
    assert found.protocol is not None
    for name, parameter in demo_model.model.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])
