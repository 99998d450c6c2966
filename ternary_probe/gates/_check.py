"""What a check is, and the registry of those there are: one file each in ``gates/checks``, found by being there."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence

Severity = Literal["fail", "warn", "off"]


class Tier(StrEnum):
    """What a check has to read, from kilobytes to many forward passes."""

    PARAMETERS = "parameters"
    """Headers and norm gains; no model is built, torch is not imported."""
    SCAN = "scan"
    """Every weight matrix once; no model is built."""
    FORWARD = "forward"
    """One forward pass over the text."""
    RESPONSE = "response"
    """Perturbed or candidate models against a clean one, on the same text."""


class Limits(BaseModel):
    """Base of a check's thresholds.

    Every field has a default and a ``Field(description=...)`` that says what it bounds, its unit and where the figure
    comes from: policies are validated against it, and the default policy is written from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Body = Callable[["Evidence", Any], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One registered check.

    Attributes:
        name: Its name in policies and reports, in kebab case.
        tier: What it reads.
        compares: Whether it needs a base to compare the subject with.
        limits: Class of its thresholds.
        severity: What a failure of it means under the default policy.
        tests: How many statistical decisions it contributes to the family whose error rate is controlled.
        body: The function; yields findings, at least one.
    """

    name: str
    tier: Tier
    compares: bool
    limits: type[Limits]
    severity: Severity
    tests: int
    body: Body

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (inspect.getdoc(self.body) or "").split("\n", 1)[0]

    @property
    def explanation(self) -> str:
        """The whole docstring."""
        return inspect.getdoc(self.body) or ""


_registered: dict[str, Check] = {}


def check(
    name: str,
    *,
    tier: Tier,
    limits: type[Limits] = Limits,
    severity: Severity = "fail",
    compares: bool = False,
    tests: int = 0,
) -> Callable[[Body], Body]:
    """Register a function as a check.

    Args:
        name: Kebab case, unique.
        tier: What it reads.
        limits: Its thresholds, all with defaults.
        severity: What a failure means by default.
        compares: Whether it needs a base.
        tests: Statistical decisions it takes.

    Returns:
        A decorator that leaves the function as it is.
    """

    def register(body: Body) -> Body:
        _registered[name] = Check(name, tier, compares, limits, severity, tests, body)
        return body

    return register


@cache
def all_checks() -> dict[str, Check]:
    """Import every module of ``gates/checks``.

    Returns:
        The checks by name: cheap ones first, then by name.
    """
    from ternary_probe.gates import checks

    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    order = list(Tier)
    return dict(sorted(_registered.items(), key=lambda item: (order.index(item[1].tier), item[0])))
