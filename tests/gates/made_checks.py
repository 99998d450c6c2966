"""Checks made for tests of the frame: what they find is given to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import Field

from ternary_probe.errors import ProbeError
from ternary_probe.gates import Check, Limits, Tier, _policy, _run
from ternary_probe.records import Finding


class Bounds(Limits):
    """Thresholds of a made check."""

    highest: float = Field(2.5, description="largest value allowed, apples; our choice")
    strict: bool = Field(False, description="whether to look twice")


def finding(check: str = "made", status: str = "pass", **changes: Any) -> Finding:
    fields: dict[str, Any] = {"check": check, "status": status, "message": "as found"}
    return Finding(**(fields | changes))


def made(
    name: str, *findings: Finding, error: ProbeError | None = None, seen: list[Any] | None = None, **how: Any
) -> Check:
    """Make a check that yields these findings, or raises."""

    def body(evidence: Any, limits: Any) -> Iterable[Finding]:
        """Look at what was made.

        Further explanation.
        """
        if seen is not None:
            seen.append((evidence, limits))
        if error is not None:
            raise error
        yield from findings

    settings: dict[str, Any] = {
        "tier": Tier.FORWARD,
        "compares": False,
        "limits": Bounds,
        "severity": "fail",
        "tests": 0,
    }
    return Check(name=name, body=body, **(settings | how))


def install(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    """Let these be all the checks there are."""
    registry = {check.name: check for check in checks}
    for module in (_policy, _run):
        monkeypatch.setattr(module, "all_checks", lambda: registry)
