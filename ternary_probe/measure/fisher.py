"""One Fisher pass: the expected damage of a sign flip in every column of every matrix (THEORY 1.6).

To second order a flip of ``w`` moves the NLL by ``-2 w g + 2 w^2 F`` per token, with ``g`` the gradient of the mean NLL and
``F`` the diagonal Fisher: ``(1/T) sum_windows (grad sum_t NLL_t)^2`` with labels sampled from the model, ``T`` predicted
tokens in all. Summed over rows that is one number a column, so a vector per matrix is kept and no second copy of the model.

Damage is heavy-tailed: a few single entries can carry more than all others. Entries whose own prediction exceeds a bound
are kept apart, by name; what is left is the *bulk*.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ternary_probe.errors import ProbeError
from ternary_probe.measure.nll import HEAD_BYTES, check_windows

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.text import Windows

    _Take = Callable[[WeightMatrix, torch.Tensor], None]
    _Hook = Callable[[torch.Tensor], None]

Vector = NDArray[np.float64]

TAIL_NATS = 0.02  # predicted nats per token of one flip from which an entry is measured, not predicted
_CANDIDATE = 0.1  # share of the bound from which a single pass's prediction is remembered
_PIECE = 1 << 18  # entries of a matrix at a time, so that a piece stays in a core's cache


class TailEntry(NamedTuple):
    """A single weight whose flip alone is predicted to cost more than the bound."""

    matrix: str
    row: int
    column: int
    predicted: float
    """``2 w^2 F``, nats per token: mean over label draws."""
    draws: Vector
    """The same from each label draw, ``[draws]``."""


@dataclass(frozen=True)
class ColumnScores:
    """Predictions for the columns of one matrix, nats per token and per flip of every entry of the column at rate 1."""

    first: Vector
    """``sum_i -2 w_ij g_ij`` on the text's own labels, ``[in_features]``."""
    fisher: NDArray[np.float64]
    """``sum_i 2 w_ij^2 F_ij`` from each draw of labels, ``[draws, in_features]``; the tail is part of it."""
    joint: NDArray[np.float64]
    """``(2/T) sum_windows (sum_i w_ij G_ij)^2`` from each draw, ``[draws, in_features]``: the second order of flipping the
    *whole* column at once, where the entries' effects add up or cancel."""

    @property
    def second(self) -> Vector:
        """``sum_i 2 w_ij^2 F_ij``, mean over draws, ``[in_features]``."""
        mean: Vector = self.fisher.mean(0)
        return mean

    @property
    def whole_column(self) -> Vector:
        """Predicted KL of flipping the whole column, nats per token, mean over draws, ``[in_features]``."""
        mean: Vector = self.joint.mean(0)
        return mean


class Predicted(NamedTuple):
    """A predicted response per unit of flip rate, nats per token, with the standard error over label draws."""

    value: float
    standard_error: float | None
    """``None`` with a single draw."""


@dataclass(frozen=True)
class FisherScreen:
    """What one Fisher pass says about a set of matrices.

    Attributes:
        columns: Matrix name to the scores of its columns.
        tail: Entries predicted above the bound, largest first.
        tokens: Predicted tokens.
        draws: Label draws.
        bound: Nats per token of a flip from which an entry belongs to the tail.
    """

    columns: Mapping[str, ColumnScores]
    tail: tuple[TailEntry, ...]
    tokens: int
    draws: int
    bound: float

    def slope(
        self,
        chosen: Mapping[str, Sequence[int] | NDArray[np.int64]],
        *,
        bulk: bool = False,
        rates: Mapping[str, float] | None = None,
    ) -> Predicted:
        """Return the predicted KL per unit flip rate of a set of columns: ``KL(clean || flipped) = slope * rate``.

        Args:
            chosen: Matrix name to columns.
            bulk: Leave the tail out.
            rates: Matrix name to the share really flipped there; the result is then the KL itself.

        Returns:
            ``sum 2 w^2 F`` over the entries of those columns.
        """
        total = np.zeros(self.draws)
        for name, columns in chosen.items():
            part = self.columns[name].fisher[:, np.asarray(columns, dtype=np.int64)].sum(1)
            if bulk:
                picked = set(map(int, columns))
                for entry in self._tail_of(name):
                    if entry.column in picked:
                        part = part - entry.draws
            total += part if rates is None else part * rates[name]
        return Predicted(float(total.mean()), standard_error(total))

    def _tail_of(self, name: str) -> list[TailEntry]:
        return [entry for entry in self.tail if entry.matrix == name]

    def tail_by_matrix(self) -> dict[str, tuple[int, ...]]:
        """Return the tail as flat row-major entries, by matrix: what a bulk flip leaves out.

        Returns:
            Matrix name to sorted entries.
        """
        found: dict[str, list[int]] = defaultdict(list)
        for entry in self.tail:
            width = self.columns[entry.matrix].first.size
            found[entry.matrix].append(entry.row * width + entry.column)
        return {name: tuple(sorted(entries)) for name, entries in found.items()}


