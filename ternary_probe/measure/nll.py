"""Negative log-likelihood and KL divergence, without ever holding full logits.

The head is applied in chunks of tokens by the model itself (soft caps, scalings and biases are its own). Per token the
log-softmax is fp32 at least; sums over tokens are fp64: half-precision log-softmax is wrong by up to 0.045 nat a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ternary_probe.anatomy import explain_non_finite
from ternary_probe.errors import ProbeError
from ternary_probe.measure._kl import careful_divergence, log_partition, quick_divergence, safe_log_partition
from ternary_probe.perturb.proof import checksum_tensor

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy
    from ternary_probe.text import Windows

Vector = NDArray[np.float64]

# Logits held at a time. Large enough for fast kernels, small beside any model, and above the 32 MiB up to which glibc
# serves a request from its heap, where such pieces leave holes twice their size.
HEAD_BYTES = 48 << 20
_ROWS = 16  # matrix kernels treat rows alike in multiples of 16, so any such chunk gives the same bits
_SPARE_POSITIONS = 8


@dataclass(frozen=True)
class NllResult:
    """NLL of a text, nats: fp64 sums and token counts per window."""

    sums: Vector
    counts: NDArray[np.int64]
    tokens: tuple[NDArray[np.float32], ...] | None = None
    """Per-token NLL of each window's scored tokens, on request."""

    @property
    def mean(self) -> float:
        """Mean NLL, nats per scored token."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def windows(self) -> Vector:
        """Mean NLL of each window, shape ``[n]``."""
        return self.sums / self.counts

    @property
    def perplexity(self) -> float | None:
        """Token perplexity ``exp(mean)``; ``None`` where it overflows."""
        return perplexity(self.mean)


class Response(NamedTuple):
    """What a perturbation did, per scored token."""

    nll: NllResult
    kl: NllResult | None
    """KL(clean || perturbed), in the same container; ``None`` without a clean reference."""


@dataclass(frozen=True)
class Reference:
    """The clean model on a text: its NLL and the final hidden states, from which its logits are recomputed."""

    result: NllResult
    states: tuple[torch.Tensor, ...]
    """One ``[L, d]`` tensor per window, in the model's dtype."""
    log_z: tuple[torch.Tensor, ...]
    """Log-partition of the scored tokens, one ``[scored]`` tensor per window; NaN where it must not be relied on."""
    head: int | None = None
    """Checksum of the head's matrix, which must be the clean one when the clean logits are recomputed."""


def perplexity(nll: float) -> float | None:
    """Return ``exp(nll)``, or ``None`` where that overflows.

    Args:
        nll: Nats per token (or word, or byte).

    Returns:
        The perplexity.
    """
    try:
        return math.exp(nll)
    except OverflowError:
        return None


def check_windows(anatomy: Anatomy, windows: Windows) -> None:
    """Refuse windows the model has no table entries for, before an index error (on CUDA: a dead process) does.

    Args:
        anatomy: The model's anatomy.
        windows: The text.

    Raises:
        ProbeError: If a token id lies beyond the vocabulary, a window is longer than a table of learned positions, or the
            text is one token repeated.
    """
    if torch.unique(windows.targets[windows.scored]).numel() < 2 and int(windows.scored.sum()) > 1:
        raise ProbeError(
            f"text '{windows.protocol.text}' is one token repeated: its NLL says nothing about the model, give real text"
        )
    model = anatomy.model
    words = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(words, "num_embeddings", None)
    highest = int(windows.inputs.max())
    if rows is not None and highest >= rows:
        raise ProbeError(
            f"token id {highest} lies beyond the model's {rows} embeddings: use the tokenizer that belongs to the model"
        )
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    length = int(windows.inputs.shape[1])
    if not isinstance(limit, int) or length <= limit:
        return
    # A table with as many rows as positions (some families add a few) is one of learned positions.
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words]
    if any(limit <= table.num_embeddings <= limit + _SPARE_POSITIONS for table in tables):
        raise ProbeError(
            f"a window of {length} tokens does not fit {type(model).__name__}, which has {limit} learned positions: "
            f"use --window {limit} or less"
        )


