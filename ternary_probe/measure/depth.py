"""Depth profile: the smallest singular value of the residual stream at every block (THEORY 2.2, 2.3.6).

A block that adds to the stream unchanged (an identity skip) should not take a direction away from it: σ_min(X_l) falls
where a sub-layer cancels what the stream held (arXiv 2606.19491, Cor. sigma-min-res).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ternary_probe.anatomy import AnatomyError
from ternary_probe.anatomy._skips import probe_skips
from ternary_probe.anatomy._trace import tensors_in
from ternary_probe.measure.covariance import GramMatrix, SmallestSingular, smallest_singular

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy
    from ternary_probe.anatomy._blocks import Block

Vector = NDArray[np.float64]
Run = Callable[[Tensor], object]

GRAM_BYTES = 8 << 30
"""Gram matrices held at a time: a deeper or wider stream takes several passes."""
_PROBE_TOKENS = 32


@dataclass(frozen=True)
class DepthProfile:
    """σ_min of the uncentred residual stream: X_0, the input of the first block, then X_l, the output of every block.

    Attributes:
        names: ``input``, then the blocks' names; ``L + 1`` in all.
        sigma: σ_min as the stream is, ``[L + 1]``.
        floor: Below this a σ_min is rounding, ``[L + 1]``.
        scale: What per-layer scalars multiplied the whole stream by since X_0, ``[L + 1]``; 1 without such scalars.
        tokens: Rows of every stream.
        width: Its width.
    """

    names: tuple[str, ...]
    sigma: Vector
    floor: Vector
    scale: Vector
    tokens: int
    width: int

    @property
    def scaled(self) -> bool:
        """Whether blocks multiply the whole stream by a scalar."""
        return bool((self.scale != 1).any())

    @property
    def start(self) -> int:
        """The stream that ratios are taken to: X_0, or the first one whose σ_min is more than rounding."""
        above = np.flatnonzero(self.sigma > self.floor)
        return int(above[0]) if above.size else 0

    def ratio(self, *, raw: bool = False, upper: bool = False) -> Vector:
        """Return ``σ_min(X_l) / σ_min(X_start)``, ``[L + 1]``; NaN before `start`.

        Args:
            raw: Leave the per-layer scalars in.
            upper: Read a σ_min below its floor as the floor.
        """
        sigma = self._sigma(raw=raw, upper=upper)
        result = np.full(len(sigma), np.nan)
        if self.sigma[self.start] > 0:
            result[self.start :] = sigma[self.start :] / sigma[self.start]
        return result

    def step(self, *, raw: bool = False, upper: bool = False) -> Vector:
        """Return ``σ_min(X_l) / σ_min(X_{l-1})``, ``[L + 1]``; NaN at X_0 and after a stream at its floor.

        Args:
            raw: Leave the per-layer scalars in.
            upper: Read a σ_min below its floor as the floor.
        """
        sigma, before = self._sigma(raw=raw, upper=upper), self._sigma(raw=raw, upper=False)
        result = np.full(len(sigma), np.nan)
        usable = np.flatnonzero(self.sigma[:-1] > self.floor[:-1])
        result[usable + 1] = sigma[usable + 1] / before[usable]
        return result

    def _sigma(self, *, raw: bool, upper: bool) -> Vector:
        sigma = np.maximum(self.sigma, self.floor) if upper else self.sigma
        return sigma if raw else sigma / np.abs(self.scale)


@dataclass(frozen=True)
class Fall:
    """What each sub-layer of one block does to σ_min.

    Attributes:
        block: The block's name.
        parts: Sub-layer -> σ_min after it over σ_min before it, in execution order; branches that read the same
            stream (a parallel block) are each set against the block's input.
        cause: The sub-layer with the smallest ratio; the block itself where its parts could not be told apart.
    """

    block: str
    parts: dict[str, float]
    cause: str


class StreamRecorder:
    """Gathers the Gram matrices of the residual stream at a choice of points while the model runs.

    Args:
        blocks: All blocks, in execution order.
        points: Which streams: 0 for the input of the first block, ``l`` for the output of the l-th.
    """

    def __init__(self, blocks: Sequence[Block], points: Sequence[int]) -> None:
        self._blocks = blocks
        self._points = frozenset(points)
        self.grams: dict[int, GramMatrix] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self._next = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the blocks.

        Yields:
            Nothing; call `start` before every forward.
        """
        with ExitStack() as stack:
            for module in {block.name: block.module for block in self._blocks}.values():
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def start(self) -> None:
        """Begin a new forward."""
        self._next = 0

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._next == 0:
            self._note(0, (args, kwargs))

    def _leave(self, _module: nn.Module, _args: object, output: Any) -> None:
        self._next += 1
        self._note(self._next, output)

    def _note(self, point: int, value: Any) -> None:
        if point not in self._points:
            return
        tensor = stream_tensor(value)
        if point not in self.grams:
            self.grams[point] = GramMatrix(tensor.shape[-1], tensor.device)
            self.dtypes[point] = tensor.dtype
        self.grams[point].add(tensor)


