"""A candidate against its base, token by token: one sweep over the same windows, heads in chunks on both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from ternary_probe.anatomy import NonFiniteError, explain_non_finite, stored_as_integers
from ternary_probe.errors import ProbeError
from ternary_probe.measure._kl import careful_divergence
from ternary_probe.measure.nll import HEAD_BYTES, Evaluator, check_windows

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Subject
    from ternary_probe.text import Windows

Vector = NDArray[np.float64]
Part = tuple[slice, torch.Tensor]
Logits = Callable[[slice], torch.Tensor]
"""Logits of a slice of one window's positions, fp32 or fp64, ``[positions, vocabulary]``."""

BLOCK = 64
_ROWS = 16  # matrix kernels treat rows alike in multiples of 16
_ODD_ROWS = 41  # no multiple of what any kernel blocks by: the worst chunking there is
_FLOOR_TOKENS = 128
_PIECE = 16  # rows in fp64 at a time
_RESOLUTION = 4 * float(torch.finfo(torch.float32).eps)


class ComparisonError(ProbeError):
    """Two models cannot be compared token by token."""


class Block(NamedTuple):
    """A run of tokens of one window, and the mean of a figure there."""

    window: int
    first: int
    """Position of its first scored token in the window."""
    last: int
    mean: float


@dataclass(frozen=True)
class Comparison:
    """Per-token figures of two models on the same scored tokens, nats; every array is ``[tokens]``.

    Attributes:
        base_nll: NLL under the base.
        candidate_nll: NLL under the candidate.
        kl: KL(base || candidate).
        same_top: Whether both put the same token first.
        base_margin: Log-probability of the base's first token less that of its second.
        candidate_margin: The same of the candidate's own first and second token.
        kept_margin: The candidate's log-probabilities of the *base's* first and second token, subtracted; negative where
            it prefers the second.
        window: Window of each token.
        position: Position in the window whose logits predict the token.
        nll_floor: How far a window's mean NLL moves when the base itself is computed in another batch, other chunks and
            another order of summation: what numerics alone do.
        kl_floor: The same of a window's mean KL.
        notes: What a reader must know.
    """

    base_nll: Vector
    candidate_nll: Vector
    kl: Vector
    same_top: NDArray[np.bool_]
    base_margin: Vector
    candidate_margin: Vector
    kept_margin: Vector
    window: NDArray[np.int64]
    position: NDArray[np.int64]
    nll_floor: float
    kl_floor: float
    notes: tuple[str, ...] = ()

    @property
    def delta_nll(self) -> Vector:
        """NLL under the candidate less that under the base."""
        return self.candidate_nll - self.base_nll

    @property
    def tokens(self) -> int:
        """Number of tokens compared."""
        return self.window.size

    @property
    def counts(self) -> Vector:
        """Tokens of each window, ``[windows]``."""
        return np.bincount(self.window).astype(np.float64)

    @property
    def windows(self) -> int:
        """Number of windows."""
        return self.counts.size

    @property
    def identical(self) -> bool:
        """Whether nothing computed differs in a single bit."""
        return bool(
            self.same_top.all()
            and not self.kl.any()
            and (self.candidate_nll == self.base_nll).all()
            and (self.candidate_margin == self.base_margin).all()
        )

    def window_sums(self, values: Vector | NDArray[np.bool_]) -> Vector:
        """Sum a per-token figure in each window.

        Args:
            values: ``[tokens]``.

        Returns:
            ``[windows]``.
        """
        sums = np.bincount(self.window, weights=values)
        return sums.astype(np.float64)

    def blocks(self, values: Vector, size: int = BLOCK) -> list[Block]:
        """Average a per-token figure over runs of tokens, to show where in the text a loss sits.

        Blocks of a window are correlated: they locate, they are no units of an error.

        Args:
            values: ``[tokens]``.
            size: Positions in a block.

        Returns:
            The blocks, in the order of the text.
        """
        found = []
        edges = np.flatnonzero((np.diff(self.window) != 0) | (np.diff(self.position // size) != 0)) + 1
        for run in np.split(np.arange(self.tokens), edges):
            first, last = int(self.position[run[0]]), int(self.position[run[-1]])
            found.append(Block(int(self.window[run[0]]), first, last, float(values[run].mean())))
        return found


@torch.no_grad()
def compare(base: Subject, candidate: Subject) -> Comparison:
    """Compare a candidate with its base on the base's windows.

    Both models are held at once: each needs its own head for the same token.

    Args:
        base: The model compared with.
        candidate: The model judged.

    Returns:
        The comparison.

    Raises:
        ComparisonError: If tokenizers or vocabularies differ, or the base computes NaN or infinity.
        NonFiniteError: If the candidate does.
    """
    require_same_text(base, candidate)
    windows = base.windows
    with _blaming(candidate, is_base=False):  # first: a broken candidate is broken whatever its base
        theirs = _Scored(candidate, windows)
    with _blaming(base, is_base=True):
        ours = _Scored(base, windows)
    sides = [ours, theirs]
    sizes = [side.vocab_size for side in sides]
    if sizes[0] != sizes[1]:
        raise ComparisonError(
            f"{base.name} has {sizes[0]} logits and {candidate.name} {sizes[1]}: their distributions cannot be compared, "
            "give a candidate of the same vocabulary"
        )
    rows = max(_ROWS, (base.options.head_bytes or HEAD_BYTES) // (8 * sizes[0]) // _ROWS * _ROWS)
    found: list[_Figures] = []
    for index in range(len(windows.inputs)):
        left, right = (side.window(index) for side in sides)
        figures = _compare_window(windows.scored[index], windows.targets[index], rows, left, right)
        with _blaming(candidate, is_base=False):
            theirs.require_finite(figures.candidate_nll, index)
        with _blaming(base, is_base=True):
            ours.require_finite(figures.base_nll, index)
        found.append(figures)
    floors = _noise_floor(ours, rows, found)
    joined = [torch.cat(column).double().cpu().numpy() for column in zip(*found, strict=True)]
    where = windows.scored.nonzero().numpy()
    return Comparison(
        base_nll=joined[0],
        candidate_nll=joined[1],
        kl=joined[2],
        same_top=joined[3].astype(bool),
        base_margin=joined[4],
        candidate_margin=joined[5],
        kept_margin=joined[6],
        window=where[:, 0],
        position=where[:, 1],
        nll_floor=floors[0],
        kl_floor=floors[1],
        notes=tuple(note for side in sides for note in side.notes),
    )


def require_same_text(base: Subject, candidate: Subject) -> None:
    """Refuse two models that do not read the same tokens.

    Args:
        base: The model compared with; its windows are the text.
        candidate: The model judged. One without a tokenizer reads the base's tokens.

    Raises:
        ComparisonError: If the candidate's tokenizer names or cuts tokens otherwise.
    """
    ours, theirs = base.loaded.tokenizer, candidate.loaded.tokenizer
    if ours is None or theirs is None or ours is theirs:
        return
    if ours.get_vocab() != theirs.get_vocab() or not torch.equal(base.windows.inputs, candidate.windows.inputs):
        raise ComparisonError(
            f"{base.name} and {candidate.name} cut text into different tokens, so no token of one corresponds to one of "
            "the other: give a candidate with its base's tokenizer"
        )


class _Figures(NamedTuple):
    base_nll: torch.Tensor
    candidate_nll: torch.Tensor
    kl: torch.Tensor
    same_top: torch.Tensor
    base_margin: torch.Tensor
    candidate_margin: torch.Tensor
    kept_margin: torch.Tensor


class _Scored:
    """A subject and the windows it is scored on: through its chunked head, or whole where its weights are packed."""

    def __init__(self, subject: Subject, windows: Windows) -> None:
        self.name = subject.name
        self.model = subject.loaded.model
        self.windows = windows
        self.anatomy = subject.anatomy
        self.notes: tuple[str, ...] = ()
        self.whole = self.anatomy.backbone is None and stored_as_integers(self.model) is not None
        if self.whole:
            check_windows(self.anatomy, windows)
            self.vocab_size = self.anatomy.vocab_size
            stored = stored_as_integers(self.model)
            note = f"{self.name}: its weights are stored as {stored}, so logits were computed a whole window at a time"
            self.notes = (note,)
        else:
            own = subject.loaded.tokenizer is not None
            evaluator = subject.evaluator if own else Evaluator(self.anatomy, windows)  # refuses what cannot be scored
            evaluator.evaluations += 1
            self.vocab_size = self.anatomy.head.vocab_size

    def window(self, index: int) -> Logits:
        """Run one window and return what gives its logits."""
        return self.run(self.windows.inputs[index : index + 1])[0]

    def run(self, inputs: torch.Tensor, rows: int | None = None, *, reordered: bool = False) -> list[Logits]:
        """Run token ids ``[batch, tokens]``; logits made ``rows`` at a time, sums taken in another order, if asked."""
        inputs = inputs.to(self.anatomy.input_device)
        with _sums_reordered(self.model) if reordered else nullcontext():
            if self.whole:
                return [_sliced(logits) for logits in self.model(inputs, use_cache=False).logits]
            return [self._chunked(states, rows) for states in self.anatomy.head.states(inputs)]

    def _chunked(self, states: torch.Tensor, rows: int | None) -> Logits:
        def logits(part: slice) -> torch.Tensor:
            pieces = [states[part]] if rows is None else torch.split(states[part], rows)
            made = [self.anatomy.head.logits(piece) for piece in pieces]
            return _precise(made[0] if len(made) == 1 else torch.cat(made))

        return logits

    def require_finite(self, nll: torch.Tensor, index: int) -> None:
        """Refuse a window with NaN or infinity, naming where it first appears."""
        if not bool(torch.isfinite(nll).all()):
            inputs = self.windows.inputs[index : index + 1].to(self.anatomy.input_device)
            raise explain_non_finite(self.model, lambda: self.model(inputs, use_cache=False))


@contextmanager
def _blaming(subject: Subject, *, is_base: bool) -> Iterator[None]:
    """Say which of the two models an error of NaN speaks of: a broken base is no fault of the candidate's."""
    try:
        yield
    except NonFiniteError as error:
        if is_base:
            raise ComparisonError(
                f"the base {subject.name} is broken, so nothing can be compared with it: {error}"
            ) from error
        raise NonFiniteError(f"the candidate {subject.name} is broken: {error}") from error


def _sliced(logits: torch.Tensor) -> Logits:
    return lambda part: _precise(logits[part].clone())


def _precise(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _parts(scored: torch.Tensor, rows: int) -> Iterator[Part]:
    """Yield the chunks of a window that hold scored tokens, with the rows of those within the chunk."""
    for start in range(0, len(scored), rows):
        part = slice(start, start + rows)
        if scored[part].any():
            yield part, scored[part].nonzero()[:, 0]


def _compare_window(scored: torch.Tensor, targets: torch.Tensor, rows: int, left: Logits, right: Logits) -> _Figures:
    found = []
    for part, keep in _parts(scored, rows):
        now = right(part)
        here = keep.to(now.device)
        now = now[here]
        clean = left(part).to(now.device)[here]
        shared = torch.promote_types(clean.dtype, now.dtype)
        clean, now = clean.to(shared), now.to(shared)
        found.append(_figures(clean, now, targets[part][keep].to(now.device)))
    return _Figures(*(torch.cat(column) for column in zip(*found, strict=True)))


def _figures(clean: torch.Tensor, now: torch.Tensor, targets: torch.Tensor) -> _Figures:
    """Compare the logits of some tokens, which are used up."""
    nlls = [_log_partition(side) - side.gather(-1, targets[:, None])[:, 0].double() for side in (clean, now)]
    first, second = clean.topk(2), now.topk(2)
    kept = now.gather(-1, first.indices).double()
    tops, own = first.values.double(), second.values.double()
    return _Figures(
        base_nll=nlls[0],
        candidate_nll=nlls[1],
        same_top=now.argmax(-1) == clean.argmax(-1),
        base_margin=tops[:, 0] - tops[:, 1],
        candidate_margin=own[:, 0] - own[:, 1],
        kept_margin=kept[:, 0] - kept[:, 1],
        kl=careful_divergence(clean, now).kl,
    )


def _log_partition(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-partition in fp64, a few rows at a time: in fp32 a difference of two is 1e-6 off."""
    return torch.cat([piece.double().logsumexp(-1) for piece in torch.split(logits, _PIECE)])


def _noise_floor(side: _Scored, rows: int, found: list[_Figures]) -> tuple[float, float]:
    """Return how far numerics alone move a window's mean NLL and KL.

    The first tokens of the text are computed once more: in a batch of two, in odd chunks, every linear layer's sum over its
    inputs taken backwards. Never less than what fp32 logits resolve.
    """
    scored, targets = side.windows.scored[0], side.windows.targets[0]
    end = int(scored.nonzero()[:_FLOOR_TOKENS][-1]) + 1
    inputs = side.windows.inputs[:1, :end]
    once = side.run(inputs)[0]
    again = side.run(inputs.expand(2, -1), _ODD_ROWS, reordered=True)[1]
    figures = _compare_window(scored[:end], targets[:end], rows, once, again)
    nll = _RESOLUTION * (1 + max(abs(float(one.base_nll.double().mean())) for one in found))
    moved = abs(float((figures.candidate_nll.double() - figures.base_nll.double()).mean()))
    diverged = float(figures.kl.double().mean())
    return (
        max(nll, moved if math.isfinite(moved) else 0.0),
        max(_RESOLUTION, diverged if math.isfinite(diverged) else 0.0),
    )


@contextmanager
def _sums_reordered(model: nn.Module) -> Iterator[None]:
    """Let every plain linear layer add up its inputs in reverse: the same function, rounded otherwise."""

    def again(module: nn.Linear, arguments: tuple[torch.Tensor, ...], _output: torch.Tensor) -> torch.Tensor:
        return functional.linear(arguments[0].flip(-1), module.weight.flip(-1), module.bias)

    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.is_floating_point()]
    handles = [module.register_forward_hook(again) for module in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
