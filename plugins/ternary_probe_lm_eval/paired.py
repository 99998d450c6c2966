"""Statistics of paired runs: two models on the same documents, so the documents' difficulty cancels out of the difference.

Two independent standard errors, as lm-eval's, overstate the noise of a difference several times over. Here documents are
resampled in pairs (percentile bootstrap, own Philox stream), and accuracies are tested exactly (McNemar).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest

from ternary_probe.errors import ProbeError
from ternary_probe.studies.intervals import Interval

Vector = NDArray[np.float64]
Transform = Callable[[Vector], Vector]

DRAWS = 10_000
_SLOW_DRAWS = 1_000
_KEY = 20260518
_ENTRIES = 1 << 20  # of the table of resampled documents held at a time


class McNemar(NamedTuple):
    """Documents on which two models differ, and how likely so lopsided a split is by chance."""

    lost: int
    """Right in the first, wrong in the second."""
    gained: int
    """Wrong in the first, right in the second."""
    p_value: float
    """Exact, two-sided: of a fair coin thrown ``lost + gained`` times."""


def mcnemar(clean: ArrayLike, perturbed: ArrayLike) -> McNemar:
    """Test whether two models differ in accuracy on the same documents (McNemar's exact test).

    Args:
        clean: Whether the first model is right, 0 or 1 a document, shape ``[n]``.
        perturbed: The same of the second.

    Returns:
        The discordant counts and the p-value; 1 where no document differs.

    Raises:
        ProbeError: If the shapes differ or a value is neither 0 nor 1.
    """
    first, second = _paired(clean, perturbed)
    if not np.isin(first, (0, 1)).all() or not np.isin(second, (0, 1)).all():
        raise ProbeError("McNemar's test needs 0 or 1 for each document: use the bootstrap for other scores")
    lost, gained = int(((first == 1) & (second == 0)).sum()), int(((first == 0) & (second == 1)).sum())
    p_value = float(binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0
    return McNemar(lost, gained, p_value)


def same(ratio: Vector) -> Vector:
    """Return what is given."""
    return ratio


def paired_bootstrap(
    clean: ArrayLike,
    perturbed: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    transform: Transform = same,
    confidence: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Bootstrap the difference of a ratio of sums, ``f(sum y / sum w) - f(sum x / sum w)``, over paired documents.

    Args:
        clean: Figure ``x`` of each document, shape ``[n]``.
        perturbed: Figure ``y`` of the same documents.
        weights: Weight ``w`` of each document, such as its words; 1 each if None, for a difference of means.
        transform: ``f``, elementwise.
        confidence: Two-sided coverage.
        draws: Bootstrap samples.
        seed: Of the resampling; equal seeds and sizes resample the same documents.

    Returns:
        Difference with its percentile interval; the interval is infinite for fewer than two documents or where a resampled
        figure is not finite.

    Raises:
        ProbeError: If the shapes differ or there is no document.
    """
    x, y = _paired(clean, perturbed)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != x.shape:
        raise ProbeError(f"{w.size} weights do not fit {x.size} documents: give one for each")
    total = w.sum(keepdims=True)
    with np.errstate(all="ignore"):  # what overflows is judged below
        value = float((transform(y.sum(keepdims=True) / total) - transform(x.sum(keepdims=True) / total))[0])
        if x.size < 2:
            return Interval(value, -np.inf, np.inf)
        found = []
        for rows in _resampled(x.size, draws, seed):
            below = w[rows].sum(1)
            found.append(transform(y[rows].sum(1) / below) - transform(x[rows].sum(1) / below))
    return _percentiles(value, np.concatenate(found), confidence)


def paired_statistic(
    clean: Sequence[Any],
    perturbed: Sequence[Any],
    statistic: Callable[[list[Any]], float],
    *,
    confidence: float = 0.95,
    draws: int = _SLOW_DRAWS,
    seed: int = 0,
) -> Interval:
    """Bootstrap the difference of any statistic of documents, such as an F1 score, over paired documents.

    Args:
        clean: What the first model did on each document.
        perturbed: What the second did.
        statistic: One figure from such a list.
        confidence: Two-sided coverage.
        draws: Bootstrap samples; each calls the statistic twice.
        seed: Of the resampling.

    Returns:
        Difference with its percentile interval, infinite as in `paired_bootstrap`.

    Raises:
        ProbeError: If the numbers of documents differ or are 0.
    """
    if len(clean) != len(perturbed) or not clean:
        raise ProbeError(f"{len(clean)} and {len(perturbed)} documents cannot be paired")
    value = float(statistic(list(perturbed)) - statistic(list(clean)))
    if len(clean) < 2:
        return Interval(value, -np.inf, np.inf)
    found = [
        float(statistic([perturbed[i] for i in row]) - statistic([clean[i] for i in row]))
        for rows in _resampled(len(clean), draws, seed)
        for row in rows
    ]
    return _percentiles(value, np.asarray(found), confidence)


def _paired(clean: ArrayLike, perturbed: ArrayLike) -> tuple[Vector, Vector]:
    x, y = np.asarray(clean, dtype=np.float64), np.asarray(perturbed, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise ProbeError(
            f"documents of shapes {x.shape} and {y.shape} cannot be paired: give one figure for each of both"
        )
    return x, y


def _resampled(size: int, draws: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Draw documents with replacement, ``[draws, size]`` in all, in pieces of bounded size."""
    rng = np.random.Generator(np.random.Philox(key=[_KEY, seed]))
    piece = max(1, _ENTRIES // size)
    for start in range(0, draws, piece):
        yield rng.integers(0, size, (min(piece, draws - start), size))


def _percentiles(value: float, found: Vector, confidence: float) -> Interval:
    if not np.isfinite(found).all():
        return Interval(value, -np.inf, np.inf)
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))
