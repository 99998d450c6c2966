"""Intervals against scipy and hand formulas, and their coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ternary_probe.studies.intervals import bootstrap_ratio, log_log_slope, mean_interval, ratio_of_means

REPEATS = 4000
SEEDS = 8


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_mean_interval_is_scipys_student_t(confidence):
    values = [0.3, 0.11, 0.5, 0.42, 0.07]

    found = mean_interval(values, confidence)

    low, high = stats.t.interval(confidence, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found == pytest.approx((np.mean(values), low, high), rel=1e-12)


def test_the_mean_interval_by_hand():
    # mean 2, standard deviation 1, half width 4.302653 / sqrt(3)
    assert mean_interval([1, 2, 3]) == pytest.approx((2, 2 - 2.4841377, 2 + 2.4841377), rel=1e-7)


def test_one_value_has_an_infinite_interval():
    assert mean_interval([0.25]) == (0.25, -math.inf, math.inf)


def test_the_ratio_interval_is_welchs_t_on_the_difference_of_logs():
    """Delta method by hand: the standard error of a log mean is the coefficient of variation of the mean."""
    a, b = np.array([2.0, 2.4, 1.9, 2.2, 2.1]), np.array([0.5, 0.62, 0.55, 0.41])
    va, vb = a.var(ddof=1) / 5 / a.mean() ** 2, b.var(ddof=1) / 4 / b.mean() ** 2
    freedom = (va + vb) ** 2 / (va**2 / 4 + vb**2 / 3)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(va + vb)

    found = ratio_of_means(a, b)

    ratio = a.mean() / b.mean()
    assert found.reason == ""
    assert found.interval == pytest.approx((ratio, ratio / math.exp(half), ratio * math.exp(half)), rel=1e-12)


def test_the_ratio_interval_approaches_scipys_welch_test_on_small_spreads():
    """Where values spread little, the log of a mean is the mean of the logs: `scipy.stats.ttest_ind` on logs."""
    rng = np.random.default_rng(5)
    a, b = 3 * np.exp(1e-4 * rng.standard_normal(9)), np.exp(2e-4 * rng.standard_normal(6))

    found = ratio_of_means(a, b).interval

    welch = stats.ttest_ind(np.log(a), np.log(b), equal_var=False).confidence_interval(0.95)
    assert found is not None
    assert np.log([found.low, found.high]) == pytest.approx([welch.low, welch.high], abs=1e-7)


def test_the_inverse_ratio_has_the_inverse_interval():
    a, b = [2.0, 2.4, 1.9], [0.5, 0.62, 0.55]
    one, other = ratio_of_means(a, b).interval, ratio_of_means(b, a).interval
    assert one is not None
    assert other is not None
    assert (other.value, other.low, other.high) == pytest.approx((1 / one.value, 1 / one.high, 1 / one.low), rel=1e-12)


@pytest.mark.parametrize(
    ("above", "below", "reason"),
    [
        ([1.0, 1.2, 1.1], [0.1, -0.2, 0.15], "denominator's interval covers 0"),
        ([1.0, 1.2, 1.1], [0.1, 0.3, 0.02], "denominator's interval covers 0"),
        ([1.0, 1.2, 1.1], [-0.5, -0.51, -0.49], "denominator's interval covers 0"),
        ([1.0, 1.2, 1.1], [0.0, 0.0, 0.0], "denominator's interval covers 0"),
        ([-0.5, -0.51], [1.0, 1.1], "numerator's mean is not positive"),
        ([1.0], [0.1, 0.11], "two seeds"),
        ([1.0, 1.1], [0.1], "two seeds"),
        ([], [], "two seeds"),
    ],
    ids=str,
)
def test_a_ratio_that_says_nothing_has_a_reason_and_no_interval(above, below, reason):
    found = ratio_of_means(above, below)

    assert found.interval is None
    assert reason in found.reason


def test_values_without_spread_have_an_interval_of_no_width():
    assert ratio_of_means([3.0, 3.0], [1.5, 1.5]).interval == (2.0, 2.0, 2.0)


def test_the_mean_interval_covers_as_it_says():
    rng = np.random.default_rng(20)
    draws = rng.normal(0.3, 0.2, (REPEATS, SEEDS))

    hits = sum(low <= 0.3 <= high for _, low, high in map(mean_interval, draws))

    assert 0.94 < hits / REPEATS < 0.96


@pytest.mark.parametrize("spread", [0.1, 0.3], ids=lambda s: f"cv={s}")
@pytest.mark.parametrize("law", ["normal", "gamma"])
def test_the_ratio_interval_covers_between_92_and_97_percent_at_eight_seeds(law, spread):
    """The claim for which Welch's t on the logs was chosen over a bootstrap, under a skewed law as well."""
    rng = np.random.default_rng(21)

    def draw(mean: float) -> np.ndarray:
        if law == "normal":
            return rng.normal(mean, spread * mean, (REPEATS, SEEDS))
        return rng.gamma(spread**-2, mean * spread**2, (REPEATS, SEEDS))

    truth = 12.0
    hits = asked = 0
    for above, below in zip(draw(1.2), draw(0.1), strict=True):
        interval = ratio_of_means(above, below).interval
        if interval is not None:
            asked += 1
            hits += interval.low <= truth <= interval.high

    assert asked > 0.95 * REPEATS
    assert 0.92 < hits / asked < 0.97


