"""How many digits of a figure may be shown: as many as its interval supports.

A figure and its interval are rounded to the same digit: the second significant digit of the interval's half width.
What could not be measured is shown as an en dash, never as a number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NOT_MEASURED = "–"
TINY = 1e-4
HUGE = 1e9
_UNDERFLOW = 1e-300  # below it 10.0**exponent is 0
_MOST_DIGITS = 6
"""Significant digits shown where the interval has no width, or one far below anything a reader can use."""


def figure_with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Write ``value [low, high]``, all three rounded to the same digit.

    An interval that excludes 0 never shows a bound that reads as 0: digits are added until it does not. Figures all
    below 1e-4 share one exponent, ``(4.50 [4.40, 4.60])e-05``; so do those of 1e9 and above.

    Args:
        value: The figure, or None where it was not measured.
        low: Lower bound, or None.
        high: Upper bound, or None.

    Returns:
        The text; an en dash stands for whatever is missing.
    """
    value, low, high = _measured(value), _measured(low), _measured(high)
    if value is None and low is None and high is None:
        return NOT_MEASURED
    if low is None and high is None:
        return f"{figure(value)} (no interval)"
    if low is None or high is None:
        return f"{figure(value)} [{figure(low)}, {figure(high)}]"
    scale = _Scale.of(value, low, high)
    shown = NOT_MEASURED if value is None else scale.write(value)
    return scale.finish(f"{shown} [{scale.write(low)}, {scale.write(high)}]")


def figure_plus_minus(value: float | None, low: float | None, high: float | None) -> str:
    """Write ``value ± half width`` where the interval is symmetric, else as `figure_with_interval` does.

    Args:
        value: The figure, or None where it was not measured.
        low: Lower bound, or None.
        high: Upper bound, or None.

    Returns:
        The text.
    """
    value, low, high = _measured(value), _measured(low), _measured(high)
    if value is None or low is None or high is None:
        return figure_with_interval(value, low, high)
    half = (high - low) / 2
    if half < 0 or abs((high - value) - half) > 0.01 * half:
        return figure_with_interval(value, low, high)
    scale = _Scale.of(value, low, high)
    return scale.finish(f"{scale.write(value)} ± {scale.write(half)}")


def figure(value: float | None, digits: int = 3) -> str:
    """Write a figure that has no interval, to a number of significant digits.

    Args:
        value: The figure, or None where it was not measured.
        digits: Significant digits; the digits of a larger whole number are zeros after them.

    Returns:
        The text; scientific only below 1e-4 and from 1e9 on.
    """
    value = _measured(value)
    if value is None:
        return NOT_MEASURED
    if value == 0:
        return "0"
    if not TINY <= abs(value) < HUGE:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - _exponent(value, digits)
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def percent(share: float) -> str:
    """Write a share as a percentage without trailing zeros.

    Args:
        share: The share, 1 for the whole.

    Returns:
        For example ``0.5 %``.
    """
    text = f"{100 * share:.4g}"
    if "e" in text:
        text = f"{100 * share:.10f}".rstrip("0").rstrip(".") if abs(100 * share) >= 1e-6 else text
    return f"{text} %"


def count(number: int) -> str:
    """Write a whole number with thousands separated.

    Args:
        number: The number.

    Returns:
        For example ``25,950``.
    """
    return f"{number:,}"


def _measured(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if abs(value) >= _UNDERFLOW else 0.0


def _exponent(value: float, digits: int) -> int:
    # After rounding to that many digits, so that 0.0996 counts as 0.10.
    return int(f"{abs(value):.{digits - 1}e}".split("e")[1])


class _Scale(NamedTuple):
    """The power of ten taken out of a figure and its interval, and the decimals left to write."""

    exponent: int
    decimals: int

    @classmethod
    def of(cls, value: float | None, low: float, high: float) -> _Scale:
        largest = max(abs(x) for x in (value, low, high) if x is not None)
        plain = largest == 0 or TINY <= largest < HUGE
        exponent = 0 if plain else _exponent(largest, 2)
        if low == high:
            digits = f"{largest / 10.0**exponent:.{_MOST_DIGITS}g}"
            return cls(exponent, 0 if "e" in digits else len(digits.partition(".")[2]))
        return cls(exponent, exponent + _decimals(largest, low, high))

    def write(self, value: float) -> str:
        text = f"{round(value / 10.0**self.exponent, self.decimals):.{max(0, self.decimals)}f}"
        return text.removeprefix("-") if not text.strip("-0.") else text

    def finish(self, body: str) -> str:
        return f"({body})e{self.exponent:+03d}" if self.exponent else body


def _decimals(largest: float, low: float, high: float) -> int:
    # Negative: rounded to tens, hundreds.
    finest = _MOST_DIGITS - 1 - _exponent(largest, _MOST_DIGITS)
    half = abs(high - low) / 2
    decimals = min(1 - _exponent(half, 2), finest)
    if low > 0 or high < 0:
        decimals = min(max(decimals, -_exponent(min(abs(low), abs(high)), 1)), finest + _MOST_DIGITS)
    return decimals
