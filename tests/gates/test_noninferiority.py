"""Bounds against textbook formulas and simulation; decisions that follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ternary_probe.gates._noninferiority import (
    FEW_UNITS,
    LogRatioEstimate,
    estimate_mean,
    estimate_median,
    estimate_share,
    judge,
    units_needed,
)

SYMMETRIC = np.array([0.1, -0.1, 0.3, -0.3, 0.2, -0.2, 0.0, 0.4, -0.4, 0.0])


def test_the_bound_of_a_mean_over_equal_units_is_students() -> None:
    values = 1 + SYMMETRIC
    estimate = estimate_mean(values)
    low, high = stats.t.interval(0.9, 9, loc=values.mean(), scale=stats.sem(values))

    assert estimate.bound(0.05, "upper") == pytest.approx(high, rel=1e-12)
    assert estimate.bound(0.05, "lower") == pytest.approx(low, rel=1e-12)


def test_the_mean_over_unequal_units_weighs_tokens_alike() -> None:
    sums, counts = np.array([1.0, 8.0, 3.0]), np.array([10.0, 20.0, 30.0])

    estimate = estimate_mean(sums, counts)

    assert estimate.value == 12 / 60
    residual = (sums - 0.2 * counts) / 20
    assert estimate.error == pytest.approx(residual.std(ddof=1) / math.sqrt(3), rel=1e-12)


def test_fewer_than_eight_units_are_bounded_at_half_the_error_rate() -> None:
    values = np.array([-0.2, 0.2, -0.1, 0.1])
    estimate = estimate_mean(values)

    assert FEW_UNITS == 8
    assert estimate.bound(0.05, "upper") == pytest.approx(stats.t.isf(0.025, 3) * stats.sem(values), rel=1e-12)


def test_a_long_tail_widens_the_bound_on_its_side_only() -> None:
    tail = np.array([0.0] * 15 + [1.0])
    estimate, mirrored = estimate_mean(tail), estimate_mean(-tail)
    t = stats.t.isf(0.05, 15) * stats.sem(tail)

    assert estimate.bound(0.05, "upper") > tail.mean() + t * 1.1
    assert estimate.bound(0.05, "lower") == pytest.approx(tail.mean() - t)
    assert mirrored.bound(0.05, "lower") == pytest.approx(-estimate.bound(0.05, "upper"))


@pytest.mark.parametrize(
    "make", [estimate_mean, lambda v: estimate_share(v > 0.5, np.ones(len(v)))], ids=["mean", "share"]
)
def test_one_unit_bounds_nothing(make) -> None:
    judged = judge(make(np.array([0.4])), 0.9, bad="high")

    assert judged.status == "inconclusive"
    assert judged.units_needed is None
    assert math.isinf(judged.detectable)


def test_a_share_without_a_single_miss_is_still_bounded_by_its_tokens() -> None:
    estimate = estimate_share(np.full(8, 50.0), np.full(8, 50.0))

    assert estimate.value == 1
    assert estimate.bound(0.05, "upper") == 1
    assert estimate.bound(0.05, "lower") == pytest.approx(0.05 ** (1 / 400), rel=1e-9)


def test_a_share_that_varies_between_windows_is_bounded_by_their_spread() -> None:
    hits, counts = np.array([90.0, 60, 95, 55, 92, 58, 91, 59]), np.full(8, 100.0)
    estimate = estimate_share(hits, counts)
    exact = stats.beta.ppf(0.05, hits.sum(), 800 - hits.sum() + 1)

    assert estimate.bound(0.05, "lower") < exact - 0.05


def test_the_bounds_of_a_median_cover_it_whatever_the_tail() -> None:
    """95 % bounds, 600 samples: 19 or more misses too many than 5 % have probability below 1e-3."""
    draw = np.random.default_rng(3)
    misses = 0
    for _ in range(600):
        shift = np.repeat(0.3 * draw.standard_normal(12), 40)  # tokens of a window share something
        ratio = np.exp(shift + np.clip(draw.standard_cauchy(480), -50, 50))  # median of the population 1
        misses += estimate_median(ratio, np.repeat(np.arange(12), 40)).bound(0.05, "lower") > 1

    assert misses <= stats.binom.ppf(0.999, 600, 0.05)


def test_the_median_is_that_of_all_tokens() -> None:
    values = np.array([3.0, 1.0, 2.0, 9.0, np.inf])

    estimate = estimate_median(values, np.array([0, 0, 1, 1, 1]))

    assert estimate.value == 3
    assert estimate.bound(0.05, "upper") == math.inf


def test_a_ratio_is_bounded_by_welchs_interval_on_the_log() -> None:
    estimate = LogRatioEstimate((4.0, 5.0, 6.0, 5.0, 4.5, 5.5, 5.0, 5.0), (1.0, 1.1, 0.9, 1.0, 1.0, 1.05, 0.95, 1.0))

    assert estimate.value == pytest.approx(math.log(5), rel=1e-12)
    assert math.log(4.4) < estimate.bound(0.05, "lower") < math.log(5) < estimate.bound(0.05, "upper") < math.log(5.7)
    parts = [np.var(x, ddof=1) / (8 * np.mean(x) ** 2) for x in (estimate.numerator, estimate.denominator)]
    assert estimate.error == pytest.approx(math.sqrt(sum(parts)) * stats.t.isf(stats.norm.sf(1), 9.6), rel=0.02)


def test_a_ratio_without_a_positive_denominator_has_no_bound() -> None:
    estimate = LogRatioEstimate((4.0, 5.0), (-1.0, 1.1))

    assert estimate.bound(0.05, "upper") == math.inf
    assert estimate.bound(0.05, "lower") == -math.inf
    assert "covers 0" in estimate.reason


@pytest.mark.parametrize(
    ("mean", "status"),
    [(-0.2, "pass"), (0.5, "pass"), (0.95, "inconclusive"), (1.05, "inconclusive"), (1.5, "fail")],
)
def test_only_bounds_decide(mean: float, status: str) -> None:
    assert judge(estimate_mean(mean + SYMMETRIC), 1.0, bad="high").status == status
    assert judge(estimate_mean(-mean + SYMMETRIC), -1.0, bad="low").status == status


def test_a_share_of_the_error_rate_makes_failing_harder_and_passing_no_easier() -> None:
    alone = judge(estimate_mean(1.18 + SYMMETRIC), 1.0, bad="high")
    of_many = judge(estimate_mean(1.18 + SYMMETRIC), 1.0, bad="high", fail_alpha=0.005)
    passing = judge(estimate_mean(0.8 + SYMMETRIC), 1.0, bad="high", fail_alpha=0.005)

    assert alone.status == "fail"
    assert of_many.status == "inconclusive"
    assert passing.status == "pass"


def test_the_comparison_is_unrounded() -> None:
    values = np.full(8, 0.25)

    assert judge(estimate_mean(values), 0.25, bad="high").status == "pass"
    assert judge(estimate_mean(values), math.nextafter(0.25, 0), bad="high").status == "fail"


@pytest.mark.parametrize("bad", ["high", "low"])
def test_not_a_number_never_passes(bad) -> None:
    values = SYMMETRIC.copy()
    values[3] = np.nan

    assert judge(estimate_mean(values), 1e9 if bad == "high" else -1e9, bad=bad).status != "pass"


def test_the_detectable_difference_is_detected_four_times_in_five() -> None:
    """2,000 samples of 12 windows; 80 % power to within 3 points (3.4 standard errors)."""
    draw = np.random.default_rng(5)
    noise = draw.standard_normal((2000, 12))
    effect = (stats.t.isf(0.05, 11) + stats.t.isf(0.2, 11)) / math.sqrt(12)
    judged = [judge(estimate_mean(row + effect), 0.0, bad="high") for row in noise]

    assert np.mean([one.detectable for one in judged]) == pytest.approx(effect, rel=0.05)
    assert np.mean([one.status == "fail" for one in judged]) == pytest.approx(0.8, abs=0.03)


def test_the_text_said_to_decide_decides_four_times_in_five() -> None:
    draw = np.random.default_rng(7)
    pilot = estimate_mean(0.6 + np.tile([-1.0, 1.0], 5))
    needed = units_needed(pilot, 1.0)
    spread = pilot.error * math.sqrt(10)
    passed = [
        judge(estimate_mean(0.6 + spread * draw.standard_normal(needed)), 1.0, bad="high").status == "pass"
        for _ in range(1000)
    ]

    assert needed > 10
    assert np.mean(passed) == pytest.approx(0.8, abs=0.05)


def test_no_amount_of_text_decides_a_figure_at_its_threshold() -> None:
    assert units_needed(estimate_mean(SYMMETRIC), float(SYMMETRIC.mean())) is None
