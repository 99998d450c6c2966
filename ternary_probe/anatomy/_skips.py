"""How blocks add to the residual stream, by two probes: fit the output from the parts, and silence the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ternary_probe.anatomy._blocks import Block, SkipKind, of_stream_shape
from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._trace import Trace, tensors_in

_MAXIMAL_EQUATIONS = 1 << 16
_NEGLIGIBLE = 0.02  # a coefficient below this says that a part does not contribute


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual stream as a whole.

    Attributes:
        kind: The kind all blocks share, or ``mixed``; ``not measurable`` without blocks.
        identity_skips: Every block is ``x + branches(norm(x))``, sequential or parallel: the premise of statements
            on the stream's depth profile. False for sandwich norms too, whose skip is an identity but whose branches
            are normalised before they are added.
        first_exception: The first block for which that does not hold, with the reason.
    """

    kind: str
    identity_skips: bool
    first_exception: str | None


class Fit(NamedTuple):
    """A block's output written as ``skip * input + sum(coefficient * output of a sub-module)``.

    Attributes:
        skip: Coefficient of the input.
        parts: Sub-module name -> coefficient, those that matter, in execution order.
        residual: What the combination leaves of the output, relative.
    """

    skip: float
    parts: dict[str, float]
    residual: float


@dataclass(slots=True)
class _Observed:
    block: Block
    index: int
    inputs: Tensor | None = None
    fit: Fit | None = None
    silent: tuple[float, float] | None = None
    outputs: list[tuple[int, str, Tensor]] = field(default_factory=list)


class Skips(NamedTuple):
    """Fit of every block (None where the block's input was not seen), and what is left of its input when it is silenced."""

    fits: tuple[Fit | None, ...]
    silent: tuple[tuple[float, float] | None, ...]


def probe_skips(
    model: nn.Module, blocks: tuple[Block, ...], matrices: tuple[WeightMatrix, ...], forward: Callable[[], object]
) -> Skips:
    """Run the two probes, one forward each.

    Args:
        model: The model.
        blocks: Its blocks.
        matrices: Its weight matrices.
        forward: Runs the model on the probe's tokens.

    Returns:
        Per block the fit, and ``(coefficient, relative residual)`` of ``output = coefficient * input`` with the
        sub-modules silenced.
    """
    with _fitting(blocks) as fitted:
        forward()
    with _silenced(model, blocks, matrices) as silenced:
        forward()
    return Skips(tuple(entry.fit for entry in fitted), tuple(entry.silent for entry in silenced))


def classify(
    trace: Trace, blocks: tuple[Block, ...], skips: Skips, norms: frozenset[str], tolerance: float
) -> frozenset[str]:
    """Set the kind of every block, and return the sub-modules whose output is added to the stream as it is.

    Args:
        trace: The recorded forward.
        blocks: The blocks; `kind`, `skip` and `reason` are set.
        skips: What the probes found.
        norms: Names of norm-like modules.
        tolerance: Relative residual up to which a fit holds.

    Returns:
        Names of the sub-modules that contribute directly.
    """
    adding: set[str] = set()
    for block, fit, silent in zip(blocks, skips.fits, skips.silent, strict=True):
        block.kind, block.reason = _kind(trace, block, fit, silent, norms, tolerance)
        block.skip = None if fit is None or fit.residual > tolerance else fit.skip
        if block.skip is not None and fit is not None:
            adding.update(fit.parts)
    return frozenset(adding)


def residual_stream(blocks: tuple[Block, ...]) -> ResidualStream:
    """Summarise the blocks' kinds.

    Args:
        blocks: Classified blocks.

    Returns:
        The summary.
    """
    if not blocks:
        return ResidualStream("not measurable", identity_skips=False, first_exception="no chain of blocks was found")
    kinds = {block.kind for block in blocks}
    odd = next((block for block in blocks if block.kind not in {"pre", "parallel"}), None)
    exception = None if odd is None else f"{odd.name}: {odd.kind} ({odd.reason})"
    return ResidualStream(kinds.pop() if len(kinds) == 1 else "mixed", odd is None, exception)


