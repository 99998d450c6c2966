"""Check ``folded-gain``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from ternary_probe.errors import ProbeError
from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread, worst_first
from ternary_probe.gates._stored_numbers import FLOATS
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.gates._parameters import NormGain, ParameterEvidence
    from ternary_probe.gates._stored_numbers import Vector

_NAME = "folded-gain"
_ROWS = 64
_INPUTS = 64


class FoldedLimits(Limits):
    """When a gain counts as constant, and when a matrix is taken to have absorbed it."""

    flat_spread: float = Field(
        1e-3,
        ge=0,
        description="standard deviation over mean magnitude of a gain below which it is constant. Our choice: a trained gain "
        "spreads by tenths, a folded one is all ones up to rounding",
    )
    absorbed: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="correlation over input features between the base's gain and the factor from base to candidate columns, "
        "above which a matrix is said to have absorbed the gain. Our choice: 1 unquantized, near 0 for another matrix",
    )


@check(_NAME, tier=Tier.PARAMETERS, limits=FoldedLimits, severity="warn", compares=True)
def folded_gain(evidence: Evidence, limits: FoldedLimits) -> Iterable[Finding]:
    """A gain that varied in the base and is constant or gone in the candidate was folded into the next matrix, or lost.

    Folding leaves the function as it is (rotation methods do it, THEORY 2.3.7), so this is a warning: per-norm figures of
    base and candidate no longer compare. The matrices that absorbed it are looked for by a few rows of the matrices of the
    norm's block (for a final norm: those outside all blocks); after a rotation none is found, and the message says so.

    Yields:
        One finding per norm, or one that gains vary as they did.
    """
    if evidence.base is None:
        return
    base, candidate = evidence.base.parameters, evidence.subject.parameters
    if (nothing := unread(_NAME, base, candidate)) is not None:
        yield nothing
        return
    faults: list[Finding] = []
    compared = 0
    for name, gain in base.gains.items():
        if not np.isfinite(gain.stored).all() or _spread(gain) <= limits.flat_spread:
            continue
        new = candidate.gains.get(name)
        if new is None and name in candidate.tensors:
            continue
        if new is not None and (new.stored.shape != gain.stored.shape or not np.isfinite(new.stored).all()):
            continue
        compared += 1
        spread = 0.0 if new is None else _spread(new)
        if spread <= limits.flat_spread:
            faults.append(_folded(base, candidate, gain, spread, limits, gone=new is None))
    yield from worst_first(faults)
    if not faults and compared:
        message = f"{compared} gains that vary in the base vary in the candidate too: none was folded into a matrix"
        yield fault(_NAME, "pass", "", message, 0.0, 0.0, "norms")
    elif not faults:
        yield fault(
            _NAME, "not_applicable", "", "base and candidate have no norm in common whose gain varies in the base"
        )


def _folded(
    base: ParameterEvidence,
    candidate: ParameterEvidence,
    gain: NormGain,
    spread: float,
    limits: FoldedLimits,
    *,
    gone: bool,
) -> Finding:
    matched = {
        name: value
        for name in _near(base, gain.name)
        if (value := _absorption(base, candidate, name, gain.effective)) is not None and value >= limits.absorbed
    }
    what = "gone from" if gone else "constant in"
    if matched:
        names = ", ".join(sorted(name.removesuffix(".weight").rpartition(".")[2] for name in matched))
        where = f"it was folded into {names}; the function is the same, per-norm figures do not compare"
    else:
        where = "no matrix beside it took it up column by column, so it was folded under a rotation, or lost"
    message = f"the gain of {gain.name} varies in the base and is {what} the candidate: {where}"
    return fault(_NAME, "warn", gain.name, message, spread, limits.flat_spread, "std/mean |gain|", absorbed_by=matched)


def _spread(gain: NormGain) -> float:
    size = float(np.abs(gain.effective).mean())
    return float(gain.effective.std()) / size if size > 0 else 0.0


def _near(found: ParameterEvidence, norm: str) -> list[str]:
    """Return the floating matrices of the norm's block; of a norm outside all blocks, those outside too."""
    blocks = [f"{prefix}.{number}." for prefix, numbers in found.blocks.items() for number in numbers]
    own = next((block for block in blocks if norm.startswith(block)), None)
    matrices = [name for name, entry in found.tensors.items() if len(entry.shape) == 2 and entry.dtype in FLOATS]
    if own is not None:
        return [name for name in matrices if name.startswith(own)]
    return [name for name in matrices if not name.startswith(tuple(blocks))]


def _absorption(base: ParameterEvidence, candidate: ParameterEvidence, name: str, gain: Vector) -> float | None:
    """Return how well the factor from a base matrix to its candidate, feature by feature, follows the gain."""
    old, new = base.tensors[name], candidate.tensors.get(name)
    if new is None or new.shape != old.shape or new.dtype not in FLOATS:
        return None
    found = []
    try:
        if old.shape[1] == gain.size:  # [out, in], inputs along the rows
            rows = min(_ROWS, old.shape[0])
            found.append(_follows(base.read(name, rows), candidate.read(name, rows), gain))
        if old.shape[0] == gain.size:  # [in, out]
            rows = min(_INPUTS, gain.size)
            found.append(_follows(base.read(name, rows).T, candidate.read(name, rows).T, gain[:rows]))
    except ProbeError:  # a file that ends too early is the `files` check's finding
        return None
    return max(found, default=None)


def _follows(old: Vector, new: Vector, gain: Vector) -> float:
    """Correlate the least-squares factor of every input feature with the gain; matrices ``[rows, features]``."""
    energy = (old**2).sum(0)
    if not (np.isfinite(old).all() and np.isfinite(new).all()) or not energy.all():
        return 0.0
    factor = (old * new).sum(0) / energy
    if factor.std() == 0 or gain.std() == 0:
        return 0.0
    return float(np.corrcoef(factor, gain)[0, 1])
