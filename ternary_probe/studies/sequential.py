"""Sequential stopping: look at 8, 16, 32, 64 and 128 seeds, and stop once the interval is as tight as asked.

Looking again and again would let chance in, so the error of 5 % is split over the looks, halved from look to look: most
experiments stop early, where seeds are fewest, and there an interval of 97.4 % is what 95 % in all can afford.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ternary_probe.studies.intervals import Interval, mean_interval

LOOKS = (8, 16, 32, 64, 128)


class Looked(NamedTuple):
    """What a look at some seeds says."""

    interval: Interval
    confidence: float
    looks: int
    precise: bool


def confidence_at(look: int, looks: int, alpha: float = 0.05) -> float:
    """Return the confidence of the interval at one look, so that all of them together keep ``1 - alpha``.

    Args:
        look: Counted from 1.
        looks: How many there may be.
        alpha: Error of all looks together.

    Returns:
        ``1 - alpha * 2^-look / sum_k 2^-k``; with a single look ``1 - alpha``.
    """
    share = 2.0**-look / (1 - 2.0**-looks)
    return 1 - alpha * share


def planned_looks(seeds: int, precision: float | None) -> tuple[int, ...]:
    """Return after how many seeds to look.

    Args:
        seeds: Seeds of the first look, and of the only one where no precision is asked for.
        precision: Relative half-width wanted, or ``None``.

    Returns:
        Seeds at each look.
    """
    if precision is None:
        return (seeds,)
    return (seeds, *(look for look in LOOKS if look > seeds))


def look_at(values: Sequence[float], look: int, looks: int, precision: float | None) -> Looked:
    """Judge the values measured so far.

    Args:
        values: One figure per seed, all seeds of this look.
        look: Which look this is, counted from 1.
        looks: How many there may be.
        precision: Relative half-width wanted, or ``None``.

    Returns:
        The interval at this look's confidence, and whether it is as tight as asked.
    """
    confidence = confidence_at(look, looks)
    interval = mean_interval(values, confidence)
    half = (interval.high - interval.low) / 2
    precise = precision is not None and math.isfinite(half) and half <= precision * abs(interval.value)
    return Looked(interval, confidence, look, precise)
