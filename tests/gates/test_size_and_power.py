"""Error rates by simulation: windows of tiny models, resampled, at the least favourable figures.

A population is the windows of one base and one candidate. Each repeat draws windows from it with replacement and decides.
The population's own figure is known, so the threshold can be put on it, or a hair to either side. Rates are compared
with 5 % plus what chance allows: the 99.9 % point of a binomial of as many repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from gates.candidates import candidate_of, noisy, subject
from scipy import stats
from small_study import loaded_llama

from ternary_probe.gates import GateOptions
from ternary_probe.gates._comparison import Comparison, compare
from ternary_probe.gates._mcnemar import PairedCounts, decide_tasks
from ternary_probe.gates._noninferiority import Judgement, estimate_mean, estimate_median, estimate_share, judge

REPEATS = 600
MOST = int(stats.binom.ppf(0.999, REPEATS, 0.05))
"""48 of 600."""
OPTIONS = GateOptions(window=64, windows=96)
SIZES = [4, 8, 24]


@cache
def population() -> Comparison:
    return compare(subject(loaded_llama(), OPTIONS), subject(candidate_of(noisy(0.05)), OPTIONS))


class Figure(NamedTuple):
    """A figure of some windows of the population, and its true value there."""

    truth: float
    bad: str
    of: Callable[[np.ndarray], object]


@cache
def figures() -> dict[str, Figure]:
    found = population()
    counts, sums = found.counts, found.window_sums
    nll, kl, same = sums(found.delta_nll), sums(found.kl), sums(found.same_top)
    ratio = found.candidate_margin / found.base_margin
    tokens = [np.flatnonzero(found.window == index) for index in range(found.windows)]

    def median(drawn: np.ndarray) -> object:
        picked = np.concatenate([tokens[index] for index in drawn])
        return estimate_median(ratio[picked], np.repeat(np.arange(drawn.size), [tokens[index].size for index in drawn]))

    return {
        "nll": Figure(nll.sum() / counts.sum(), "high", lambda drawn: estimate_mean(nll[drawn], counts[drawn])),
        "kl": Figure(kl.sum() / counts.sum(), "high", lambda drawn: estimate_mean(kl[drawn], counts[drawn])),
        "agreement": Figure(same.sum() / counts.sum(), "low", lambda drawn: estimate_share(same[drawn], counts[drawn])),
        "margin": Figure(float(np.median(ratio)), "low", median),
    }


def draws(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, population().windows, (REPEATS, size))


def decided(name: str, drawn: np.ndarray, shift: float, fail_alpha: float = 0.05) -> Judgement:
    """Decide one draw with the threshold at the truth, moved ``shift`` of its size in the permissive direction."""
    figure = figures()[name]
    towards = 1 if figure.bad == "high" else -1
    threshold = figure.truth + towards * shift * abs(figure.truth)
    return judge(figure.of(drawn), threshold, bad=figure.bad, fail_alpha=fail_alpha)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["nll", "kl", "agreement", "margin"])
def test_a_candidate_at_its_limit_fails_in_at_most_one_case_of_twenty(name: str, size: int) -> None:
    """For NLL this is also a candidate equal to its base in distribution, under a policy that allows no loss."""
    fails = sum(decided(name, drawn, 0.0).status == "fail" for drawn in draws(size, 1))

    assert fails <= MOST


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["nll", "kl", "agreement", "margin"])
def test_a_candidate_just_over_its_limit_passes_in_at_most_one_case_of_twenty(name: str, size: int) -> None:
    passes = sum(decided(name, drawn, -1e-6).status == "pass" for drawn in draws(size, 2))

    assert passes <= MOST


@pytest.mark.parametrize("name", ["kl", "agreement", "margin"])
def test_far_from_the_limit_nearly_all_are_decided(name: str) -> None:
    """A test that never decides has no error: half the limit passes, twice the limit fails, in nine cases of ten."""
    drawn = draws(24, 3)[:200]
    away = {"kl": (1.0, -0.5), "agreement": (0.1, -0.1), "margin": (0.2, -0.2)}[name]

    assert np.mean([decided(name, one, away[0]).status == "pass" for one in drawn]) > 0.9
    assert np.mean([decided(name, one, away[1]).status == "fail" for one in drawn]) > 0.9


def test_four_checks_at_their_limits_fail_together_in_at_most_one_case_of_twenty() -> None:
    """Any failure fails, so each may fail at a quarter of the rate; the checks share their windows."""
    drawn = draws(16, 4)
    fails = sum(
        any(decided(name, one, 0.0, fail_alpha=0.05 / 4).status == "fail" for name in figures()) for one in drawn
    )

    assert fails <= MOST


def test_one_check_of_four_just_over_its_limit_is_passed_in_at_most_one_case_of_twenty() -> None:
    """All must pass, so none needs a smaller rate: the one that ought to stop it errs in one case of twenty."""
    passes = 0
    for one in draws(16, 5):
        within = all(decided(name, one, 2.0).status == "pass" for name in ("nll", "kl"))
        passes += within and decided("agreement", one, -1e-6).status == "pass"

    assert passes <= MOST


def test_equal_candidates_with_many_tasks_fail_in_at_most_one_case_of_twenty() -> None:
    """Two decisions, pooled and task by task, each at half the rate."""
    draw = np.random.default_rng(6)
    sizes = [100, 400, 1000, 250, 60]
    fails = 0
    for _ in range(REPEATS):
        tables = {}
        for index, documents in enumerate(sizes):
            lost, gained, _ = draw.multinomial(documents, [0.05, 0.05, 0.9])
            tables[f"task{index}"] = PairedCounts(documents, int(lost), int(gained), documents // 2)
        fails += decide_tasks(tables, max_loss=0, max_task_loss=0, fail_alpha=0.025).status == "fail"

    assert fails <= MOST
    assert fails > 0


@pytest.mark.parametrize("documents", [200, 2000])
def test_a_loss_of_accuracy_just_over_the_limit_passes_in_at_most_one_case_of_twenty(documents: int) -> None:
    draw = np.random.default_rng(7)
    passes = 0
    for lost, gained, _ in draw.multinomial(documents, [0.04, 0.02 - 1e-6, 0.94 + 1e-6], size=REPEATS):
        table = PairedCounts(documents, int(lost), int(gained), documents // 2)
        passes += decide_tasks({"task": table}, max_loss=0.02, max_task_loss=0.03).status == "pass"

    assert 0 < passes <= MOST
