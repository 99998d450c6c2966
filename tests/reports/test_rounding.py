"""What a figure may show: as many digits as its interval supports."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ternary_probe.reports.rounding import count, figure, figure_plus_minus, figure_with_interval, percent

CASES = {
    "two digits of the half width": ((27.97, 20.21, 41.13), "28 [20, 41]"),
    "narrow interval, more digits": ((31.11, 25.9, 37.4), "31.1 [25.9, 37.4]"),
    "asymmetric, bound kept off zero": ((3.7, 0.4, 35.0), "3.7 [0.4, 35.0]"),
    "half width just under a power of ten": ((0.0996, 0.0, 0.1992), "0.10 [0.00, 0.20]"),
    "covers zero": ((0.0001, -0.0013, 0.0015), "0.0001 [-0.0013, 0.0015]"),
    "no negative zero": ((-0.00004, -0.0014, 0.0013), "0.0000 [-0.0014, 0.0013]"),
    "negative": ((-0.349, -0.4, -0.3), "-0.349 [-0.400, -0.300]"),
    "wider than the figure": ((89.8, -1100.0, 1300.0), "100 [-1100, 1300]"),
    "large": ((12345.6, 12000.0, 12700.0), "12350 [12000, 12700]"),
    "tiny shares an exponent": ((4.5e-5, 4.4e-5, 4.6e-5), "(4.50 [4.40, 4.60])e-05"),
    "huge shares an exponent": ((1e12, 9e11, 1.1e12), "(1.00 [0.90, 1.10])e+12"),
    "zero width": ((0.125, 0.125, 0.125), "0.125 [0.125, 0.125]"),
    "zero width, endless digits": ((1 / 3, 1 / 3, 1 / 3), "0.333333 [0.333333, 0.333333]"),
    "all zero": ((0.0, 0.0, 0.0), "0 [0, 0]"),
    "nothing measured": ((None, None, None), "–"),
    "no interval": ((3.2, None, None), "3.20 (no interval)"),
    "one bound": ((3.2, None, 4.0), "3.20 [–, 4.00]"),
    "figure missing": ((None, 1.0, 2.0), "– [1.00, 2.00]"),
    "not a number": ((math.nan, 1.0, 2.0), "– [1.00, 2.00]"),
    "infinite bounds": ((1.0, -math.inf, math.inf), "1.00 (no interval)"),
    "subnormal": ((5e-324, 0.0, 1e-323), "0 [0, 0]"),
}


@pytest.mark.parametrize(("figures", "shown"), CASES.values(), ids=CASES)
def test_figure_and_interval_share_their_last_digit(figures, shown):
    assert figure_with_interval(*figures) == shown


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ((0.3049, 0.2518, 0.3580), "0.305 ± 0.053"),
        ((4.5e-5, 4.4e-5, 4.6e-5), "(4.50 ± 0.10)e-05"),
        ((28.0, 20.0, 41.0), "28 [20, 41]"),
        ((1.0, 1.0, 1.0), "1 ± 0"),
        ((None, None, None), "–"),
        ((0.07, None, None), "0.0700 (no interval)"),
    ],
)
def test_plus_minus_only_where_the_interval_is_symmetric(figures, shown):
    assert figure_plus_minus(*figures) == shown


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (3.00211, 5, "3.0021"),
        (20.1279, 4, "20.13"),
        (99.96, 3, "100"),
        (1234567.0, 3, "1230000"),
        (1e-7, 2, "1.0e-07"),
        (1.234e12, 3, "1.23e+12"),
        (0.0, 3, "0"),
        (-0.0, 3, "0"),
        (None, 3, "–"),
        (math.inf, 3, "–"),
    ],
)
def test_a_figure_without_interval_keeps_its_significant_digits(value, digits, shown):
    assert figure(value, digits) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0.005, "0.5 %"), (0.0001, "0.01 %"), (1e-6, "0.0001 %"), (1e-7, "0.00001 %"), (1, "100 %")]
)
def test_rates_are_percentages_without_exponent(share, shown):
    assert percent(share) == shown


def test_counts_are_separated_by_thousands():
    assert count(2413875) == "2,413,875"


NUMBER = st.floats(min_value=-1e8, max_value=1e8, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-12)


@given(NUMBER, NUMBER, NUMBER)
def test_every_shown_number_is_the_true_one_within_half_its_last_digit(value, first, second):
    low, high = sorted((first, second))
    shown = figure_with_interval(value, low, high)

    exponent = int((re.search(r"\)e([+-]\d+)$", shown) or [0, "0"])[1])
    numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"\)e[+-]\d+$", "", shown))
    decimals = {len(n.partition(".")[2]) for n in numbers}
    assert len(numbers) == 3
    assert len(decimals) == 1, "the three must end at the same digit"
    # The widest step allowed: a tenth of the half width, or the sixth significant digit where that is coarser.
    step = max(10 ** -max(decimals) * 10.0**exponent, (high - low) / 20, max(map(abs, (value, low, high))) * 1e-5)
    for written, true in zip(numbers, (value, low, high), strict=True):
        assert abs(float(written) * 10.0**exponent - true) <= step / 2 * (1 + 1e-6)


@given(st.floats(min_value=1e-3, max_value=1e3), st.floats(min_value=1e-3, max_value=1e3))
def test_an_interval_that_excludes_zero_never_shows_zero(low, width):
    shown = figure_with_interval(low + width / 2, low, low + width)

    assert float(re.findall(r"[\d.]+", shown)[1]) > 0