def test_the_bootstrap_is_repeatable_and_near_the_normal_interval():
    rng = np.random.default_rng(3)
    a, b = rng.normal(3, 0.3, 60), rng.normal(1, 0.1, 60)

    found, again = bootstrap_ratio(a, b), bootstrap_ratio(a, b)
    welch = ratio_of_means(a, b).interval

    assert found == again
    assert found is not None
    assert welch is not None
    assert found == pytest.approx(welch, rel=0.02)


def test_the_bootstrap_covers_too_little_at_five_seeds():
    """Why it stands beside and never instead."""
    rng = np.random.default_rng(8)
    found = [bootstrap_ratio(rng.normal(2, 0.6, 5), rng.normal(1, 0.3, 5), draws=400) for _ in range(1000)]
    hits = sum(i is not None and i.low <= 2 <= i.high for i in found)
    assert hits / 1000 < 0.9


@pytest.mark.parametrize("below", [[-1.0, 1.5], [0.0, 1.0], [-1.0, -2.0]], ids=str)
def test_a_bootstrap_whose_denominator_can_vanish_is_no_interval(below):
    assert bootstrap_ratio([1.0, 2.0], below) is None


@pytest.mark.parametrize("slope", [0.5, 1.0, 1.57, 2.0])
def test_the_slope_of_a_power_law_is_its_exponent(slope):
    rates = np.array([1e-4, 1e-3, 5e-3, 2e-2])

    found = log_log_slope(rates, 7 * rates**slope)

    assert found is not None
    assert found.value == pytest.approx(slope, rel=1e-12)
    assert found.standard_error == pytest.approx(0, abs=1e-6)


def test_the_slope_and_its_error_are_numpys_least_squares():
    rates, means = np.array([1e-3, 2e-3, 5e-3, 1e-2]), np.array([0.011, 0.019, 0.06, 0.1])
    (slope, _), covariance = np.polyfit(np.log(rates), np.log(means), 1, cov="unscaled")
    residual = np.log(means) - np.polyval(np.polyfit(np.log(rates), np.log(means), 1), np.log(rates))

    found = log_log_slope(rates, means)

    assert found is not None
    assert found.value == pytest.approx(slope, rel=1e-10)
    assert found.standard_error == pytest.approx(math.sqrt(covariance[0, 0] * (residual @ residual) / 2), rel=1e-10)


def test_two_points_give_a_slope_without_an_error():
    assert log_log_slope([0.01, 0.1], [1, 10]) == (pytest.approx(1.0), None)


@pytest.mark.parametrize(
    ("rates", "means"), [([0.1], [1.0]), ([0.01, 0.1], [-1.0, 2.0]), ([0.1, 0.1], [1.0, 2.0])], ids=str
)
def test_no_line_goes_through_one_point(rates, means):
    assert log_log_slope(rates, means) is None
