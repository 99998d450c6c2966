"""The response checks on tiny models: what passes, what fails, what is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gates.candidates import OPTIONS, candidate_of, evidence_for, findings, noisy, only, permuted, subject, with_nan
from gates.test_sample_logs import sample, write
from small_study import loaded_llama, tokenizer

from ternary_probe.gates import Evidence, GateOptions, Policy, all_checks, load_policy, run_gate
from ternary_probe.loading import wrap

CANDIDATE = ("candidate-agreement", "candidate-kl", "candidate-nll", "decision-margin")
OWN = (*CANDIDATE, "base-precision", "flip-response", "leverage", "task-accuracy")
SMALL = noisy(0.002)
LARGE = noisy(0.5)


def sharpened(model) -> None:
    model.lm_head.weight.mul_(3)


def flattened(model) -> None:
    model.lm_head.weight.mul_(0.5)


STRICT = {
    "candidate-agreement": {"min_agreement": 1.0},
    "candidate-kl": {"max_kl": 0.0},
    "candidate-nll": {"max_delta_nll": 0.0},
    "decision-margin": {"min_factor": 0.999},
}
STUDY = {"rate": 0.05, "seeds": 4, "windows": 2}


def policy(tmp_path: Path, text: str = "") -> Policy:
    """The default policy with only the response checks of this file on."""
    off = [name for name in all_checks() if name not in OWN]
    file = tmp_path / "policy.toml"
    file.write_text("".join(f'[checks."{name}"]\nseverity = "off"\n' for name in off) + text, encoding="utf-8")
    return load_policy(file)


def test_the_checks_are_registered_with_explained_thresholds_and_their_share_of_the_error_rate() -> None:
    tests = {"base-precision": 0, "flip-response": 2, "task-accuracy": 2}
    for name in OWN:
        check = all_checks()[name]
        assert check.tests == tests.get(name, 1)
        assert check.compares == (name not in {"flip-response", "leverage"})
        for field in check.limits.model_fields.values():
            assert field.description


def test_listing_the_checks_does_not_import_torch() -> None:
    code = "import sys; from ternary_probe.gates import all_checks; all_checks(); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", CANDIDATE)
def test_a_candidate_a_hair_away_passes_and_the_evidence_is_complete(name: str) -> None:
    finding = only(name, evidence_for(SMALL))

    assert finding.status == "pass", finding.message
    for key in ("smallest_detectable_difference", "windows", "tokens", "pass_error_rate", "fail_error_rate"):
        assert finding.details[key] is not None, key
    assert "can show a difference of" in finding.message
    assert "10 windows (310 tokens)" in finding.message


@pytest.mark.parametrize("name", CANDIDATE)
def test_a_ruined_candidate_fails(name: str) -> None:
    # Noise need not worsen a random model's NLL or margins: a head too sharp or too flat does.
    edit = {"candidate-nll": sharpened, "decision-margin": flattened}.get(name, LARGE)
    finding = only(name, evidence_for(edit))

    assert finding.status == "fail", finding.message
    assert "allowed" in finding.message


def test_figures_are_those_of_the_comparison() -> None:
    evidence = evidence_for(noisy(0.05))
    found = evidence.comparison

    assert only("candidate-nll", evidence).measured == pytest.approx(found.delta_nll.mean(), rel=1e-12)
    assert only("candidate-kl", evidence).measured == pytest.approx(found.kl.mean(), rel=1e-12)
    assert only("candidate-agreement", evidence).measured == pytest.approx(found.same_top.mean(), rel=1e-12)
    ratio = found.candidate_margin / found.base_margin
    assert only("decision-margin", evidence).measured == pytest.approx(np.median(ratio), rel=1e-12)


@pytest.mark.parametrize("name", ["candidate-kl", "candidate-agreement", "candidate-nll", "decision-margin"])
def test_between_pass_and_fail_it_is_undecided_and_says_how_much_text_would_decide(name: str) -> None:
    evidence = evidence_for(noisy(0.05))
    measured = only(name, evidence).measured
    [limit] = all_checks()[name].limits.model_fields
    worse = -1 if limit.startswith("min") else 1
    finding = only(name, evidence, **{limit: measured + worse * 0.02 * abs(measured)})

    assert finding.status == "inconclusive", finding.message
    wanted = re.search(r"about ([\d,]+) windows \(([\d,]+) tokens\) would decide", finding.message)
    assert wanted, finding.message
    assert finding.details["windows_to_decide"] == int(wanted[1].replace(",", "")) > 10
    assert finding.details["tokens_to_decide"] == pytest.approx(31 * finding.details["windows_to_decide"], abs=31)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["candidate-kl", "candidate-nll"])
def test_a_lossless_change_is_not_flagged_even_where_no_loss_is_allowed(name: str, dtype: torch.dtype) -> None:
    finding = only(name, evidence_for(permuted, dtype), **STRICT[name])

    assert finding.status == "pass", finding.message
    same_bits = dtype == torch.bfloat16 and finding.details.get("identical")  # as some CPUs' kernels give
    assert ("the same bits" if same_bits else "noise floor") in finding.message


@pytest.mark.parametrize("name", CANDIDATE)
def test_a_lossless_change_passes_by_default(name: str) -> None:
    assert only(name, evidence_for(permuted)).status == "pass"


@pytest.mark.parametrize("windows", [1, 10])
@pytest.mark.parametrize("name", CANDIDATE)
def test_a_candidate_equal_bit_for_bit_passes_with_a_doubt(name: str, windows: int) -> None:
    options = GateOptions(window=32, windows=windows)
    evidence = Evidence(subject(loaded_llama(), options), subject(loaded_llama(), options), options)
    finding = only(name, evidence, **STRICT[name])

    assert finding.status == "pass"
    assert "did the quantization take effect?" in finding.message


@pytest.mark.parametrize("name", CANDIDATE)
def test_one_window_decides_nothing(name: str) -> None:
    options = GateOptions(window=32, windows=1)
    evidence = Evidence(subject(candidate_of(LARGE), options), subject(loaded_llama(), options), options)

    finding = only(name, evidence)

    assert finding.status == "inconclusive"
    assert "use 8 or more" in finding.message


def test_a_broken_candidate_fails_every_comparison_by_name(tmp_path: Path) -> None:
    record = run_gate(loaded_llama(), candidate_of(with_nan), policy=policy(tmp_path), options=OPTIONS)
    found = {finding.check: finding for finding in record.findings}

    assert record.verdict == "fail"
    for name in CANDIDATE:
        assert found[name].status == "fail"
        assert "model.layers.1.mlp.up_proj.weight holds nan" in found[name].message


def test_a_broken_base_decides_nothing(tmp_path: Path) -> None:
    record = run_gate(candidate_of(with_nan, name="base"), loaded_llama(), policy=policy(tmp_path), options=OPTIONS)
    found = {finding.check: finding for finding in record.findings}

    assert record.verdict == "inconclusive"
    for name in CANDIDATE:
        assert found[name].status == "inconclusive"
        assert "the base base is broken" in found[name].message


def test_a_base_that_never_decides_has_no_margin_to_shrink() -> None:
    def undecided(model) -> None:
        model.lm_head.weight.zero_()

    evidence = Evidence(subject(loaded_llama()), subject(candidate_of(undecided, name="flat")), OPTIONS)

    assert only("decision-margin", evidence).status == "not_applicable"


def test_an_infinite_divergence_fails_and_never_passes() -> None:
    """A candidate that rules a token out altogether."""
    evidence = evidence_for(noisy(0.05))
    comparison = evidence.comparison
    infinite = comparison.kl.copy()
    infinite[7] = np.inf
    other = Evidence(evidence.subject, evidence.base, OPTIONS)
    other.__dict__["comparison"] = type(comparison)(**{**vars(comparison), "kl": infinite})

    finding = only("candidate-kl", other, max_kl=1e9)

    assert finding.status == "fail"
    assert "not finite" in finding.message


def test_a_quantized_base_is_named_like_for_like() -> None:
    def on_grid(model) -> None:
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in key:
                scale = parameter.abs().amax() / 3
                parameter.copy_((parameter / scale).round() * scale)

    full = loaded_llama()
    claims = candidate_of(lambda model: None, name="claims")
    claims.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    cases = {"grid": candidate_of(on_grid, name="grid"), "gptq": claims}

    for words, base in cases.items():
        finding = only("base-precision", Evidence(subject(full), subject(base), OPTIONS))
        assert finding.status == "fail"
        assert words in finding.message
        assert "like for like" in finding.message
    assert all_checks()["base-precision"].severity == "warn"
    assert only("base-precision", Evidence(subject(claims), subject(full), OPTIONS)).status == "pass"


def test_leverage_and_flip_response_share_one_study_and_match_it() -> None:
    from ternary_probe.gates._response_study import StudyLimits, small_study

    evidence = Evidence(subject(loaded_llama()), None, OPTIONS)
    limits = StudyLimits(**STUDY)
    study = small_study(evidence.subject, limits)
    assert small_study(evidence.subject, limits) is study

    nll, kl = findings("flip-response", evidence, **STUDY, max_delta_nll=5.0, max_kl=5.0)
    means = {(one.arm, one.response): one.mean for one in study.means}
    assert nll.measured == pytest.approx(means["all", "nll"], rel=1e-9)
    assert kl.measured == pytest.approx(means["all", "kl"], rel=1e-9)
    assert kl.status == "pass"
    [ratio] = [one for one in study.leverage if (one.response, one.denominator) == ("kl", "other")]
    finding = only("leverage", evidence, **STUDY)
    assert finding.measured == pytest.approx(ratio.ratio, rel=1e-9)


def test_flips_that_ruin_a_model_fail_and_an_impossible_leverage_too() -> None:
    evidence = Evidence(subject(loaded_llama()), None, OPTIONS)

    kl = findings("flip-response", evidence, **STUDY, max_kl=0.001)[1]
    assert kl.status == "fail"
    assert kl.details["seeds"] == 4
    steep = only("leverage", evidence, **STUDY, max_leverage=1.001)
    assert steep.status == "fail"
    assert "4 seeds can show a factor of" in steep.message


def test_packed_weights_have_no_signs_to_flip() -> None:
    loaded = loaded_llama()
    loaded.model.register_parameter(
        "packed", torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    )
    evidence = Evidence(subject(loaded), None, OPTIONS)

    for name in ("leverage", "flip-response"):
        [finding] = findings(name, evidence)
        assert finding.status == "not_applicable"
        assert finding.check == name


def logs(tmp_path: Path, lost: int, documents: int = 600) -> tuple[Path, Path]:
    for name, wrong in (("base", 0), ("quantized", lost)):
        for task in ("arc", "piqa"):
            rows = [sample(i, right=float(wrong <= i < documents // 2)) for i in range(documents)]
            write(tmp_path / name, task, rows)
    return tmp_path / "base", tmp_path / "quantized"


@pytest.mark.parametrize(
    ("lost", "status", "words"),
    [
        (0, "pass", "right on the same 1,200 documents"),
        (60, "fail", "120 lost, 0 gained; exact McNemar p ="),
        (5, "inconclusive", "documents would decide"),
    ],
)
def test_task_accuracy_decides_jointly(tmp_path: Path, lost: int, status: str, words: str) -> None:
    options = GateOptions(sample_logs=logs(tmp_path, lost))
    found = findings("task-accuracy", Evidence(subject(loaded_llama()), subject(loaded_llama()), options))
    joint = found[-1]

    assert joint.subject == ""
    assert joint.status == status, joint.message
    assert joint.measured == pytest.approx(lost / 600)
    assert words in joint.message
    assert joint.details["tasks"]["arc"]["lost"] == lost
    assert {finding.status for finding in found[:-1]} <= {"pass", "fail"}


def test_task_accuracy_without_logs_does_not_apply_and_bad_tasks_are_named(tmp_path: Path) -> None:
    assert (
        only("task-accuracy", Evidence(subject(loaded_llama()), subject(loaded_llama()), OPTIONS)).status
        == "not_applicable"
    )
    base, quantized = logs(tmp_path, 0)
    write(quantized, "arc", [sample(i, right=float("nan")) for i in range(600)])
    write(base, "boolq", [sample(0, right=1.0)])
    options = GateOptions(sample_logs=(base, quantized))

    found = findings("task-accuracy", Evidence(subject(loaded_llama()), subject(loaded_llama()), options))
    by_task = {finding.subject: finding for finding in found}

    assert by_task["arc"].status == "fail"
    assert "NaN" in by_task["arc"].message
    assert by_task["boolq"].status == "inconclusive"
    assert by_task[""].status == "pass"


def test_a_whole_gate_of_a_candidate_gives_a_verdict_with_a_shared_error_rate(tmp_path: Path) -> None:
    study = "[checks.flip-response]\nrate = 0.05\nseeds = 2\n[checks.leverage]\nrate = 0.05\nseeds = 2\n"
    chosen = policy(tmp_path, study)
    good = run_gate(loaded_llama(), candidate_of(SMALL), policy=chosen, options=OPTIONS)
    bad = run_gate(loaded_llama(), candidate_of(LARGE), policy=chosen, options=OPTIONS)

    assert good.verdict == "pass", [finding.message for finding in good.findings]
    assert bad.verdict == "fail"
    [kl] = [finding for finding in good.findings if finding.check == "candidate-kl"]
    assert kl.details["fail_error_rate"] == pytest.approx(0.05 / sum(all_checks()[name].tests for name in OWN))
    assert wrap(loaded_llama().model, tokenizer()).source.kind == "memory"
