"""Rows of a leverage study as a reader wants them: one per rate and arm, with the perplexity change over seeds."""

from __future__ import annotations

import math
from typing import NamedTuple

from ternary_probe.records import Arm, LeverageRecord, Mean, Response


class Interval(NamedTuple):
    """A mean over seeds with its interval; None where not measured."""

    value: float | None
    low: float | None
    high: float | None


class Cell(NamedTuple):
    """One rate and arm, over its seeds."""

    rate: float
    matching: str
    arm: str
    flips: tuple[int, ...]
    nll: Mean | None
    kl: Mean | None
    delta_ppl: Interval


def damage_cells(record: LeverageRecord) -> tuple[Cell, ...]:
    """Group a study by rate, matching and arm.

    Args:
        record: The study.

    Returns:
        Cells by rising rate, in the record's order of matchings and arms.
    """
    keys = dict.fromkeys([(m.rate, m.matching, m.arm) for m in record.means])
    keys |= dict.fromkeys([(a.rate, a.matching, a.arm) for a in record.arms])
    cells = []
    for rate, matching, arm in sorted(keys, key=lambda key: key[0]):
        seeds = [a for a in record.arms if (a.rate, a.matching, a.arm) == (rate, matching, arm)]
        flips = tuple(sorted({a.flips for a in seeds}))
        nll, kl = (mean_of(record, rate, matching, arm, response) for response in ("nll", "kl"))
        cells.append(Cell(rate, matching, arm, flips, nll, kl, _mean_delta_ppl(seeds, confidence_of(record))))
    return tuple(cells)


def confidence_of(record: LeverageRecord) -> float:
    """Return the coverage of a study's intervals; one study has one.

    Args:
        record: The study.

    Returns:
        A share, 0.95 where the record states none.
    """
    return next((entry.confidence for entry in record.leverage), 0.95)


def mean_of(record: LeverageRecord, rate: float, matching: str, arm: str, response: Response | str) -> Mean | None:
    """Find one mean response.

    Args:
        record: The study.
        rate: The flip rate.
        matching: How the arms were matched.
        arm: The arm.
        response: ``nll`` or ``kl``.

    Returns:
        The mean, or None where the study has none.
    """
    wanted = (rate, matching, arm, response)
    return next((m for m in record.means if (m.rate, m.matching, m.arm, m.response) == wanted), None)


def _mean_delta_ppl(seeds: list[Arm], confidence: float) -> Interval:
    # Student's t interval, as the study's own means have.
    values = [a.delta_ppl for a in seeds if a.delta_ppl is not None]
    if not values or len(values) < len(seeds):
        return Interval(None, None, None)
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    from scipy.stats import t  # a third of a second, for this alone

    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * sd / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half) if math.isfinite(half) else Interval(mean, None, None)
