"""From cells to figures, on cells made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from reports.factory import amplitudes
from scipy import stats

from ternary_probe.records import Arm, NoiseFloor
from ternary_probe.studies.summary import (
    predict,
    summarize_curves,
    summarize_leverage,
    summarize_means,
    values_of,
)

OUTLIER, OTHER = [0.30, 0.34, 0.28, 0.32], [0.020, 0.024, 0.018, 0.022]


def floor(nll: float = 1e-4, kl: float = 1e-6) -> NoiseFloor:
    return NoiseFloor(
        nll=nll,
        kl=kl,
        repeat_nll=0,
        rechunk_nll=0,
        rechunk_kl=0,
        tiny_flip_rate=1e-4,
        tiny_flip_seeds=4,
        tiny_flip_nll_sd=nll,
        tiny_flip_kl_sd=kl,
    )


def arm(name: str, seed: int, nll: float | None, kl: float | None = None, **fields: Any) -> Arm:
    data = {
        "rate": 0.005,
        "matching": "count",
        "flips": 100,
        "zeros": 0,
        "delta_ppl": None,
        "checksum_before": "0",
        "checksum_during": f"{seed + 1:016x}",
        "checksum_after": "0",
        "recipe": "",
    }
    return Arm.model_validate(data | {"arm": name, "seed": seed, "delta_nll": nll, "kl": kl} | fields)


def arms(name: str, nll: list[float], **fields: Any) -> list[Arm]:
    return [arm(name, seed, value, 2 * value, **fields) for seed, value in enumerate(nll)]


def only(items: Any, **wanted: Any) -> Any:
    found = [item for item in items if all(getattr(item, name) == value for name, value in wanted.items())]
    assert len(found) == 1, f"{len(found)} entries match {wanted}"
    return found[0]


def test_means_are_students_t_over_seeds_for_both_responses():
    found = summarize_means(arms("outlier", OUTLIER), floor(), 0.95)

    assert [mean.response for mean in found] == ["nll", "kl"]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(OUTLIER), scale=stats.sem(OUTLIER))
    nll = only(found, response="nll")
    assert (nll.mean, nll.sd, nll.ci_low, nll.ci_high) == pytest.approx((0.31, np.std(OUTLIER, ddof=1), low, high))
    assert (nll.seeds, nll.above_floor, nll.status) == (4, True, "ok")
    assert only(found, response="kl").mean == pytest.approx(0.62)


def test_a_mean_within_the_noise_floor_is_marked():
    found = summarize_means(arms("other", OTHER), floor(nll=0.05, kl=0.01), 0.95)

    assert not only(found, response="nll").above_floor
    assert only(found, response="kl").above_floor


def test_one_seed_gives_a_mean_without_interval():
    (mean,) = summarize_means([arm("outlier", 0, 0.3)], floor(), 0.95)

    assert (mean.mean, mean.sd, mean.ci_low, mean.ci_high) == (0.3, None, None, None)


def test_a_broken_cell_breaks_its_mean_and_no_other():
    broken = [*arms("outlier", OUTLIER), arm("outlier", 9, None, status="non_finite")]

    found = summarize_means([*broken, *arms("other", OTHER)], floor(), 0.95)

    assert only(found, arm="outlier", response="nll").status == "non_finite"
    assert only(found, arm="outlier", response="nll").mean is None
    assert only(found, arm="other", response="nll").mean == pytest.approx(0.021)


def test_leverage_is_the_ratio_of_means_not_the_mean_of_ratios():
    above, below = [1.0, 3.0], [0.1, 0.5]
    cells = arms("outlier", above, rate=0.01) + arms("other", below, rate=0.01)

    found = only(summarize_leverage(cells, floor(), 0.95), response="nll")

    assert found.ratio == pytest.approx(4 / 0.6)
    assert found.ratio != pytest.approx(np.mean([10, 6]))


def test_leverage_has_an_interval_for_every_pair_response_and_matching():
    cells = []
    for matching in ("count", "rate"):
        for rate in (0.001, 0.005):
            fields = {"matching": matching, "rate": rate}
            cells += arms("outlier", OUTLIER, **fields) + arms("other", OTHER, **fields)
            cells += arms("all", [2 * v for v in OTHER], **fields) + arms("magnitude_outlier", OTHER, **fields)

    found = summarize_leverage(cells, floor(), 0.95)

    assert len(found) == 2 * 2 * 2 * 3  # matchings, rates, responses; pairs below
    assert {(f.numerator, f.denominator) for f in found} == {
        ("outlier", "other"),
        ("outlier", "all"),
        ("outlier", "magnitude_outlier"),
    }
    one = only(found, matching="rate", rate=0.001, denominator="other", response="kl")
    assert one.ratio == pytest.approx(0.31 / 0.021)
    assert one.ci_low < one.ratio < one.ci_high
    assert one.bootstrap_low < one.ratio < one.bootstrap_high
    assert one.status == "ok"


def test_a_denominator_of_noise_is_inconclusive_and_says_why():
    noisy = [0.02, -0.03, 0.01, 0.015]

    found = summarize_leverage(arms("outlier", OUTLIER) + arms("other", noisy), floor(), 0.95)

    for item in found:
        assert item.status == "inconclusive"
        assert "interval covers 0" in item.reason
        assert item.ci_low is None


def test_a_denominator_within_the_noise_floor_is_inconclusive():
    found = summarize_leverage(arms("outlier", OUTLIER) + arms("other", OTHER), floor(nll=0.03), 0.95)

    assert only(found, response="nll").status == "inconclusive"
    assert "noise floor" in only(found, response="nll").reason
    assert only(found, response="kl").status == "ok"


def test_a_negative_mean_gives_no_ratio():
    found = summarize_leverage(arms("outlier", OUTLIER) + arms("other", [-v for v in OTHER]), floor(), 0.95)

    assert [item.ratio for item in found] == [None, None]
    assert [item.status for item in found] == ["inconclusive"] * 2


def test_a_single_seed_is_inconclusive():
    found = summarize_leverage([arm("outlier", 0, 0.3), arm("other", 0, 0.02)], floor(), 0.95)

    assert only(found, response="nll").status == "inconclusive"
    assert "two seeds" in only(found, response="nll").reason
    assert only(found, response="nll").ratio == pytest.approx(15)


def test_a_broken_arm_makes_leverage_non_finite():
    cells = [*arms("outlier", OUTLIER), arm("outlier", 8, None, status="non_finite"), *arms("other", OTHER)]

    for item in summarize_leverage(cells, floor(), 0.95):
        assert item.status == "non_finite"
        assert item.ci_low is None
        assert item.reason


def test_arms_without_their_pair_give_no_leverage():
    assert summarize_leverage(arms("outlier", OUTLIER), floor(), 0.95) == ()


def test_without_kl_only_nll_is_summarized():
    cells = [arm("outlier", s, v) for s, v in enumerate(OUTLIER)] + [arm("other", s, v) for s, v in enumerate(OTHER)]

    assert {item.response for item in summarize_leverage(cells, floor(), 0.95)} == {"nll"}
    assert {item.response for item in summarize_means(cells, floor(), 0.95)} == {"nll"}


def test_values_of_leaves_out_what_was_not_measured():
    cells = [arm("all", 0, 0.1, 0.2), arm("all", 1, None, status="non_finite"), arm("all", 2, 0.3)]

    assert values_of(cells, "nll") == [0.1, 0.3]
    assert values_of(cells, "kl") == [0.2]


def curve_of(response: list[float], rates: list[float], **how: Any) -> Any:
    spread = (0.97, 1.0, 1.03, 1.01, 0.99)
    cells = [
        arm("outlier", seed, mean * factor, mean * factor, rate=rate)
        for rate, mean in zip(rates, response, strict=True)
        for seed, factor in enumerate(spread)
    ]
    return only(summarize_curves(cells, floor(**how), 0.95), response="kl")


def test_a_proportional_response_is_linear_all_the_way():
    rates = [1e-4, 1e-3, 1e-2]

    curve = curve_of([30 * rate for rate in rates], rates)

    assert curve.slope == pytest.approx(1.0)
    assert curve.linear_up_to == 1e-2
    assert curve.note == ""


def test_a_response_that_bends_is_linear_up_to_the_bend():
    rates = [1e-4, 1e-3, 1e-2]

    curve = curve_of([30 * 1e-4, 30 * 1e-3, 90 * 1e-2], rates)

    assert curve.linear_up_to == 1e-3
    assert "0.01" in curve.note
    assert "3 times" in curve.note
    assert curve.slope == pytest.approx(np.polyfit(np.log(rates), np.log([0.003, 0.03, 0.9]), 1)[0], rel=1e-3)


def test_a_curve_within_the_noise_floor_anchors_nothing():
    curve = curve_of([1e-5, 1e-4], [1e-4, 1e-3], kl=1e-2)

    assert curve.linear_up_to is None
    assert "noise floor" in curve.note


def test_rates_in_any_order_give_one_curve():
    rates = [1e-2, 1e-4, 1e-3]

    assert curve_of([30 * rate for rate in rates], rates).linear_up_to == 1e-2


def test_one_rate_has_no_curve():
    assert summarize_curves(arms("outlier", OUTLIER), floor(), 0.95) == ()


def test_the_prediction_averages_matrices_before_it_divides():
    figures = ((8.0, 0.6, 6.0, 0.8), (12.0, 0.4, 10.0, 0.2))
    names = ("n_alpha2_outlier", "n_alpha2_other", "weighted_outlier", "weighted_other")
    two = [amplitudes()[0].model_copy(update=dict(zip(names, row, strict=True))) for row in figures]

    found = predict(two)

    assert found.n_alpha2_outlier == pytest.approx(10)
    assert found.ratio_outlier_other == pytest.approx(20)
    assert found.weighted_outlier_all == pytest.approx(8)
    assert found.weighted_outlier_other == pytest.approx(16)
    assert not math.isnan(found.n_alpha2_outlier)