def standard_error(values: Vector) -> float | None:
    """Return the standard error of a mean over draws.

    Args:
        values: ``[draws]``.

    Returns:
        ``sd / sqrt(draws)``; ``None`` for a single value.
    """
    if values.size < 2:
        return None
    return float(values.std(ddof=1) / np.sqrt(values.size))


def fisher_screen(
    anatomy: Anatomy,
    windows: Windows,
    matrices: Sequence[WeightMatrix] | None = None,
    *,
    draws: int = 2,
    seed: int = 0,
    tail: float = TAIL_NATS,
    head_bytes: int = HEAD_BYTES,
) -> FisherScreen:
    """Run one forward and ``1 + draws`` backward passes over the text and reduce every gradient to its columns.

    Args:
        anatomy: The model's anatomy. Only matrices inside blocks can be screened: the head runs in chunks, so a gradient
            of its own matrix is never whole.
        windows: The text; each window is one sequence of the Fisher's sum.
        matrices: Matrices to screen; all inside blocks by default.
        draws: Draws of labels from the model. The spread over draws is the prediction's own noise.
        seed: Seed of the labels, which depend on it, the window, the draw and the token only.
        tail: Predicted nats per token of one flip from which an entry is named.
        head_bytes: Upper bound for a chunk of fp32 logits, bytes.

    Returns:
        The screen. Weights, gradients and their flags are as before.

    Raises:
        ProbeError: If a matrix lies outside every block, the weights cannot carry gradients, or a score is not finite.
    """
    if torch.is_inference_mode_enabled():
        raise ProbeError("the Fisher pass needs gradients, which torch.inference_mode() forbids: leave it")
    if draws < 1:
        raise ProbeError(f"{draws} label draws: the Fisher needs at least one")
    check_windows(anatomy, windows)
    wanted = list(anatomy.block_matrices if matrices is None else matrices)
    outside = [m.name for m in wanted if m.block is None]
    if outside:
        raise ProbeError(f"{outside[0]} lies outside every block, where columns are not predicted: --exclude it")
    tokens = int(windows.scored.sum())
    sums = {m.name: _Sums(m, draws) for m in wanted}
    head = _Labels(anatomy, windows, draws, seed, head_bytes)
    with _gradients(anatomy, wanted) as take:
        for index in range(len(windows.inputs)):
            with torch.enable_grad():
                states = anatomy.head.states(windows.inputs[index][None].to(anatomy.input_device))
            here = int(windows.scored[index].sum())
            bound = tail * _CANDIDATE * here / 2  # of (w g)^2, so that 2 (w g)^2 / T of this window exceeds the share
            gradients = head.gradients(index, states[0].detach())
            for number, gradient in enumerate(gradients):
                draw = None if number == 0 else number - 1
                with take(lambda matrix, grad, d=draw, b=bound: sums[matrix.name].add(grad, d, b)):  # type: ignore[misc]
                    torch.autograd.backward(states, gradient[None], retain_graph=number < draws)
            del states, gradients
    scores = {name: s.finish(tokens) for name, s in sums.items()}
    for name, score in scores.items():
        if not (np.isfinite(score.first).all() and np.isfinite(score.fisher).all()):
            raise ProbeError(
                f"the gradient of {name} is not finite: the dtype overflows in the backward pass, load the model with "
                "--dtype float32"
            )
    named = [entry for s in sums.values() for entry in s.tail(tokens, tail)]
    return FisherScreen(
        scores, tuple(sorted(named, key=lambda e: (-e.predicted, e.matrix, e.row))), tokens, draws, tail
    )


