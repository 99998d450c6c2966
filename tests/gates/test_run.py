"""Running checks: which are chosen, what an error of one does to the others, what the record says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gates.made_checks import Bounds, finding, install, made
from small_study import loaded_llama

from ternary_probe.anatomy import NonFiniteError
from ternary_probe.errors import ProbeError
from ternary_probe.gates import GateFailureError, GateOptions, Tier, assert_gate, load_policy, run_gate
from ternary_probe.records import GateRecord, load_record


def test_only_checks_of_the_asked_tiers_run_and_comparisons_need_a_candidate(monkeypatch) -> None:
    install(
        monkeypatch,
        made("files", finding("files"), tier=Tier.PARAMETERS),
        made("scan", finding("scan"), tier=Tier.SCAN),
        made("forward", finding("forward")),
        made("kl", finding("kl"), tier=Tier.RESPONSE, compares=True),
    )
    model = loaded_llama()

    def names(*arguments, **how) -> list[str]:
        return [one.check for one in run_gate(*arguments, **how).findings]

    assert names(model) == ["files", "forward"]
    assert names(model, tiers=[Tier.PARAMETERS]) == ["files"]
    assert names(model, tiers=list(Tier)) == ["files", "scan", "forward"]
    assert names(model, model) == ["files", "forward", "kl"]


def test_a_model_in_memory_has_no_files_to_check(monkeypatch) -> None:
    install(
        monkeypatch,
        made("files", finding("files", "fail"), tier=Tier.PARAMETERS),
        made("forward", finding("forward"), tier=Tier.FORWARD),
    )

    record = run_gate(loaded_llama())

    assert [(one.check, one.status) for one in record.findings] == [("files", "not_applicable"), ("forward", "pass")]
    assert record.verdict == "pass"


def test_a_check_gets_subject_base_limits_and_its_share_of_the_error_rate(monkeypatch, tmp_path: Path) -> None:
    seen: list = []
    install(monkeypatch, made("one", finding("one"), seen=seen, tests=2), made("two", finding("two"), tests=1))
    policy = tmp_path / "policy.toml"
    policy.write_text("alpha = 0.01\n[checks.one]\nhighest = 4.0\n", encoding="utf-8")
    base, candidate = loaded_llama(seed=0), loaded_llama(seed=1)

    run_gate(base, candidate, policy=load_policy(policy))

    evidence, limits = seen[0]
    assert evidence.subject.loaded is candidate
    assert evidence.base.loaded is base
    assert (evidence.family, evidence.alpha) == (3, 0.01)
    assert limits == Bounds(highest=4.0)


def test_a_check_switched_off_does_not_run(monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, made("one", finding("one", "fail")), made("two", finding("two")))
    policy = tmp_path / "policy.toml"
    policy.write_text("[checks.one]\nseverity = 'off'\n", encoding="utf-8")

    record = run_gate(loaded_llama(), policy=load_policy(policy))

    assert [one.check for one in record.findings] == ["two"]
    assert record.verdict == "pass"


def test_an_error_of_one_check_is_a_finding_and_loses_no_other(monkeypatch) -> None:
    install(monkeypatch, made("one", error=ProbeError("no text at hand")), made("two", finding("two", "fail")))

    record = run_gate(loaded_llama())

    assert [(one.check, one.status) for one in record.findings] == [("one", "inconclusive"), ("two", "fail")]
    assert record.findings[0].message == "no text at hand"
    assert record.verdict == "fail"


def test_a_model_that_computes_nan_fails(monkeypatch) -> None:
    install(monkeypatch, made("one", error=NonFiniteError("layer 3 makes NaN")), made("two", finding("two")))

    record = run_gate(loaded_llama())

    assert record.verdict == "fail"
    assert "layer 3" in record.findings[0].message


def test_an_error_of_every_check_is_the_users_error(monkeypatch) -> None:
    install(monkeypatch, made("one", error=ProbeError("there is no folder x")), made("two", error=ProbeError("later")))

    with pytest.raises(ProbeError, match="there is no folder x"):
        run_gate(loaded_llama())


def test_a_check_that_says_nothing_is_not_a_pass(monkeypatch) -> None:
    install(monkeypatch, made("one"))

    record = run_gate(loaded_llama())

    assert record.verdict == "inconclusive"
    assert record.findings[0].status == "inconclusive"


def test_the_record_survives_a_round_trip(monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, made("one", finding("one", measured=1 / 3, threshold=0.5, details={"a": [1, 2]})))

    record = run_gate(loaded_llama(), options=GateOptions(windows=2))
    again = load_record(record.save(tmp_path / "gate.json"))

    assert isinstance(again, GateRecord)
    assert again == record
    assert again.findings[0].measured == 1 / 3


def test_assert_gate_passes_the_record_on_or_lists_what_decided(monkeypatch) -> None:
    install(monkeypatch, made("one", finding("one"), finding("one", "fail", subject="lm_head", message="is broken")))
    model = loaded_llama()
    with pytest.raises(GateFailureError, match=r"(?s)FAIL.*one \[lm_head\]: is broken") as error:
        assert_gate(model)
    assert isinstance(error.value, AssertionError)
    assert error.value.record.verdict == "fail"

    install(monkeypatch, made("one", finding("one", "inconclusive")))
    with pytest.raises(GateFailureError, match="INCONCLUSIVE"):
        assert_gate(model)
    assert assert_gate(model, allow_inconclusive=True).verdict == "inconclusive"

    install(monkeypatch, made("one", finding("one")))
    assert assert_gate(model).verdict == "pass"


def test_a_gate_leaves_the_model_as_it_was(monkeypatch) -> None:
    install(monkeypatch, made("one", finding("one")))
    model = loaded_llama()
    before = {name: parameter.clone() for name, parameter in model.model.named_parameters()}

    run_gate(model)

    assert all(torch.equal(parameter, before[name]) for name, parameter in model.model.named_parameters())


def test_a_revision_names_a_commit_of_the_base_only(monkeypatch) -> None:
    seen: list = []
    install(monkeypatch, made("one", finding("one"), seen=seen))

    run_gate(loaded_llama(), loaded_llama(), options=GateOptions(loading={"revision": "v1", "dtype": "float32"}))

    (evidence, _), *_ = seen
    assert evidence.base.options.loading == {"revision": "v1", "dtype": "float32"}
    assert evidence.subject.options.loading == {"revision": None, "dtype": "float32"}
