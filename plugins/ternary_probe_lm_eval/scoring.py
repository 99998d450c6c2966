"""Log-likelihoods without full logits: the model's own head, applied to the rows that are scored, a chunk at a time.

A chunk is bounded in bytes, whatever the vocabulary and the batch. The log-softmax is float32 at least, taken on
cache-sized blocks of rows; sums over tokens are float64.

The log-softmax is torch's own, as in lm-eval, so that ordinary tasks give lm-eval's figures. In float32 on a CPU it is off by
about 2e-5 nat a token at 49,000 entries, always to the same side (it adds them up one after the other); with
``softmax_dtype=float64`` figures are those of `ternary_probe.measure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ternary_probe.text import Windows
from ternary_probe_lm_eval.document import DocumentLogLikelihood, WindowNll
from ternary_probe_lm_eval.heads import Head

__all__ = ["DocumentLogLikelihood", "Scorer", "Span", "SpanScores", "WindowNll", "document_of", "spans_of"]

_BLOCK_ROWS = 8  # rows of logits whose log-softmax stays in a core's cache
_KERNEL_ROWS = 16  # matrix kernels treat rows alike in multiples of 16


class Span(NamedTuple):
    """One sequence, and what is asked about its rows.

    Row t holds the logits after input t. The queried rows are in ascending order.
    """

    inputs: Tensor
    """Token ids, int64 ``[length]``."""
    first: int
    """First row that is needed; all from there up to the last query are."""
    rows: Tensor
    """Row of each query, int64 ``[queries]``."""
    tokens: Tensor
    """Token whose log-likelihood is asked, int64 ``[queries]``."""


class SpanScores(NamedTuple):
    """Answers about one span."""

    log_likelihoods: Tensor
    """Of each query, float64 on the CPU, ``[queries]``."""
    greedy: Tensor
    """Most likely tokens, int64 on the CPU: of every row from ``first``, or of a sample of them."""


class Scorer:
    """Scores spans on a model as it is at that moment, perturbed or not.

    Args:
        head: What makes rows and logits.
        device: Where token ids must be.
        vocab_size: Number of logits.
        head_bytes: Upper bound for the logits held at a time, counted as float32.
        softmax_dtype: Least precision of the log-softmax.
        autocast: Dtype of a mixed-precision forward, or None.
    """

    def __init__(
        self,
        head: Head,
        *,
        device: torch.device,
        vocab_size: int,
        head_bytes: int,
        softmax_dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.head = head
        self.device = device
        self.softmax_dtype = softmax_dtype
        self.autocast = autocast
        self.rows = max(_KERNEL_ROWS, head_bytes // (4 * vocab_size) // _KERNEL_ROWS * _KERNEL_ROWS)

    @torch.no_grad()
    def score(self, spans: Sequence[Span], *, every_greedy: bool) -> list[SpanScores]:
        """Score a batch in one forward, shorter spans padded on the right.

        Args:
            spans: The batch.
            every_greedy: Find the most likely token of every row rather than of a few.

        Returns:
            The answers, in order.
        """
        length = max(len(span.inputs) for span in spans)
        inputs = torch.zeros((len(spans), length), dtype=torch.int64)
        for row, span in zip(inputs, spans, strict=True):
            row[: len(span.inputs)] = span.inputs
        with self._autocast():
            states = self.head.states(inputs.to(self.device))
            parts = [states[i, span.first : int(span.rows[-1]) + 1] for i, span in enumerate(spans)]
            needed = parts[0] if len(parts) == 1 else torch.cat(parts)
            del states
            sizes = [len(part) for part in parts]
            starts = [sum(sizes[:i]) for i in range(len(spans))]
            rows = torch.cat([span.rows - span.first + start for span, start in zip(spans, starts, strict=True)])
            tokens = torch.cat([span.tokens for span in spans])
            found, greedy, owners = self._rows(needed, rows, tokens, every_greedy=every_greedy)
        answers = torch.split(found.double().cpu(), [len(span.rows) for span in spans])
        bounds = torch.tensor([*starts, sum(sizes)])
        return [
            SpanScores(answer, greedy[(owners >= low) & (owners < high)])
            for answer, low, high in zip(answers, bounds[:-1], bounds[1:], strict=True)
        ]

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def _rows(
        self, states: Tensor, rows: Tensor, tokens: Tensor, *, every_greedy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries' log-likelihoods, most likely tokens, and the rows the latter belong to."""
        found: list[Tensor] = []
        greedy: list[Tensor] = []
        owners: list[Tensor] = []
        for start in range(0, len(states), self.rows):
            logits = self.head.logits(states[start : start + self.rows])
            dtype = torch.promote_types(logits.dtype, self.softmax_dtype)
            block = _BLOCK_ROWS if logits.device.type == "cpu" else len(logits)
            for offset in range(0, len(logits), block):
                scores = torch.log_softmax(logits[offset : offset + block], -1, dtype=dtype)
                low = start + offset
                # The queries are in the order of their rows.
                one, end = (int(torch.searchsorted(rows, bound)) for bound in (low, low + len(scores)))
                found.append(scores[(rows[one:end] - low).to(scores.device), tokens[one:end].to(scores.device)])
                if every_greedy or offset == 0:
                    greedy.append(scores.argmax(-1).cpu())
                    owners.append(torch.arange(low, low + len(scores)))
            del logits, scores  # before the next chunk is made
        return torch.cat(found), torch.cat(greedy), torch.cat(owners)


def spans_of(windows: Windows) -> list[Span]:
    """Turn windows of a text into spans: one each, whose queries are the scored positions.

    Args:
        windows: The windows.

    Returns:
        The spans, in order.
    """
    spans = []
    for inputs, targets, scored in zip(windows.inputs, windows.targets, windows.scored, strict=True):
        rows = scored.nonzero()[:, 0]
        spans.append(Span(inputs, int(rows[0]), rows, targets[rows]))
    return spans


def document_of(scores: Iterable[SpanScores], *, words: int, bytes: int) -> DocumentLogLikelihood:  # noqa: A002
    """Put a document together from its windows.

    Args:
        scores: Answers about the spans of `spans_of`.
        words: Words of the scored text.
        bytes: Its UTF-8 bytes.

    Returns:
        Its log-likelihood, summed in float64.
    """
    windows = [
        WindowNll(-float(s.log_likelihoods.sum()), len(s.log_likelihoods), float(s.log_likelihoods.square().sum()))
        for s in scores
    ]
    return DocumentLogLikelihood(windows, words=words, bytes=bytes)


def largest_batch(scorer: Scorer, length: int, most: int) -> int:
    """Find how many sequences fit at once, by trying.

    Args:
        scorer: The scorer.
        length: Tokens of the longest sequence.
        most: Most sequences to try.

    Returns:
        The number; 1 on a CPU, which one sequence fills.
    """
    if scorer.device.type == "cpu":
        return 1
    from accelerate.utils import find_executable_batch_size

    tokens = torch.ones(length, dtype=torch.int64)
    span = Span(tokens, 0, torch.arange(length), tokens)

    def attempt(batch_size: int) -> int:
        scorer.score([span] * batch_size, every_greedy=True)
        return batch_size

    return int(find_executable_batch_size(attempt, starting_batch_size=most)())
