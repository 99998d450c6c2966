"""McNemar, bounds of the loss and joint decisions, against enumeration and brute-force likelihood."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from ternary_probe.gates._mcnemar import (
    PairedCounts,
    count_pairs,
    decide_tasks,
    fisher,
    holm,
    loss_bound,
    loss_score,
    mcnemar,
)


def table(lost: int, gained: int, documents: int = 500) -> PairedCounts:
    return PairedCounts(documents, lost, gained, documents // 2)


def test_documents_are_counted_by_who_is_right() -> None:
    base = np.array([1, 1, 1, 0, 0, 1], dtype=bool)
    candidate = np.array([1, 0, 0, 1, 0, 1], dtype=bool)

    assert count_pairs(base, candidate) == PairedCounts(documents=6, lost=2, gained=1, base_right=4)
    assert count_pairs(base, candidate).loss == pytest.approx(base.mean() - candidate.mean())


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 0), (0, 5), (7, 3), (12, 12), (1, 9)])
def test_the_exact_p_value_is_the_share_of_coin_tosses_as_bad(lost: int, gained: int) -> None:
    tosses = lost + gained
    tail = sum(math.comb(tosses, k) for k in range(lost, tosses + 1)) / 2**tosses

    assert mcnemar(table(lost, gained)) == pytest.approx(tail, rel=1e-12)
    if tosses:
        assert stats.binomtest(lost, tosses, alternative="greater").pvalue == pytest.approx(tail, rel=1e-12)


@pytest.mark.parametrize(
    ("lost", "gained", "loss"), [(9, 4, 0.02), (9, 4, 0.2), (3, 11, -0.05), (0, 6, 0.1), (8, 0, 0.01)]
)
def test_the_score_is_taken_at_the_most_likely_table_with_that_loss(lost: int, gained: int, loss: float) -> None:
    n = 60
    counts = table(lost, gained, n)

    def surprise(share_gained: float) -> float:
        cells = [share_gained + loss, share_gained, 1 - 2 * share_gained - loss]
        return -sum(
            k * math.log(max(p, 1e-300)) for k, p in zip((lost, gained, n - lost - gained), cells, strict=True) if k
        )

    low = max(0.0, -loss)
    best = optimize.minimize_scalar(
        surprise, bounds=(low, (1 - loss) / 2), method="bounded", options={"xatol": 1e-12}
    ).x
    variance = n * (2 * best + loss - loss**2)

    assert loss_score(counts, loss) == pytest.approx((lost - gained - n * loss) / math.sqrt(variance), rel=1e-4)


def test_at_no_loss_the_score_is_mcnemars() -> None:
    assert loss_score(table(14, 5), 0.0) == pytest.approx(9 / math.sqrt(19), rel=1e-12)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 0), (0, 3), (20, 12), (250, 250)])
def test_bounds_enclose_the_loss_and_sit_where_the_score_says(lost: int, gained: int) -> None:
    counts = table(lost, gained)
    lower, upper = loss_bound(counts, 0.05, "lower"), loss_bound(counts, 0.05, "upper")

    assert lower < counts.loss < upper
    assert loss_score(counts, upper) == pytest.approx(-stats.norm.isf(0.05), abs=1e-6)
    assert loss_score(counts, lower) == pytest.approx(stats.norm.isf(0.05), abs=1e-6)


def test_equal_answers_bound_the_loss_by_the_number_of_documents() -> None:
    z2 = stats.norm.isf(0.05) ** 2

    assert loss_bound(table(0, 0, 300), 0.05, "upper") == pytest.approx(z2 / (300 + z2), rel=1e-6)


@pytest.mark.parametrize("loss", [0.02, 0.1])
def test_the_upper_bound_misses_the_true_loss_at_its_rate(loss: float) -> None:
    """Exact, by enumeration of all tables of 120 documents; the score test may exceed 5 % slightly."""
    n, share_gained = 120, 0.04
    probabilities = [share_gained + loss, share_gained, 1 - 2 * share_gained - loss]
    tables = np.array([(lost, gained, n - lost - gained) for lost, gained in itertools.product(range(42), range(18))])
    weights = stats.multinomial.pmf(tables, n, probabilities)
    likely = weights > 1e-7
    assert weights[likely].sum() > 0.999
    missed = sum(
        weight
        for (lost, gained, _), weight in zip(tables[likely], weights[likely], strict=True)
        if loss_bound(table(int(lost), int(gained), n), 0.05, "upper") < loss
    )

    assert 0.02 < missed < 0.065


def test_holm_is_the_step_down_of_the_ordered_p_values() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.2]) == [0.2]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_fishers_combination_is_chi_squared() -> None:
    assert fisher([0.1, 0.2]) == pytest.approx(stats.chi2.sf(-2 * math.log(0.02), 4), rel=1e-12)


def test_a_loss_shared_by_all_tasks_fails_jointly_though_no_task_fails_alone() -> None:
    tables = {f"task{i}": table(21, 9, 400) for i in range(8)}

    decision = decide_tasks(tables, max_loss=0.005, max_task_loss=0.03)

    assert decision.status == decision.pooled.status == "fail"
    assert all(task.status != "fail" for task in decision.tasks.values())


def test_a_task_that_breaks_alone_fails_though_the_union_passes() -> None:
    tables = {f"task{i}": table(30, 30, 4000) for i in range(8)} | {"broken": table(60, 1, 300)}

    decision = decide_tasks(tables, max_loss=0.01, max_task_loss=0.03)

    assert decision.pooled.status == "pass"
    assert [name for name, task in decision.tasks.items() if task.status == "fail"] == ["broken"]
    assert decision.status == "fail"


def test_a_loss_that_is_real_but_allowed_does_not_fail() -> None:
    decision = decide_tasks({"task": table(400, 250, 30000)}, max_loss=0.01, max_task_loss=0.03)

    assert decision.pooled.exact < 1e-6
    assert decision.status == "pass"


def test_few_documents_decide_nothing_and_say_how_many_would() -> None:
    decision = decide_tasks({"task": table(3, 2, 100)}, max_loss=0.02, max_task_loss=0.03)

    assert decision.status == "inconclusive"
    assert decision.detectable == pytest.approx(2.4865 * math.sqrt(0.05 - 0.01**2) / 10, rel=1e-4)
    assert decision.documents_needed == math.ceil((2.486474860 * math.sqrt(0.05 - 0.01**2) / 0.01) ** 2)


def test_a_smaller_share_of_the_error_rate_makes_failing_harder() -> None:
    tables = {"task": table(30, 14, 800)}

    assert decide_tasks(tables, max_loss=0, max_task_loss=0.03).status == "fail"
    assert decide_tasks(tables, max_loss=0, max_task_loss=0.03, fail_alpha=0.001).status == "inconclusive"
