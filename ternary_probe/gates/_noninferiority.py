"""Non-inferiority on paired data: is a loss shown to be small, shown to be large, or not shown at all?

A figure passes only where its one-sided bound on the bad side lies within the threshold, fails only where the opposite
bound lies beyond it, and is undecided otherwise; the point estimate decides nothing.

Replication. Tokens of a window share their context and are not independent, so the window is the unit: every error here
is one *between* windows, with Student's t. Cutting windows into blocks to get more units is not offered: blocks of a
window are as correlated as its tokens, and the bound would claim more text than was read. Windows of one text still
share its subject; the claim is about text like it. A window's mean is skewed where a few tokens carry the damage, so
bounds get Johnson's correction on the side of the long tail (*J. Am. Stat. Assoc.* 73, 1978), and below `FEW_UNITS`
units, where skewness cannot be seen, half the error rate. Simulated at eight units: a one-sided 5 % bound errs in 4.2 % of
cases for normal units, 9 % (11.5 % without the correction) for log-normal ones of coefficient of variation 0.53.

Joint error rates. A gate passes if *every* check passes, so each may pass at the full rate (intersection-union: the whole
passes wrongly only if the one check that ought to stop it errs). It fails if *any* fails, so each may fail only at its
share of the rate (Bonferroni, whatever the dependence).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import scipy  # its parts are imported when first used: a gate of files alone needs none of them
from numpy.typing import ArrayLike, NDArray

from ternary_probe.studies.intervals import ratio_of_means

FEW_UNITS = 8
POWER = 0.8

Status = Literal["pass", "fail", "inconclusive"]
Vector = NDArray[np.float64]


class Estimate(Protocol):
    """A figure with one-sided bounds."""

    @property
    def value(self) -> float:
        """The point estimate."""

    @property
    def units(self) -> int:
        """Independent units it rests on."""

    @property
    def error(self) -> float:
        """Standard error; infinite below two units."""

    def bound(self, alpha: float, side: Literal["upper", "lower"]) -> float:
        """One-sided confidence bound, infinite where there is none.

        Args:
            alpha: Error rate.
            side: Which way the figure is bounded.
        """


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over units of unequal size: the ratio of two sums, as in cluster sampling.

    Attributes:
        value: ``sum(sums) / sum(counts)``.
        error: Standard error of it, by linearisation, between units.
        units: Number of units.
        skewness: Of the units' residuals.
    """

    value: float
    error: float
    units: int
    skewness: float = 0.0

    def bound(self, alpha: float, side: Literal["upper", "lower"]) -> float:
        """Return Student's t bound with Johnson's skewness correction.

        Args:
            alpha: Error rate.
            side: Which way the figure is bounded.

        Returns:
            The bound.
        """
        sign = 1.0 if side == "upper" else -1.0
        if not math.isfinite(self.error):
            return sign * math.inf
        t = quantile(alpha, self.units)
        tail = max(0.0, sign * self.skewness) * (1 + 2 * t * t) / (6 * math.sqrt(self.units))
        return self.value + sign * self.error * (t + tail)


@dataclass(frozen=True)
class ShareEstimate(MeanEstimate):
    """A share of tokens. Where windows agree so well that their spread says nothing, the token count bounds it.

    Correlated tokens never know more than as many independent ones, so the exact (Clopper-Pearson) bound for independent
    tokens is the narrowest there can be, and the wider of the two is given: windows without a single miss do not prove
    that there are none.
    """

    hits: int = 0
    tokens: int = 0

    def bound(self, alpha: float, side: Literal["upper", "lower"]) -> float:
        """Return the wider of the t bound over windows and the exact one over tokens.

        Args:
            alpha: Error rate.
            side: Which way the share is bounded.

        Returns:
            The bound, within [0, 1].
        """
        between = super().bound(alpha, side)
        if side == "upper":
            misses = self.tokens - self.hits
            exact = 1.0 if misses == 0 else float(scipy.special.betaincinv(self.hits + 1, misses, 1 - alpha))
            return min(1.0, max(between, exact))
        exact = (
            0.0 if self.hits == 0 else float(scipy.special.betaincinv(self.hits, self.tokens - self.hits + 1, alpha))
        )
        return max(0.0, min(between, exact))