def stream_tensor(value: Any) -> Tensor:
    """Return the first floating tensor of a block's arguments or output: the residual stream."""
    return next(tensor for _, tensor in tensors_in(value))


def point_groups(blocks: int, width: int, budget: int = GRAM_BYTES) -> list[range]:
    """Split the points of the stream so that the Gram matrices of one group fit a budget.

    Args:
        blocks: Number of blocks.
        width: Width of the stream.
        budget: Bytes.

    Returns:
        Ranges of points, in order; together ``0 … blocks``.
    """
    size = max(1, budget // (8 * width * width))
    return [range(start, min(start + size, blocks + 1)) for start in range(0, blocks + 1, size)]


def depth_profile(blocks: Sequence[Block], found: dict[int, SmallestSingular], tokens: int, width: int) -> DepthProfile:
    """Put the figures of all points together.

    Args:
        blocks: The blocks.
        found: σ_min by point.
        tokens: Rows of every stream.
        width: Its width.

    Returns:
        The profile; scalars of blocks that multiply their input are taken from the anatomy.
    """
    points = sorted(found)
    factors = [block.skip if block.kind == "scaled" and block.skip else 1.0 for block in blocks]
    return DepthProfile(
        names=("input", *(block.name for block in blocks)),
        sigma=np.array([found[point].value for point in points]),
        floor=np.array([found[point].floor for point in points]),
        scale=np.cumprod(np.array([1.0, *factors], dtype=np.float64), dtype=np.float64),
        tokens=tokens,
        width=width,
    )


class _EnoughError(BaseException):
    """Ends a forward early; no user ever sees it."""


def locate_fall(anatomy: Anatomy, inputs: Sequence[Tensor], point: int, run: Run) -> Fall:
    """Find the sub-layer of a block that takes σ_min down, by running the model up to it once more.

    The sub-layers are those whose outputs the block was measured to add to the stream, with their coefficients.

    Args:
        anatomy: The model's anatomy.
        inputs: Token ids, one window ``[L]`` each.
        point: The block, counted from 1.
        run: Runs the model on ids ``[1, L]``.

    Returns:
        The fall.

    Raises:
        AnatomyError: If the model has no such block.
    """
    if not 1 <= point <= len(anatomy.blocks):
        raise AnatomyError(f"the model has {len(anatomy.blocks)} blocks: there is no block {point}")
    block = anatomy.blocks[point - 1]
    probe = inputs[0][None, :_PROBE_TOKENS]
    with torch.no_grad():
        fit = probe_skips(anatomy.model, anatomy.blocks, anatomy.matrices, lambda: run(probe)).fits[point - 1]
    if fit is None or len(fit.parts) < 2 or any(name not in dict(anatomy.model.named_modules()) for name in fit.parts):
        return Fall(block.name, {}, block.name)
    streams = _part_streams(
        anatomy, inputs, point, {name: _tidy(c) for name, c in fit.parts.items()}, _tidy(fit.skip), run
    )
    sigma = [smallest_singular(gram, where=block.name).value for gram in streams]
    parts = {}
    for position, name in enumerate(fit.parts, start=1):
        before = sigma[0] if block.kind == "parallel" else sigma[position - 1]
        parts[name] = sigma[position] / before if before > 0 else 1.0
    return Fall(block.name, parts, min(parts, key=parts.__getitem__))


def _tidy(coefficient: float) -> float:
    """Return a fitted coefficient as the number it stands for, where that is plain."""
    return float(round(coefficient)) if abs(coefficient - round(coefficient)) < 1e-3 else coefficient


@torch.no_grad()
def _part_streams(
    anatomy: Anatomy, inputs: Sequence[Tensor], point: int, parts: dict[str, float], skip: float, run: Run
) -> list[GramMatrix]:
    """Return Gram matrices of the block's (scaled) input and of the stream after each part."""
    block = anatomy.blocks[point - 1]
    grams: list[GramMatrix] = []
    outputs: dict[str, Tensor] = {}
    state: dict[str, Any] = {"calls": 0, "x": None}

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state["calls"] += 1
        if state["calls"] == point:
            state["x"] = stream_tensor((args, kwargs)).detach().double()

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            if state["calls"] == point:
                outputs[name] = stream_tensor(output).detach().double()

        return hook

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        if state["calls"] != point:
            return
        x = skip * state["x"]
        streams = [x]
        for name, coefficient in parts.items():
            base = x if block.kind == "parallel" else streams[-1]
            streams.append(base + coefficient * outputs[name].reshape(x.shape))
        if not grams:
            grams.extend(GramMatrix(x.shape[-1], x.device) for _ in streams)
        for gram, stream in zip(grams, streams, strict=True):
            gram.add(stream)
        raise _EnoughError

    with ExitStack() as stack:
        for module in {one.name: one.module for one in anatomy.blocks}.values():
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for name in parts:
            stack.callback(anatomy.model.get_submodule(name).register_forward_hook(keep(name)).remove)
        stack.callback(block.module.register_forward_hook(leave).remove)
        for ids in inputs:
            state["calls"] = 0
            try:
                run(ids[None])
            except _EnoughError:
                continue
    return grams
