"""From findings to a verdict: one failure fails, an open question is no pass, an empty run neither."""

from __future__ import annotations

import pytest
from gates.made_checks import finding, install, made

from ternary_probe.gates import EXIT_CODES, decide, load_policy, weigh


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, made("made"), made("soft", severity="warn"))
    return load_policy()


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["pass"], "pass"),
        (["pass", "warn"], "pass"),
        (["pass", "not_applicable"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["pass", "inconclusive", "fail"], "fail"),
        (["not_applicable"], "inconclusive"),
        (["not_applicable", "not_applicable"], "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_the_worst_that_counts_decides(policy, statuses: list[str], verdict: str) -> None:
    assert decide([finding(status=status) for status in statuses], policy).value == verdict


def test_a_check_that_only_warns_neither_fails_nor_leaves_open(policy) -> None:
    failed, open_ = finding("soft", "fail"), finding("soft", "inconclusive")

    assert weigh(failed, policy).status == "warn"
    assert weigh(finding("made", "fail"), policy).status == "fail"
    assert decide([finding(), open_, weigh(failed, policy)], policy).value == "pass"
    assert decide([open_], policy).value == "inconclusive"


def test_the_reason_names_each_deciding_check_once(policy) -> None:
    found = [finding(status="fail", subject="a"), finding(status="fail", subject="b"), finding("soft")]

    assert decide(found, policy).reason == "failed: made"
    assert "soft" in decide([finding(), finding("soft", "warn")], policy).reason


def test_exit_codes_are_those_of_the_design() -> None:
    assert EXIT_CODES == {"pass": 0, "fail": 1, "inconclusive": 3}