@dataclass(frozen=True)
class MedianEstimate:
    """A median over tokens with Woodruff's interval (*J. Am. Stat. Assoc.* 47, 1952).

    The share of tokens below the median is bounded as a mean over windows and read back from the distribution, so that
    heavy tails of the tokens' figures (a ratio whose denominator is nearly 0) do no harm.

    Attributes:
        ordered: The tokens' figures, sorted.
        share_error: Standard error of the share of tokens below the median, between windows; at least that of as many
            independent tokens.
        units: Number of windows.
    """

    ordered: Vector
    share_error: float
    units: int

    @property
    def value(self) -> float:
        """The median."""
        return float(np.median(self.ordered))

    @property
    def error(self) -> float:
        """Half the distance between the quantiles one standard error of the share to either side."""
        return (self._read(0.5 + self.share_error) - self._read(0.5 - self.share_error)) / 2

    def bound(self, alpha: float, side: Literal["upper", "lower"]) -> float:
        """Return Woodruff's bound.

        Args:
            alpha: Error rate.
            side: Which way the median is bounded.

        Returns:
            The bound; infinite where the share's bound leaves [0, 1].
        """
        step = quantile(alpha, self.units) * self.share_error if math.isfinite(self.share_error) else math.inf
        return self._read(0.5 + step if side == "upper" else 0.5 - step)

    def _read(self, share: float) -> float:
        if share > 1 or share < 0:
            return math.inf if share > 1 else -math.inf
        return float(np.quantile(self.ordered, share))


@dataclass(frozen=True)
class LogRatioEstimate:
    """A ratio of two means over independent seeds, on the log scale; bounds are Welch's (`ratio_of_means`)."""

    numerator: tuple[float, ...]
    denominator: tuple[float, ...]

    @property
    def value(self) -> float:
        """Log of the ratio; NaN where a mean is not positive."""
        above, below = float(np.mean(self.numerator)), float(np.mean(self.denominator))
        return math.log(above / below) if above > 0 and below > 0 else math.nan

    @property
    def units(self) -> int:
        """Seeds of the smaller arm."""
        return min(len(self.numerator), len(self.denominator))

    @property
    def error(self) -> float:
        """Standard error of the log, from the half-width of a one-sided 84.13 % bound."""
        one_sigma = float(scipy.special.ndtr(-1))
        return self.bound(one_sigma, "upper") - self.value if self.units > 1 else math.inf

    @property
    def reason(self) -> str:
        """Why there is no interval at the usual 95 %; empty where there is one."""
        return ratio_of_means(self.numerator, self.denominator, 0.9).reason

    def bound(self, alpha: float, side: Literal["upper", "lower"]) -> float:
        """Return Welch's bound of the log ratio.

        Args:
            alpha: Error rate.
            side: Which way the ratio is bounded.

        Returns:
            The bound; infinite where a mean's own interval reaches 0.
        """
        interval = ratio_of_means(self.numerator, self.denominator, 1 - 2 * alpha).interval
        if interval is None:
            return math.inf if side == "upper" else -math.inf
        return math.log(interval.high if side == "upper" else interval.low)


def estimate_mean(sums: ArrayLike, counts: ArrayLike | None = None) -> MeanEstimate:
    """Estimate a mean from units' sums.

    Args:
        sums: Sum of the figure in each unit, ``[units]``.
        counts: Tokens in each unit, ``[units]``; 1 each if None.

    Returns:
        The estimate: ``sum(sums) / sum(counts)``.
    """
    total, size = _pair(sums, counts)
    value = float(total.sum() / size.sum())
    if not math.isfinite(value):
        return MeanEstimate(value, math.inf, total.size)
    error, skewness = _spread(total - value * size, size)
    return MeanEstimate(value, error, total.size, skewness)


def estimate_share(hits: ArrayLike, counts: ArrayLike) -> ShareEstimate:
    """Estimate a share of tokens from units' hits.

    Args:
        hits: Tokens of each unit that are hits, ``[units]``.
        counts: Tokens of each unit, ``[units]``.

    Returns:
        The estimate.
    """
    total, size = _pair(hits, counts)
    value = float(total.sum() / size.sum())
    error, skewness = _spread(total - value * size, size)
    tokens = float(size.sum())
    independent = max(math.sqrt(value * (1 - value) / tokens), 1 / tokens)
    return ShareEstimate(value, max(error, independent), total.size, skewness, round(total.sum()), round(tokens))


def estimate_median(values: ArrayLike, unit: ArrayLike) -> MedianEstimate:
    """Estimate a median over tokens.

    Args:
        values: The tokens' figures, ``[tokens]``, no NaN.
        unit: Unit of each token, ``[tokens]``.

    Returns:
        The estimate.
    """
    figures = np.asarray(values, dtype=np.float64)
    _, index = np.unique(np.asarray(unit), return_inverse=True)
    median = np.median(figures)
    below = (figures < median) + 0.5 * (figures == median)
    size = np.bincount(index).astype(np.float64)
    error, _ = _spread(np.bincount(index, weights=below) - below.mean() * size, size)
    independent = 0.5 / math.sqrt(figures.size)
    return MedianEstimate(np.sort(figures), max(error, independent), size.size)