class _Sums:
    """Sums over windows for one matrix: a vector for the first order, one for each label draw, and the candidates."""

    def __init__(self, matrix: WeightMatrix, draws: int) -> None:
        self.matrix, self.draws = matrix, draws
        device = matrix.device
        self.first = torch.zeros(matrix.in_features, dtype=torch.float64, device=device)
        self.fisher = torch.zeros((draws, matrix.in_features), dtype=torch.float64, device=device)
        self.joint = torch.zeros_like(self.fisher)
        self.candidates: dict[int, Vector] = {}

    def add(self, gradient: torch.Tensor, draw: int | None, bound: float) -> None:
        """Add one window's gradient of its summed NLL."""
        weight, wide = self.matrix.view(), self.matrix.in_features
        step = max(1, (_PIECE if weight.device.type == "cpu" else 1 << 26) // wide)
        signed = torch.zeros_like(self.first)
        for start in range(0, self.matrix.out_features, step):
            rows = slice(start, start + step)
            product = weight[rows].float() * gradient[rows].float()
            signed += product.sum(0)
            if draw is None:
                continue
            square = product.square_()
            self.fisher[draw] += square.sum(0)
            if float(square.amax()) > bound:
                for row, column in (square > bound).nonzero().tolist():
                    place = (start + row) * wide + column
                    self.candidates.setdefault(place, np.zeros(self.draws))[draw] += float(square[row, column])
        if draw is None:
            self.first += signed
        else:
            self.joint[draw] += signed.square_()

    def finish(self, tokens: int) -> ColumnScores:
        """Return the scores per token."""
        first, fisher, joint = (s.cpu().numpy() for s in (self.first, self.fisher, self.joint))
        return ColumnScores(-2 / tokens * first, 2 / tokens * fisher, 2 / tokens * joint)

    def tail(self, tokens: int, bound: float) -> Iterator[TailEntry]:
        """Yield the entries above the bound."""
        for place, sums in self.candidates.items():
            nats = 2 / tokens * sums
            if nats.mean() > bound:
                row, column = divmod(place, self.matrix.in_features)
                yield TailEntry(self.matrix.name, row, column, float(nats.mean()), nats)


class _Labels:
    """Gradients of a window's summed NLL with respect to the head's input, for its own labels and for sampled ones."""

    def __init__(self, anatomy: Anatomy, windows: Windows, draws: int, seed: int, head_bytes: int) -> None:
        self.anatomy, self.windows, self.draws, self.seed = anatomy, windows, draws, seed
        self.rows = max(16, head_bytes // (8 * anatomy.head.vocab_size) // 16 * 16)  # logits and their probabilities

    def gradients(self, index: int, states: torch.Tensor) -> list[torch.Tensor]:
        """Return ``1 + draws`` gradients ``[L, d]``: the text's labels first."""
        results = [torch.zeros_like(states) for _ in range(1 + self.draws)]
        uniform = [self._uniform(index, draw, len(states)) for draw in range(self.draws)]
        for start in range(0, len(states), self.rows):
            part = slice(start, start + self.rows)
            scored = self.windows.scored[index][part].to(states.device)
            if not scored.any():
                continue
            leaf = states[part].clone().requires_grad_(True)
            with torch.enable_grad():
                logits = self.anatomy.head.logits(leaf)
            probabilities = logits.detach().float().softmax(-1)
            labels = [self.windows.targets[index][part].to(states.device)]
            if self.draws:
                cumulative = probabilities.cumsum(-1)
                total = cumulative[:, -1:]
                labels += [
                    torch.searchsorted(cumulative, u[part, None].to(total) * total).clamp_max_(logits.shape[-1] - 1)[
                        :, 0
                    ]
                    for u in uniform
                ]
                del cumulative
            for number, label in enumerate(labels):
                slope = probabilities.clone()
                slope[torch.arange(len(label), device=label.device), label] -= 1
                slope[~scored] = 0
                (gradient,) = torch.autograd.grad(
                    logits, leaf, slope.to(logits.dtype), retain_graph=number + 1 < len(labels)
                )
                results[number][part] = gradient
        return results

    def _uniform(self, window: int, draw: int, length: int) -> torch.Tensor:
        """Return ``[L]`` uniform numbers in (0, 1), the same on every device."""
        digest = hashlib.sha256(f"ternary_probe/fisher|{self.seed}|{window}|{draw}".encode()).digest()
        words = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(length)
        return torch.from_numpy(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


@contextmanager
def _gradients(anatomy: Anatomy, matrices: Sequence[WeightMatrix]) -> Iterator[_Taker]:
    """Let only the given matrices' parameters have gradients, handed over and dropped one by one as they are ready."""
    by_parameter: dict[str, list[WeightMatrix]] = defaultdict(list)
    for matrix in matrices:
        matrix.view()  # refuses what has no floating storage
        own = anatomy.model.get_parameter(matrix.parameter_name)
        others = {name: _parameter(anatomy.model, name) for name in matrix.aliases}
        twins = [name for name, other in others.items() if other is not None and other is not own]
        if twins:
            raise ProbeError(
                f"{matrix.name} and {twins[0]} share storage but are two parameters, so neither gets the whole gradient: tie "
                "them to one parameter, or --exclude it"
            )
        by_parameter[matrix.parameter_name].append(matrix)
    model = anatomy.model
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    taker = _Taker()
    with ExitStack() as stack:
        for parameter, flag, gradient in before:
            stack.callback(_restore, parameter, flag, gradient)
            parameter.requires_grad_(False)
            parameter.grad = None
        for name, group in by_parameter.items():
            parameter = model.get_parameter(name)
            parameter.requires_grad_(True)
            handle = parameter.register_post_accumulate_grad_hook(taker.hook(group))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)
        yield taker


def _parameter(model: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _restore(parameter: torch.nn.Parameter, flag: bool, gradient: torch.Tensor | None) -> None:
    parameter.grad = None
    parameter.requires_grad_(flag)
    parameter.grad = gradient


class _Taker:
    """Hands the gradients of one backward pass to whoever wants them at that moment."""

    def __init__(self) -> None:
        self._take: _Take | None = None

    @contextmanager
    def __call__(self, take: _Take) -> Iterator[None]:
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def hook(self, group: Sequence[WeightMatrix]) -> _Hook:
        """Return the hook of a parameter that holds these matrices."""

        def taken(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None or self._take is None:
                return
            with torch.no_grad():
                for matrix in group:
                    self._take(matrix, matrix.view_of(gradient))

        return taken
