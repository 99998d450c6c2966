"""How far a perturbed model's predictions are from the clean one's: KL both ways, quantiles, same top token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ternary_probe.measure.nll import Evaluator, Reference

QUANTILES = (0.5, 0.9, 0.99, 0.999)


class Quantiles(NamedTuple):
    """Quantiles of a per-token figure at `QUANTILES`, and its largest value."""

    values: tuple[float, ...]
    maximum: float


@dataclass(frozen=True)
class Divergence:
    """Per-token comparison of a perturbed model with the clean one on the same tokens, nats."""

    nll: NDArray[np.float64]
    """Change in NLL, shape ``[tokens]``."""
    kl_forward: NDArray[np.float64]
    """KL(clean || perturbed)."""
    kl_reverse: NDArray[np.float64]
    """KL(perturbed || clean)."""
    same_top: NDArray[np.bool_]
    """Whether both models put the same token first."""
    window: NDArray[np.int64]
    """Window each token belongs to."""

    @property
    def top1_agreement(self) -> float:
        """Share of tokens for which both models put the same token first."""
        return float(self.same_top.mean())

    def window_means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of a per-token figure in each window.

        Args:
            values: Shape ``[tokens]``.

        Returns:
            Shape ``[windows]``.
        """
        sums = np.bincount(self.window, weights=values)
        means: NDArray[np.float64] = sums / np.bincount(self.window)
        return means


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    """Return the quantiles of a per-token figure.

    Args:
        values: Shape ``[tokens]``, not empty.

    Returns:
        Median, 90, 99 and 99.9 % quantile, and the maximum.
    """
    return Quantiles(tuple(float(q) for q in np.quantile(values, QUANTILES)), float(values.max()))


@torch.no_grad()
def compare(evaluator: Evaluator, reference: Reference) -> Divergence:
    """Score the text with the model as it is now and compare every token with the clean model.

    Args:
        evaluator: The text and the model, perturbed at this moment.
        reference: The clean model on the same text.

    Returns:
        Per-token figures.
    """
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    window: list[NDArray[np.int64]] = []
    for index, clean, now, targets in evaluator.paired_logits(reference):
        clean_log, now_log = clean.log_softmax(-1), now.log_softmax(-1)
        difference = clean_log - now_log
        parts[0].append(difference.gather(-1, targets[:, None]).squeeze(-1))
        parts[1].append(torch.linalg.vecdot(clean_log.exp(), difference))
        parts[2].append(-torch.linalg.vecdot(now_log.exp(), difference))
        parts[3].append(clean.argmax(-1) == now.argmax(-1))
        window.append(np.full(len(targets), index, dtype=np.int64))
    nll, forward, reverse, same = (torch.cat(p).double().cpu().numpy() for p in parts)
    return Divergence(nll, forward, reverse, same.astype(bool), np.concatenate(window))
