"""Check ``weight-grid``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence

_NAME = "weight-grid"


@check(_NAME, tier=Tier.SCAN, severity="warn")
def weight_grid(evidence: Evidence, _limits: Limits) -> Iterable[Finding]:
    """A model whose weights lie on a k-bit grid already looks falsely robust to that same grid (THEORY 3).

    Looked for on a sample of rows of every matrix, along its last axis. With a base it is the base that is looked at: its
    candidate is quantized on purpose, and quantizing a quantized base is quantizing twice.

    Yields:
        One finding.
    """
    from ternary_probe.gates._stored_grids import matrices, stored_grid

    judged = evidence.base or evidence.subject
    found = judged.parameters
    if (nothing := unread(_NAME, found)) is not None:
        yield nothing
        return
    names = matrices(found)
    if not names:
        yield fault(_NAME, "not_applicable", "", "no floating weight matrix is stored")
        return
    grids = {name: grid.describe() for name in names if (grid := stored_grid(found, name)) is not None}
    if not grids:
        message = f"none of the {len(names)} matrices of {judged.name} lies on a grid of 8 bits or fewer"
        yield fault(_NAME, "pass", "", message, 0.0, 0.0, "matrices")
        return
    counted = Counter(grids.values())
    twice = f"; quantizing it to {evidence.subject.name} is quantizing twice" if evidence.base is not None else ""
    message = (
        f"{len(grids)} of {len(names)} matrices of {judged.name} already lie on a grid ({counted.most_common(1)[0][0]}), so "
        f"it looks falsely robust to that grid{twice}"
    )
    details = {"grids": dict(counted), "first": next(iter(grids))}
    yield fault(_NAME, "warn", judged.name, message, float(len(grids)), 0.0, "matrices", **details)
