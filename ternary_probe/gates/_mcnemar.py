"""Two models on the same questions: exact McNemar test, bounds of the loss in accuracy, and tasks joined.

Only documents that one model gets right and the other wrong carry information. If the candidate is as good as its base,
each of them is a fair coin, exactly (Kübler et al., arXiv 2602.10144), so false positives are controlled at any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import scipy  # its parts are imported when first used: a gate of files alone needs none of them
from numpy.typing import NDArray

from ternary_probe.gates._noninferiority import POWER, Status


class PairedCounts(NamedTuple):
    """Documents by who got them right."""

    documents: int
    lost: int
    """Right with the base, wrong with the candidate."""
    gained: int
    """Wrong with the base, right with the candidate."""
    base_right: int

    @property
    def loss(self) -> float:
        """Accuracy of the base minus that of the candidate."""
        return (self.lost - self.gained) / self.documents

    @property
    def spread(self) -> float:
        """Standard deviation of a document's loss, from the share of documents the models disagree on (at least one)."""
        share = max(self.lost + self.gained, 1) / self.documents
        return math.sqrt(max(share - self.loss**2, 0.0)) or 1 / self.documents

    def __add__(self, other: object) -> PairedCounts:
        """Pool two tasks.

        Args:
            other: Further counts.

        Returns:
            The counts of the union of documents.
        """
        if not isinstance(other, PairedCounts):
            return NotImplemented
        return PairedCounts(*(a + b for a, b in zip(self, other, strict=True)))


def count_pairs(base: NDArray[np.bool_], candidate: NDArray[np.bool_]) -> PairedCounts:
    """Count documents by who got them right.

    Args:
        base: Whether the base is right, ``[documents]``.
        candidate: Whether the candidate is right, in the same order.

    Returns:
        The counts.
    """
    return PairedCounts(
        documents=base.size,
        lost=int((base & ~candidate).sum()),
        gained=int((~base & candidate).sum()),
        base_right=int(base.sum()),
    )


def mcnemar(counts: PairedCounts) -> float:
    """Return the exact one-sided p-value of McNemar's test: is the candidate worse?

    Args:
        counts: Documents by who got them right.

    Returns:
        ``P(lost or more)`` were each of the documents that differ a fair coin; 1 where none differs.
    """
    # The tail of the binomial as an incomplete beta function: what scipy.stats.binomtest returns, hundreds of times faster.
    return 1.0 if counts.lost == 0 else float(scipy.special.betainc(counts.lost, counts.gained + 1, 0.5))


def loss_score(counts: PairedCounts, loss: float) -> float:
    """Return the score statistic of a loss in accuracy (T. Tango, *Stat. Med.* 17, 1998).

    Args:
        counts: Documents by who got them right.
        loss: The loss supposed, within (-1, 1).

    Returns:
        ``(lost - gained - n loss)`` over its standard deviation under the most likely table with that loss; about standard
        normal. At loss 0 its square is McNemar's statistic.
    """
    n, b, c = counts.documents, counts.lost, counts.gained
    linear = b + c + (b - c) * loss - 2 * n * loss
    gained = (linear + math.sqrt(max(linear**2 + 8 * n * c * loss * (1 - loss), 0.0))) / (4 * n)
    variance = n * (2 * gained + loss - loss**2)
    distance = b - c - n * loss
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def loss_bound(counts: PairedCounts, alpha: float, side: Literal["upper", "lower"]) -> float:
    """Bound the loss in accuracy on one side, by inverting the score statistic.

    Args:
        counts: Documents by who got them right.
        alpha: Error rate.
        side: Which way the loss is bounded.

    Returns:
        The bound, within [-1, 1].
    """
    sign = 1.0 if side == "upper" else -1.0
    limit = -float(scipy.special.ndtri(alpha))

    def excess(loss: float) -> float:
        return sign * loss_score(counts, loss) + limit

    end = sign * (1 - 1e-12)
    if excess(end) >= 0:
        return sign
    if excess(counts.loss) <= 0:
        return counts.loss
    return float(scipy.optimize.brentq(excess, counts.loss, end, xtol=1e-12))