def _pair(sums: ArrayLike, counts: ArrayLike | None) -> tuple[Vector, Vector]:
    total = np.asarray(sums, dtype=np.float64)
    return total, np.ones_like(total) if counts is None else np.asarray(counts, dtype=np.float64)


def _spread(residuals: Vector, size: Vector) -> tuple[float, float]:
    """Return the standard error of a ratio of sums, and the skewness of its residuals."""
    n = residuals.size
    if n < 2:
        return math.inf, 0.0
    scaled = residuals / size.mean()  # they sum to 0
    deviation = float(scaled.std(ddof=1))
    skewness = 0.0
    if n > 2 and deviation > 0:
        skewness = float((scaled**3).sum()) * n / ((n - 1) * (n - 2) * deviation**3)
    return deviation / math.sqrt(n), skewness if math.isfinite(skewness) else 0.0


def quantile(alpha: float, units: int) -> float:
    """Return Student's t quantile of a one-sided bound.

    Args:
        alpha: Error rate; halved below `FEW_UNITS` units.
        units: Independent units, two or more.

    Returns:
        The quantile.
    """
    return _student(alpha / 2 if units < FEW_UNITS else alpha, units - 1)


def _student(alpha: float, freedom: float) -> float:
    return -float(scipy.special.stdtrit(freedom, alpha))


class Judgement(NamedTuple):
    """What the data show of a figure against a threshold."""

    status: Status
    value: float
    bound: float
    """The bound that decided, or the one that keeps an undecided figure from passing."""
    lower: float
    """One-sided lower bound: at the passing rate where low is bad, else at the failing rate."""
    upper: float
    threshold: float
    detectable: float
    """Smallest difference these units show with 80 % power: ``(t_alpha + t_0.2) * error``."""
    units: int
    units_needed: int | None
    """Units at which a figure like the one found would be decided with 80 % power; None where no number would do."""


def judge(
    estimate: Estimate,
    threshold: float,
    *,
    bad: Literal["high", "low"],
    alpha: float = 0.05,
    fail_alpha: float | None = None,
) -> Judgement:
    """Decide a figure.

    Args:
        estimate: The figure.
        threshold: What it may reach.
        bad: Which way is worse.
        alpha: Error rate of passing.
        fail_alpha: Error rate of failing: this decision's share of the family's; ``alpha`` if None.

    Returns:
        The judgement. A figure or error that is not a number is never a pass.
    """
    failing = alpha if fail_alpha is None else fail_alpha
    high = bad == "high"
    upper = estimate.bound(alpha if high else failing, "upper")
    lower = estimate.bound(failing if high else alpha, "lower")
    status: Status = "inconclusive"
    if (upper <= threshold) if high else (lower >= threshold):
        status = "pass"
    elif (lower > threshold) if high else (upper < threshold):
        status = "fail"
    detectable = math.inf
    if estimate.units > 1:
        detectable = (quantile(alpha, estimate.units) + _student(1 - POWER, estimate.units - 1)) * estimate.error
    passing, opposite = (upper, lower) if high else (lower, upper)
    return Judgement(
        status=status,
        value=estimate.value,
        bound=opposite if status == "fail" else passing,
        lower=lower,
        upper=upper,
        threshold=threshold,
        detectable=detectable,
        units=estimate.units,
        units_needed=units_needed(estimate, threshold, failing if _beyond(estimate.value, threshold, bad) else alpha),
    )


def _beyond(value: float, threshold: float, bad: Literal["high", "low"]) -> bool:
    return value > threshold if bad == "high" else value < threshold


def units_needed(estimate: Estimate, threshold: float, alpha: float = 0.05) -> int | None:
    """Return how many units would decide a figure like the one found, with 80 % power.

    Args:
        estimate: The figure.
        threshold: What it may reach.
        alpha: Error rate of the bound.

    Returns:
        The number; None where the figure lies at the threshold or no spread is known.
    """
    distance = abs(threshold - estimate.value)
    if not (math.isfinite(estimate.error) and math.isfinite(distance)) or distance == 0:
        return None
    spread = estimate.error * math.sqrt(estimate.units)
    needed = float(FEW_UNITS)
    for _ in range(8):  # t depends on the number sought
        freedom = max(1.0, needed - 1)
        sigmas = _student(alpha, freedom) + _student(1 - POWER, freedom)
        needed = max(float(FEW_UNITS), (sigmas * spread / distance) ** 2)
    return math.ceil(needed) if needed < _MOST_UNITS else None


_MOST_UNITS = 1e9
