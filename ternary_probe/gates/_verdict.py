"""From findings to one verdict: the only place that knows which finding weighs what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from ternary_probe.gates._policy import Policy
from ternary_probe.records import Finding

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}


class Verdict(NamedTuple):
    """The decision and the sentence that gives its reason."""

    value: Literal["pass", "fail", "inconclusive"]
    reason: str


def weigh(finding: Finding, policy: Policy) -> Finding:
    """Apply the policy's severity: a failure of a check that only warns is a warning.

    Args:
        finding: As the check gave it.
        policy: The policy.

    Returns:
        The finding as the verdict counts it.
    """
    if finding.status == "fail" and policy.checks[finding.check].severity == "warn":
        return finding.model_copy(update={"status": "warn"})
    return finding


def decide(findings: Iterable[Finding], policy: Policy) -> Verdict:
    """Decide.

    One failure fails. An undecided check that could have failed leaves the whole undecided, and so does a run in which
    no check applied: an empty run is not a pass.

    Args:
        findings: Weighed by `weigh`.
        policy: The policy.

    Returns:
        The verdict.
    """
    kept = list(findings)
    failed = _checks(kept, "fail")
    if failed:
        return Verdict("fail", f"failed: {', '.join(failed)}")
    open_ = [f for f in kept if f.status == "inconclusive" and policy.checks[f.check].severity == "fail"]
    if open_:
        return Verdict("inconclusive", f"undecided: {', '.join(_checks(open_, 'inconclusive'))}")
    decided = [finding for finding in kept if finding.status in {"pass", "warn"}]
    if not decided:
        return Verdict("inconclusive", "no check applied to this model, so nothing was shown")
    warned = _checks(kept, "warn")
    suffix = f", with warnings: {', '.join(warned)}" if warned else ""
    return Verdict("pass", f"{len({f.check for f in decided})} checks passed{suffix}")


def _checks(findings: Iterable[Finding], status: str) -> list[str]:
    return list(dict.fromkeys(finding.check for finding in findings if finding.status == status))