def beyond(counts: PairedCounts, allowed: float) -> float:
    """Return the p-value of "the loss is no larger than allowed".

    Args:
        counts: Documents by who got them right.
        allowed: Loss in accuracy that is allowed.

    Returns:
        The larger of McNemar's exact p-value and the score test's at the allowed loss: a small one shows both that the
        candidate is worse at all, exactly, and that it is worse than allowed.
    """
    return max(mcnemar(counts), float(scipy.special.ndtr(-loss_score(counts, allowed))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm, *Scand. J. Stat.* 6, 1979); valid whatever their dependence.

    Args:
        p_values: One per task.

    Returns:
        Adjusted p-values, in the same order: rejecting those at or below a rate errs at all at most at that rate.
    """
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def fisher(p_values: Sequence[float]) -> float:
    """Combine p-values of independent tasks (Fisher): is any of them affected? Conservative for discrete tests.

    Args:
        p_values: One per task, at least one.

    Returns:
        The combined p-value.
    """
    return float(scipy.special.chdtrc(2 * len(p_values), -2 * math.fsum(map(math.log, p_values))))


@dataclass(frozen=True)
class TaskDecision:
    """One task, or all of them pooled."""

    counts: PairedCounts
    exact: float
    """McNemar's exact one-sided p-value."""
    p_value: float
    """Of "the loss is no larger than allowed", adjusted for the number of tasks where there are several."""
    lower: float
    upper: float
    status: Status


@dataclass(frozen=True)
class JointDecision:
    """All tasks.

    Attributes:
        status: ``fail`` if the pooled documents fail or any task does by itself; ``pass`` if the pooled documents pass and no
            task fails.
        pooled: The union of documents; decides.
        tasks: Every task by name.
        fisher: Fisher's combination of the tasks' exact p-values, for information.
        detectable: Smallest pooled loss these documents show with 80 % power.
        documents_needed: Documents at which a loss like the one found would be decided with 80 % power; None where no
            number would do.
    """

    status: Status
    pooled: TaskDecision
    tasks: Mapping[str, TaskDecision]
    fisher: float
    detectable: float
    documents_needed: int | None


def decide_tasks(
    tables: Mapping[str, PairedCounts],
    *,
    max_loss: float,
    max_task_loss: float,
    alpha: float = 0.05,
    fail_alpha: float | None = None,
) -> JointDecision:
    """Decide over tasks, jointly.

    The pooled exact test over the union of documents decides: quantization hurts tasks together, and there pooling has the
    most power; the null (each differing document a fair coin) stays exact under it. A single task that breaks would be
    diluted, so a task also fails by itself, adjusted by Holm. These are two decisions, each at ``fail_alpha``. Fisher's
    combination is reported, not used: one tiny p-value or many middling ones reject alike, so it does not say what broke.

    Args:
        tables: Counts by task, at least one.
        max_loss: Loss in accuracy allowed over all documents.
        max_task_loss: Loss allowed in a single task.
        alpha: Error rate of passing.
        fail_alpha: Error rate of failing, of each of the two decisions; ``alpha`` if None.

    Returns:
        The decision.
    """
    failing = alpha if fail_alpha is None else fail_alpha
    union = sum(tables.values(), PairedCounts(0, 0, 0, 0))
    adjusted = holm([beyond(counts, max_task_loss) for counts in tables.values()])
    tasks = {
        name: _decide(counts, p_value, max_task_loss, alpha, failing)
        for (name, counts), p_value in zip(tables.items(), adjusted, strict=True)
    }
    pooled = _decide(union, beyond(union, max_loss), max_loss, alpha, failing)
    status = "fail" if any(task.status == "fail" for task in tasks.values()) else pooled.status
    sigmas = -float(scipy.special.ndtri(alpha) + scipy.special.ndtri(1 - POWER))
    distance = abs(max_loss - union.loss)
    needed = (sigmas * union.spread / distance) ** 2 if distance > 0 else math.inf
    return JointDecision(
        status=status,
        pooled=pooled,
        tasks=tasks,
        fisher=fisher([task.exact for task in tasks.values()]),
        detectable=sigmas * union.spread / math.sqrt(union.documents),
        documents_needed=math.ceil(needed) if needed < _MOST_DOCUMENTS else None,
    )


def _decide(counts: PairedCounts, p_value: float, allowed: float, alpha: float, failing: float) -> TaskDecision:
    upper = loss_bound(counts, alpha, "upper")
    status: Status = "inconclusive"
    if p_value <= failing:
        status = "fail"
    elif upper <= allowed:
        status = "pass"
    return TaskDecision(counts, mcnemar(counts), p_value, loss_bound(counts, failing, "lower"), upper, status)


_MOST_DOCUMENTS = 1e9