def _whole(rows: int) -> int:
    return max(_ROWS, rows // _ROWS * _ROWS)


class Evaluator:
    """Scores one text on one model, again and again.

    Args:
        anatomy: The model's anatomy; the model is called as it is at that moment, perturbed or not.
        windows: The text.
        batch: Windows per backbone call. One is as fast on a CPU and leanest.
        head_bytes: Upper bound for the fp32 logits held at a time, clean ones beside perturbed ones included, in bytes.
        rows: Rows of logits held at a time, instead of the size in bytes.

    Raises:
        ProbeError: If the model does not hold the head's invariants (chunked logits differ from its own).
    """

    def __init__(
        self,
        anatomy: Anatomy,
        windows: Windows,
        *,
        batch: int = 1,
        head_bytes: int = HEAD_BYTES,
        rows: int | None = None,
    ) -> None:
        check = anatomy.checks.get("chunked_head")
        if check is not None and check.passed is False:
            raise ProbeError(
                f"this model's logits cannot be computed in chunks ({check.note or 'they differ from its own'}); "
                "NLL of it is not supported"
            )
        causal = anatomy.checks.get("causal")
        if causal is not None and causal.passed is False:
            raise ProbeError(
                f"{type(anatomy.model).__name__} sees the tokens it is to predict (it is not causal), so its NLL means "
                "nothing: load a causal language model"
            )
        check_windows(anatomy, windows)
        self.anatomy = anatomy
        self.windows = windows
        self.batch = max(1, batch)
        self.rows = rows or _whole(head_bytes // (4 * anatomy.head.vocab_size))
        # As many rows in all where clean ones stand beside them; an odd size stays odd.
        self.paired_rows = _whole(self.rows // 2) if self.rows % _ROWS == 0 else self.rows // 2 | 1
        self.evaluations = 0
        self._head_version = -1

    @property
    def chunk_bytes(self) -> int:
        """Size of one chunk of fp32 logits."""
        return self.rows * self.anatomy.head.vocab_size * 4

    @torch.no_grad()
    def nll(self, *, keep_tokens: bool = False) -> NllResult:
        """Score the text.

        Args:
            keep_tokens: Keep per-token values.

        Returns:
            The NLL.
        """
        return self._score(None, keep_tokens=keep_tokens).nll

    @torch.no_grad()
    def reference(self) -> Reference:
        """Score the text with the clean model and keep its final hidden states.

        Returns:
            The reference for `response`.
        """
        kept: list[torch.Tensor] = []
        log_z: list[torch.Tensor] = []
        result = self._score(None, keep_states=kept, keep_log_z=log_z)
        return Reference(result.nll, tuple(kept), tuple(log_z), self._head_checksum())

    @torch.no_grad()
    def response(self, reference: Reference) -> Response:
        """Score the text with the model as it is now, against the clean reference.

        The clean logits are recomputed with the *present* head, so a perturbation of the head's weights is refused.

        Args:
            reference: From `reference`, on the same text and the clean model.

        Returns:
            NLL and KL. Non-finite values are returned as they are: a broken arm is a result, not an accident.
        """
        self._require_clean_head(reference)
        return self._score(reference)

    def _head_checksum(self) -> int | None:
        matrix = self.anatomy.head_matrix
        if matrix is None:
            return None
        view = matrix.view()
        self._head_version = view._version  # counts writes to the storage, through whatever view
        return checksum_tensor(view)

    def _require_clean_head(self, reference: Reference) -> None:
        matrix = self.anatomy.head_matrix
        if matrix is None or reference.head is None or matrix.view()._version == self._head_version:
            return
        if self._head_checksum() != reference.head:
            raise ProbeError(
                f"{matrix.name} makes the logits and is perturbed, so the clean logits cannot be recomputed: measure "
                "NLL alone (response_without_reference)"
            )

    @torch.no_grad()
    def response_without_reference(self) -> Response:
        """Score the text with the model as it is now: NLL only, non-finite values returned as they are.

        Returns:
            The NLL; no KL.
        """
        return self._score(None, explain=False)

    def paired_logits(self, reference: Reference) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield clean and present logits of the scored tokens side by side, a chunk at a time.

        Args:
            reference: The clean model on the same text.

        Yields:
            ``(window, clean [rows, vocabulary], present [rows, vocabulary], targets [rows])``.
        """
        self.evaluations += 1
        for index, states in self._states():
            for part, keep in self._parts(index, self.paired_rows):
                clean, now = self._pair(states, reference.states[index], part, keep)
                yield index, clean, now, self._targets(index, part, keep, now.device)
                del clean, now  # before the next chunk is made

    @torch.no_grad()
    def score_window(self, index: int, states: torch.Tensor, reference: Reference) -> tuple[float, float]:
        """Score one window's final hidden states against the clean model's.

        Args:
            index: The window.
            states: ``[L, d]``, however they were made.
            reference: From `reference`, on the same text; the head must be the clean one.

        Returns:
            Sums over the window's scored tokens: NLL, KL(clean || present), nats.
        """
        nll, kl = self._paired_window(index, states, reference)
        return nll.double().sum().item(), kl.double().sum().item()

    def _parts(self, index: int, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the chunks of a window that hold scored tokens, with the rows of those within the chunk."""
        scored = self.windows.scored[index]
        first = int(scored.nonzero()[0]) // _ROWS * _ROWS
        for start in range(first, len(scored), rows):
            part = slice(start, start + rows)
            if scored[part].any():
                yield part, scored[part].nonzero()[:, 0]

    def _score(
        self,
        reference: Reference | None,
        *,
        keep_tokens: bool = False,
        keep_states: list[torch.Tensor] | None = None,
        keep_log_z: list[torch.Tensor] | None = None,
        explain: bool = True,
    ) -> Response:
        self.evaluations += 1
        if any(module.training for module in self.anatomy.model.modules()):
            raise ProbeError("the model is in training mode, where two forwards may differ: call model.eval()")
        n = len(self.windows.inputs)
        sums, kls = np.zeros(n), np.zeros(n)
        tokens: list[NDArray[np.float32]] = []
        counts = self.windows.scored.sum(1).numpy().astype(np.int64)
        for index, states in self._states():
            if keep_states is not None:
                keep_states.append(states.clone())
            if reference is None:
                nll, log_z = self._window(index, states, keep_log_z=keep_log_z is not None)
                kl = None
                if keep_log_z is not None and log_z is not None:
                    keep_log_z.append(log_z)
            else:
                nll, kl = self._paired_window(index, states, reference)
            sums[index] = nll.double().sum().item()
            if kl is not None:
                kls[index] = kl.double().sum().item()
            if keep_tokens:
                tokens.append(nll.float().cpu().numpy())
            if explain and reference is None and not math.isfinite(sums[index]):
                raise explain_non_finite(self.anatomy.model, partial(self._logits_of, index))
        result = NllResult(sums, counts, tuple(tokens) if keep_tokens else None)
        return Response(result, None if reference is None else NllResult(kls, counts))

    def _inputs(self, where: slice) -> torch.Tensor:
        return self.windows.inputs[where].to(self.anatomy.input_device)

    def _states(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(window index, final hidden states [L, d])``."""
        for start in range(0, len(self.windows.inputs), self.batch):
            states = self.anatomy.head.states(self._inputs(slice(start, start + self.batch)))
            for offset in range(states.shape[0]):
                yield start + offset, states[offset]

    def _window(
        self, index: int, states: torch.Tensor, *, keep_log_z: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return NLL and, on request, the log-partition of one window's scored tokens, shape ``[scored]`` each."""
        nlls: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for part, keep in self._parts(index, self.rows):
            logits = self._logits(states[part])
            log_z = log_partition(logits)
            here = keep.to(logits.device)
            nlls.append(log_z[here] - logits[here, self._targets(index, part, keep, logits.device)])
            if keep_log_z:
                kept.append(safe_log_partition(logits, log_z)[here])
            del logits  # before the next chunk is made
        return torch.cat(nlls), torch.cat(kept) if keep_log_z else None

    def _paired_window(
        self, index: int, states: torch.Tensor, reference: Reference
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return NLL and KL of one window's scored tokens, shape ``[scored]`` each."""
        nlls: list[torch.Tensor] = []
        kls: list[torch.Tensor] = []
        done = 0
        for part, keep in self._parts(index, self.paired_rows):
            clean, now = self._pair(states, reference.states[index], part, keep)
            targets = self._targets(index, part, keep, now.device)
            scores = now.gather(-1, targets[:, None]).squeeze(-1)
            log_z = reference.log_z[index][done : done + len(keep)].to(now.device)
            done += len(keep)
            divergence = quick_divergence(clean, now, log_z)
            del clean, now  # before the next chunk is made
            if divergence is None:
                divergence = careful_divergence(*self._pair(states, reference.states[index], part, keep))
            nlls.append(divergence.log_z - scores)
            kls.append(divergence.kl)
        return torch.cat(nlls), torch.cat(kls)

    def _pair(
        self, states: torch.Tensor, clean: torch.Tensor, part: slice, keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return clean and present logits of a chunk's scored rows, from one pass of the head: its matrix is read once."""
        rows = len(states[part])
        both = self._logits(torch.cat((clean[part].to(states.device), states[part])))
        if len(keep) == rows:
            return both[:rows], both[rows:]
        keep = keep.to(both.device)
        return both[:rows][keep], both[rows:][keep]

    def _targets(self, index: int, part: slice, keep: torch.Tensor, device: torch.device) -> torch.Tensor:
        targets: torch.Tensor = self.windows.targets[index][part][keep].to(device)
        return targets

    def _logits_of(self, index: int) -> torch.Tensor:
        return self._logits(self.anatomy.head.states(self._inputs(slice(index, index + 1)))[0])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.anatomy.head.logits(rows)
        return logits if logits.dtype == torch.float64 else logits.float()
