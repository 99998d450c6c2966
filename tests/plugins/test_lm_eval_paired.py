"""Paired bootstrap against every possible resample, McNemar's test against its closed form."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from ternary_probe_lm_eval.paired import mcnemar, paired_bootstrap, paired_statistic

from ternary_probe.errors import ProbeError

CLEAN = np.array([0.31, 1.72, 2.05, 0.98, 1.41])
PERTURBED = np.array([0.57, 1.61, 3.33, 1.29, 1.40])
WORDS = np.array([3.0, 11.0, 7.0, 4.0, 6.0])


def every_resample(figure) -> np.ndarray:
    """The exact bootstrap distribution: all 5^5 ways to draw five documents, equally likely."""
    return np.sort([figure(list(rows)) for rows in itertools.product(range(5), repeat=5)])


def is_quantile(distribution: np.ndarray, value: float, level: float) -> bool:
    """Whether a value cuts a distribution, which has atoms of up to 4 %, at a level, to within the noise of the draws."""
    below, upto = (distribution < value - 1e-9).mean(), (distribution <= value + 1e-9).mean()
    return bool(below <= level + 0.005 and upto >= level - 0.005)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("case", ["mean", "ratio", "perplexity"])
def test_the_interval_cuts_the_exact_bootstrap_distribution_at_its_tails(case, confidence):
    weights, transform = {
        "mean": (None, lambda ratio: ratio),
        "ratio": (WORDS, lambda ratio: ratio),
        "perplexity": (WORDS, np.exp),
    }[case]
    w = np.ones(5) if weights is None else weights

    def difference(rows: list[int]) -> float:
        total = sum(w[i] for i in rows)
        after, before = (sum(side[i] for i in rows) / total for side in (PERTURBED, CLEAN))
        return float(transform(after) - transform(before))

    found = paired_bootstrap(CLEAN, PERTURBED, weights, transform=transform, confidence=confidence, draws=60_000)

    assert found.value == pytest.approx(difference([0, 1, 2, 3, 4]), rel=1e-13)
    exact = every_resample(difference)
    tail = (1 - confidence) / 2
    assert is_quantile(exact, found.low, tail)
    assert is_quantile(exact, found.high, 1 - tail)
    assert not is_quantile(exact, found.low, tail + 0.06), "the comparison tells nothing"


def test_the_interval_is_the_normal_one_for_many_documents():
    rng = np.random.Generator(np.random.Philox(key=5))
    clean = rng.normal(0, 30, 4000)
    difference = rng.normal(0.2, 1, 4000)
    found = paired_bootstrap(clean, clean + difference)
    half = 1.959964 * difference.std() / math.sqrt(4000)
    assert found.low == pytest.approx(difference.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(difference.mean() + half, abs=0.05 * half)


def test_pairing_takes_the_documents_own_difficulty_out():
    clean = np.array([1.0, 400.0, 7.0, 80.0, 3000.0, 12.0])
    found = paired_bootstrap(clean, clean + 0.5)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-9)


def test_any_statistic_gives_what_the_mean_gives_on_the_same_resamples():
    plain = paired_bootstrap(CLEAN, PERTURBED, draws=700, seed=3)
    found = paired_statistic(list(CLEAN), list(PERTURBED), lambda items: sum(items) / len(items), draws=700, seed=3)
    assert found == pytest.approx(plain, rel=1e-12)


def test_equal_seeds_resample_alike_and_no_global_generator_is_touched():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = paired_bootstrap(CLEAN, PERTURBED, draws=200, seed=1)
    assert first == paired_bootstrap(CLEAN, PERTURBED, draws=200, seed=1)
    assert first != paired_bootstrap(CLEAN, PERTURBED, draws=200, seed=2)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_pieces_of_a_long_resampling_are_not_repeats_of_the_first(monkeypatch):
    whole = paired_bootstrap(CLEAN, PERTURBED, draws=5000)
    monkeypatch.setattr("ternary_probe_lm_eval.paired._ENTRIES", 7 * 5)
    pieces = paired_bootstrap(CLEAN, PERTURBED, draws=5000)
    assert pieces == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_gives_no_finite_interval(figure):
    found = paired_bootstrap(CLEAN, np.array([0.1, 0.2, figure, 0.3, 0.4]))
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_one_document_gives_no_interval():
    found = paired_bootstrap([1.0], [1.5])
    assert found == (0.5, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("clean", "perturbed"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[2.0]])], ids=["none", "unequal", "table"]
)
def test_what_cannot_be_paired_is_refused(clean, perturbed):
    with pytest.raises(ProbeError, match="cannot be paired"):
        paired_bootstrap(clean, perturbed)


def coin(lost: int, gained: int) -> float:
    """Two-sided tail of a fair coin, summed outcome by outcome."""
    n = lost + gained
    likely = [math.comb(n, k) / 2**n for k in range(n + 1)]
    return min(1.0, sum(p for p in likely if p <= likely[lost] * (1 + 1e-9)))


@pytest.mark.parametrize(("lost", "gained"), [(5, 1), (0, 6), (3, 3), (17, 4), (1, 0)])
def test_mcnemar_is_the_two_sided_tail_of_a_fair_coin(lost, gained):
    clean = [1] * lost + [0] * gained + [1, 1, 0]
    perturbed = [0] * lost + [1] * gained + [1, 1, 0]
    found = mcnemar(clean, perturbed)
    assert (found.lost, found.gained) == (lost, gained)
    assert found.p_value == pytest.approx(coin(lost, gained), rel=1e-12)


def test_mcnemar_without_a_changed_answer_says_nothing_changed():
    assert mcnemar([1, 0, 1], [1, 0, 1]) == (0, 0, 1.0)


def test_mcnemar_refuses_scores_that_are_not_right_or_wrong():
    with pytest.raises(ProbeError, match="0 or 1"):
        mcnemar([0.5, 1.0], [1.0, 1.0])