def _kind(
    trace: Trace,
    block: Block,
    fit: Fit | None,
    silent: tuple[float, float] | None,
    norms: frozenset[str],
    tolerance: float,
) -> tuple[SkipKind, str]:
    if fit is None:
        return "not measurable", "its input or output is not one tensor of the stream's shape"
    if fit.residual > tolerance:
        found = f"residual {fit.residual:.2g}"
        return (
            "not measurable",
            f"no identity skip: the output is not made of the input and the parts' outputs ({found})",
        )
    normed = [name for name in fit.parts if name in norms]
    if abs(fit.skip) < _NEGLIGIBLE:
        if normed == list(fit.parts) and len(normed) == 1:
            return "post", f"the output is that of {normed[0]}"
        return "none", "the input does not reappear in the output" + (f", only through {normed[0]}" if normed else "")
    if abs(fit.skip - 1) > max(tolerance, _NEGLIGIBLE):
        return "scaled", f"the input is multiplied by {fit.skip:.4g}"
    if normed:
        return "sandwich", f"branches are normalised by {', '.join(normed)} before they are added"
    if silent is None or abs(silent[0] - 1) > max(tolerance, _NEGLIGIBLE) or silent[1] > tolerance:
        found = "nothing" if silent is None else f"{silent[0]:.4g} x input with residual {silent[1]:.2g}"
        return "not measurable", f"with its parts silenced the block returns {found}"
    inputs = block.call.inputs[0].storage
    normed_inputs = [
        trace.root(call.inputs[0].storage)
        for call in trace.calls
        if call.name in norms and call.within(block.call) and of_stream_shape(call, block)
    ]
    if len(fit.parts) >= 2 and normed_inputs and all(root == trace.root(inputs) for root in normed_inputs):
        return "parallel", "all branches read the block's input"
    return "pre", "branches are added to the input one after the other"


# --- fit ------------------------------------------------------------------------------------------------------------


