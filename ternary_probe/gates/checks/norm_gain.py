"""Check ``norm-gain``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread, worst_first
from ternary_probe.records import Finding, FindingStatus

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.gates._parameters import NormGain
    from ternary_probe.gates._stored_numbers import Vector

_NAME = "norm-gain"


class GainLimits(Limits):
    """What a norm's gain may look like."""

    warn_participation: float = Field(
        1.5,
        ge=1,
        description="coordinates: participation ratio of v* = gain^-1 / ||gain^-1|| below which a LayerNorm's kernel "
        "direction is one coordinate and no more (THEORY 2.1). Only of norms with a bias: an RMSNorm has no such kernel, and "
        "half of SmolLM2's are at 1.0. Our choice: 1 is exactly one coordinate",
    )
    warn_range: float = Field(
        1e6,
        gt=1,
        description="largest over smallest |gain| of one norm that is not exactly zero. Our choice: SmolLM2 reaches 4e4, "
        "and beyond 1e6 the small end vanishes beside the large one in half precision",
    )


class Figures(NamedTuple):
    """Figures of one gain.

    Attributes:
        smallest: Smallest magnitude that is not 0.
        largest: Largest magnitude.
        negative: Entries below 0.
        zeros: Entries that are exactly 0.
        participation: Participation ratio of v*, coordinates.
    """

    smallest: float
    largest: float
    negative: int
    zeros: int
    participation: float

    @property
    def range(self) -> float:
        """Largest over smallest magnitude that is not 0; 1 for a gain of zeros."""
        return self.largest / self.smallest if self.smallest > 0 else 1.0


@check(_NAME, tier=Tier.PARAMETERS, limits=GainLimits)
def norm_gain(evidence: Evidence, limits: GainLimits) -> Iterable[Finding]:
    """Norm gains must be finite; zeros, huge ranges and collapsed kernel directions are pointed out.

    Gains are read as stored (``w``), or as ``1 + w`` where those of one length lie around 0: which of the two a module
    computes is not in the files, the reading is reported, and the forward checks find it out by probing. An entry that is
    exactly 0 warns: it silences a coordinate, and of a LayerNorm it makes that axis the kernel (THEORY 2.1). A gain of
    nothing but zeros fails. Sign changes are healthy (SmolLM2 goes down to -2.1) and only counted.

    Yields:
        One finding per norm with a fault, or one that all is well.
    """
    found = evidence.subject.parameters
    if (nothing := unread(_NAME, found)) is not None:
        yield nothing
        return
    gains = list(found.gains.values())
    if not gains:
        yield fault(_NAME, "not_applicable", "", "no norm has a gain on disk (norms without affine part, gain 1)")
        return
    figures: dict[str, Figures] = {}
    faults: list[Finding] = []
    some_live = any(gain.stored.any() for gain in gains)
    for gain in gains:
        bad = np.flatnonzero(~np.isfinite(gain.stored))
        if bad.size:
            message = f"entry {bad[0]} of {gain.name} is {gain.stored[bad[0]]} ({bad.size} entries are not finite)"
            faults.append(fault(_NAME, "fail", gain.name, message, float(bad.size), 0.0, "entries", index=int(bad[0])))
            continue
        figures[gain.name] = measure(gain.effective)
        faults += _warnings(gain, figures[gain.name], limits, some_live=some_live)
    yield from worst_first(faults)
    if not faults:
        yield _healthy(gains, figures, limits)


def measure(gain: Vector) -> Figures:
    """Take the figures of one effective gain.

    Args:
        gain: Effective gain, finite, fp64 ``[d]``.

    Returns:
        Magnitudes, signs, exact zeros, and the participation ratio ``1 / sum(v_i^4)`` of the unit vector along ``1/gain`` on
        the coordinates that are not 0: the number of coordinates a LayerNorm's kernel direction lives on (THEORY 2.1).
    """
    size = np.abs(gain)
    alive = size[size > 0]
    if not alive.size:
        return Figures(0.0, 0.0, 0, int(gain.size), 0.0)
    squares = (alive.min() / alive) ** 2  # scaled, so that a tiny gain does not overflow
    return Figures(
        float(alive.min()),
        float(alive.max()),
        int((gain < 0).sum()),
        int((size == 0).sum()),
        float(squares.sum() ** 2 / (squares**2).sum()),
    )


def _warnings(gain: NormGain, one: Figures, limits: GainLimits, *, some_live: bool) -> Iterator[Finding]:
    reading = f"read as {gain.reading}"
    if gain.offset and some_live and not gain.stored.any():
        message = (
            f"every entry of {gain.name} is stored as 0, though its like are not ({reading}): was it ever written?"
        )
        yield fault(_NAME, "warn", gain.name, message, float(gain.stored.size), 0.0, "entries", reading=gain.reading)
    elif one.zeros:
        every = "every entry" if one.zeros == gain.stored.size else f"{one.zeros} entries"
        what = "they span the kernel of this LayerNorm's output" if gain.has_bias else "these coordinates are silenced"
        message = f"{every} of {gain.name} are exactly 0 ({reading}): {what}"
        status: FindingStatus = (
            "fail" if one.zeros == gain.stored.size else "warn"
        )  # a gain of zeros lets nothing through
        axes = np.flatnonzero(gain.effective == 0)[:20].tolist()
        yield fault(
            _NAME, status, gain.name, message, float(one.zeros), 0.0, "entries", reading=gain.reading, axes=axes
        )
    if one.range > limits.warn_range:
        message = f"|gain| of {gain.name} runs from {one.smallest:.3g} to {one.largest:.3g} ({reading})"
        yield fault(_NAME, "warn", gain.name, message, one.range, limits.warn_range, "largest/smallest |gain|")
    if gain.has_bias and not one.zeros and one.participation < limits.warn_participation:
        message = (
            f"the kernel direction of {gain.name} is all but one coordinate: its smallest |gain| is {one.smallest:.3g}"
        )
        yield fault(_NAME, "warn", gain.name, message, one.participation, limits.warn_participation, "coordinates")


def _healthy(gains: list[NormGain], figures: dict[str, Figures], limits: GainLimits) -> Finding:
    readings = {gain.name: gain.reading for gain in gains}
    common = max(sorted(set(readings.values())), key=list(readings.values()).count)
    widest = max(figures, key=lambda name: figures[name].range)
    narrowest = min(figures, key=lambda name: figures[name].participation)
    negative, entries = sum(one.negative for one in figures.values()), sum(gain.stored.size for gain in gains)
    details = {
        "reading": common,
        "other_readings": sorted(name for name, reading in readings.items() if reading != common),
        "widest": widest,
        "narrowest": narrowest,
        "narrowest_participation": figures[narrowest].participation,
        "norms": {name: one._asdict() for name, one in figures.items()},
    }
    if common != "w":
        details["zeros_read_as_w"] = sum(int((gain.stored == 0).sum()) for gain in gains)
    message = (
        f"{len(gains)} gains are finite and not 0, read as {common}; {negative} of {entries} entries are negative, |gain| "
        f"spans up to {math.ceil(figures[widest].range)}-fold ({widest})"
    )
    return fault(
        _NAME, "pass", "", message, figures[widest].range, limits.warn_range, "largest/smallest |gain|", **details
    )