@contextmanager
def _fitting(blocks: tuple[Block, ...]) -> Iterator[list[_Observed]]:
    observed = [_Observed(block, index) for index, block in enumerate(blocks)]
    pending = list(reversed(observed))
    active: list[_Observed] = []
    handles = []

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not pending:
            return
        entry = pending.pop()
        entry.inputs = next((t.detach().clone() for _, t in tensors_in((args, kwargs))), None)
        active.append(entry)

    def note(name: str, depth: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            entry = active[-1] if active else None
            if entry is None or entry.inputs is None or not name.startswith(entry.block.name + "."):
                return
            tensor = next((t for _, t in tensors_in(output)), None)
            if (
                tensor is not None
                and tensor.numel() == entry.inputs.numel()
                and tensor.shape[-1] == entry.inputs.shape[-1]
            ):
                entry.outputs.append((depth, name, tensor.detach().clone()))

        return hook

    def leave(_module: nn.Module, _args: object, output: Any) -> None:
        if not active:
            return
        entry = active.pop()
        tensor = next((t for _, t in tensors_in(output)), None)
        if entry.inputs is not None and tensor is not None and tensor.shape == entry.inputs.shape:
            entry.fit = _fit(entry.inputs, tensor.detach(), entry.outputs)
        entry.inputs, entry.outputs = None, []

    for name, module in {block.name: block.module for block in blocks}.items():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        for inner, part in module.named_modules():
            if inner:
                handles.append(part.register_forward_hook(note(f"{name}.{inner}", inner.count(".") + 1)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


def _fit(x: Tensor, y: Tensor, outputs: list[tuple[int, str, Tensor]]) -> Fit | None:
    """Return the fit with the block's direct children, or with deeper parts where the input only shows among those.

    A child may add the residual itself: then the block's output is the child's, and its own parts tell more.
    """
    best: Fit | None = None
    rounding = max(4 * torch.finfo(y.dtype).eps, 1e-5)
    for depth in sorted({depth for depth, _, _ in outputs}) or [0]:
        frontier = [(n, t) for d, n, t in outputs if d == depth or (d < depth and not _has_inner(n, outputs))]
        fit = _least_squares(x, y, _distinct(frontier))
        if best is None or fit.residual < 0.5 * best.residual or _shows_input(fit, best, rounding):
            best = fit
        if best.residual < rounding and abs(best.skip) > _NEGLIGIBLE:
            break
    return best


def _shows_input(fit: Fit, best: Fit, rounding: float) -> bool:
    return abs(best.skip) < _NEGLIGIBLE < abs(fit.skip) and fit.residual <= max(2 * best.residual, rounding)


def _has_inner(name: str, outputs: list[tuple[int, str, Tensor]]) -> bool:
    return any(other.startswith(name + ".") for _, other, _ in outputs)


def _distinct(parts: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    kept: list[tuple[str, Tensor]] = []
    for name, tensor in parts:
        flat = tensor.reshape(-1)
        # An identity (a dropout) repeats the output of the module before it, which is the one that counts.
        if bool(flat.any()) and not any(torch.equal(flat, other.reshape(-1)) for _, other in kept):
            kept.append((name, tensor))
    return kept


def _least_squares(x: Tensor, y: Tensor, parts: list[tuple[str, Tensor]]) -> Fit:
    """Return a fit by normal equations in float64, without the parts it can do without."""
    step = max(1, x.numel() // _MAXIMAL_EQUATIONS)
    columns = torch.stack([t.reshape(-1)[::step].double().cpu() for t in (x, *(t for _, t in parts), y)], dim=1)
    # Rounding is proportional to the entries, and a few of them may be huge: weigh every equation by its size.
    target = columns[:, -1].abs()
    columns /= target.clamp_min(float(target.median()) + 1e-300)[:, None]
    scale = columns.square().sum(0).sqrt().clamp_min(1e-300)
    columns /= scale
    gram = columns.T @ columns
    kept = list(range(1, len(parts) + 1))
    best = _solve(gram, [0, *kept])
    # In half precision a norm's output, nearly a multiple of the input, soaks up rounding: what the fit needs counts.
    while kept:
        without = {part: _solve(gram, [0, *(k for k in kept if k != part)]) for part in kept}
        part = min(without, key=lambda k: without[k][1])
        if without[part][1] > max(1.05 * best[1], 1e-6):
            break
        kept.remove(part)
        best = (without[part][0], max(best[1], without[part][1]))
    coefficients = best[0] * scale[-1] / scale[[0, *kept]]
    named = {parts[k - 1][0]: float(c) for k, c in zip(kept, coefficients[1:], strict=True)}
    return Fit(float(coefficients[0]), {name: c for name, c in named.items() if abs(c) > _NEGLIGIBLE}, best[1])


def _solve(gram: Tensor, chosen: list[int]) -> tuple[Tensor, float]:
    """Return coefficients of the chosen columns and the relative residual; all columns, the target last, have unit norm."""
    system, right = gram[chosen][:, chosen], gram[chosen, -1]
    solution = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:, 0]
    left = 1 - 2 * solution @ right + solution @ system @ solution
    return solution, float(left.clamp_min(0).sqrt())


# --- silence --------------------------------------------------------------------------------------------------------


@contextmanager
def _silenced(
    model: nn.Module, blocks: tuple[Block, ...], matrices: tuple[WeightMatrix, ...]
) -> Iterator[list[_Observed]]:
    """Make every sub-module of a block that owns a matrix return zeros, and see what the block makes of its input.

    Yields:
        One entry per block, filled as it runs.
    """
    observed = [_Observed(block, index) for index, block in enumerate(blocks)]
    pending = list(reversed(observed))
    active: list[_Observed] = []
    owners = {m.parameter_name.rpartition(".")[0] for m in matrices if m.block is not None}
    inside = {block.name for block in blocks}
    handles = []

    def zero(_module: nn.Module, _args: object, output: Any) -> Any:
        return _zeros(output)

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if pending:
            entry = pending.pop()
            entry.inputs = next((t.detach().clone() for _, t in tensors_in((args, kwargs))), None)
            active.append(entry)

    def leave(_module: nn.Module, _args: object, output: Any) -> None:
        entry = active.pop() if active else None
        tensor = next((t for _, t in tensors_in(output)), None)
        if entry is None or entry.inputs is None or tensor is None or tensor.shape != entry.inputs.shape:
            return
        # Centred over tokens: what a silenced part's constants (a bias after it) add is no matter.
        x, y = (t - t.mean(0) for t in (r.detach().double().flatten(0, -2) for r in (entry.inputs, tensor)))
        x, y = x.flatten(), y.flatten()
        if bool(x.any()) and bool(y.isfinite().all()):
            factor = float(x @ y / (x @ x))
            entry.silent = (factor, float((y - factor * x).norm() / x.norm()))
        entry.inputs = None

    for owner in sorted(owners):
        if owner not in inside:
            handles.append(model.get_submodule(owner).register_forward_hook(zero))
    for module in {block.name: block.module for block in blocks}.values():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_zeros(item) for item in value)
    if isinstance(value, list):
        return [_zeros(item) for item in value]
    return value
