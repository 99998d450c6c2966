"""`NormSite`: a norm of the live model, with its effective gain and the matrices that read its output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ternary_probe.anatomy._blocks import Block, of_stream_shape
from ternary_probe.anatomy._collect import Unhandled
from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._norm_law import Affine, NormKind, NormLaw, NotANorm, find_law
from ternary_probe.anatomy._trace import Call, Trace
from ternary_probe.errors import ProbeError

NormPosition = Literal["pre", "post", "sandwich", "qk", "embedding", "final"]


class NormError(ProbeError):
    """A norm has no gain that could be edited."""


@dataclass(slots=True, eq=False)
class NormSite:
    """One norm.

    Attributes:
        name: Qualified name of its module.
        module: The module.
        law: What it computes.
        position: ``pre`` (feeds matrices of its block), ``post`` (normalises the stream itself), ``sandwich``
            (normalises a branch before it is added), ``qk`` (inside an attention or another branch), ``embedding``
            (before the first block) or ``final`` (after the blocks; in a post-norm model the final norm is the last
            block's, and its position stays ``post``).
        block: Index of its block, or None.
        readers: Names of the matrices its output is fed to directly.
        readers_complete: Proven by behaviour: with the gain of a coordinate halved and the readers' columns doubled,
            the logits stay.
        readers_note: Why `readers_complete` is what it is.
    """

    name: str
    module: nn.Module = field(repr=False)
    law: NormLaw = field(repr=False)
    position: NormPosition
    block: int | None
    readers: tuple[str, ...]
    readers_complete: bool = False
    readers_note: str = "not probed"

    @property
    def kind(self) -> NormKind:
        """``layer_norm`` or ``rms_norm``, by behaviour."""
        return self.law.kind

    @property
    def eps(self) -> float | None:
        """Constant added to the variance; None if the module does something else."""
        return self.law.eps

    @property
    def gain(self) -> Tensor:
        """Effective gain of the live module, float64 ``[width]``, on its device: ``w``, ``1 + w``, or the constant it has."""
        return self._value(self.law.gain)

    @property
    def bias(self) -> Tensor | None:
        """Effective bias of the live module, float64 ``[width]``, or None."""
        return None if self.law.bias is None else self._value(self.law.bias)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters behind gain and bias by qualified name; empty for a norm without."""
        parts = [part.parameter for part in (self.law.gain, self.law.bias) if part is not None]
        return {f"{self.name}.{part}": self.module.get_parameter(part) for part in parts if part is not None}

    @torch.no_grad()
    def scale_gain(self, columns: Tensor, factor: float) -> None:
        """Multiply the effective gain, and the bias with it, by a factor at some coordinates.

        The parameter is written such that the *effective* value is multiplied: ``w k``, or ``(1 + w) k - 1``,
        rounded to the parameter's dtype. Save `parameters` before and copy them back to undo.

        Args:
            columns: Coordinates, int64 ``[k]``.
            factor: The factor.

        Raises:
            NormError: If the gain, or a bias that is there, is not a parameter.
        """
        for part in (self.law.gain, self.law.bias):
            if part is None:
                continue
            if part.parameter is None:
                raise NormError(
                    f"{self.name} has no parameter for its {'gain' if part is self.law.gain else 'bias'}: it cannot be scaled"
                )
            self._write(part, columns, self._value(part)[columns.to(self._device())] * factor)

    @torch.no_grad()
    def set_gain(self, columns: Tensor, value: float) -> None:
        """Set the effective gain at some coordinates, int64 ``[k]``, to a value."""
        self._write(
            self.law.gain, columns, torch.full((columns.numel(),), value, dtype=torch.float64, device=self._device())
        )

    def _device(self) -> torch.device:
        return next((p.device for p in self.parameters().values()), torch.device("cpu"))

    def _value(self, part: Affine) -> Tensor:
        if part.parameter is None:
            return part.offset.to(self._device())
        live = self.module.get_parameter(part.parameter).detach().flatten()
        return part.slope * live.double() + part.offset.to(live.device)

    def _write(self, part: Affine, columns: Tensor, values: Tensor) -> None:
        live = self.module.get_parameter(str(part.parameter)).detach().view(-1)
        columns = columns.to(live.device)
        live[columns] = ((values - part.offset.to(live.device)[columns]) / part.slope).to(live.dtype)


class NormCalls(NamedTuple):
    """The calls of norm modules in a trace with their laws, and norm-like modules that could not be understood."""

    calls: tuple[tuple[Call, NormLaw], ...]
    unhandled: tuple[Unhandled, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of the modules."""
        return frozenset(call.name for call, _ in self.calls)


class FoundNorms(NamedTuple):
    """The norms of a model in execution order, and the final one."""

    norms: tuple[NormSite, ...]
    final: NormSite | None


def find_norm_calls(trace: Trace) -> NormCalls:
    """Find every call of a norm, by probing each module that has no matrix inside and keeps its input's shape.

    Args:
        trace: A recorded forward.

    Returns:
        The calls, in execution order; of norms inside norms the outermost.
    """
    tested: dict[tuple[int, int], NormLaw | NotANorm] = {}
    calls: list[tuple[Call, NormLaw]] = []
    unhandled: dict[str, Unhandled] = {}
    for call in trace.calls:
        if not _candidate(call) or any(call.within(outer) for outer, _ in calls[-1:]):
            continue
        key = (id(call.module), call.inputs[0].shape[-1])
        if key not in tested:
            tested[key] = find_law(call.module, call.inputs[0].shape, call.input_keys[0])
        law = tested[key]
        if isinstance(law, NormLaw):
            calls.append((call, law))
        elif law.looks_like_one:
            unhandled[call.name] = Unhandled(call.name, law.reason)
    return NormCalls(tuple(calls), tuple(unhandled.values()))


def place_norms(
    trace: Trace,
    found: NormCalls,
    blocks: tuple[Block, ...],
    matrices: tuple[WeightMatrix, ...],
    adding: frozenset[str],
) -> FoundNorms:
    """Say where each norm stands in the model and which matrices read it.

    Args:
        trace: A recorded forward.
        found: Its norm calls.
        blocks: Its blocks, with their kind of skip.
        matrices: Its weight matrices.
        adding: Names of modules whose output is added to the residual stream as it is.

    Returns:
        The norms.
    """
    final = _final_call(trace, [call for call, _ in found.calls])
    sites: dict[str, NormSite] = {}
    for call, law in found.calls:
        readers = _readers(trace, call, matrices)
        if call.name in sites:  # a shared module that runs again
            sites[call.name].readers = tuple(dict.fromkeys((*sites[call.name].readers, *readers)))
            continue
        block = next((block for block in blocks if call.within(block.call)), None)
        position = _position(call, block, blocks, adding, bool(readers), call is final)
        index = None if block is None else block.index
        sites[call.name] = NormSite(call.name, call.module, law, position, index, readers)
    return FoundNorms(tuple(sites.values()), None if final is None else sites[final.name])


def _candidate(call: Call) -> bool:
    return bool(
        call.first_product == call.last_product
        and call.inputs
        and call.outputs
        and call.inputs[0].shape == call.outputs[0].shape
        and len(call.inputs[0].shape) >= 2
        and call.parent is not None
    )


def _readers(trace: Trace, call: Call, matrices: Iterable[WeightMatrix]) -> tuple[str, ...]:
    root = trace.root(call.outputs[0].storage)
    read = {p.contraction.weight.slab.name for p in trace.products if trace.root(p.activation.storage) == root}
    return tuple(matrix.name for matrix in matrices if matrix.parameter_name in read)


def _final_call(trace: Trace, norms: list[Call]) -> Call | None:
    """Return the last norm call that ends before the head's product, with no product in between."""
    last = len(trace.products) - 1
    late = [call for call in norms if call.last_product == last]
    return max(late, key=lambda call: call.ended, default=None)


def _position(
    call: Call,
    block: Block | None,
    blocks: tuple[Block, ...],
    adding: frozenset[str],
    has_readers: bool,
    is_final: bool,
) -> NormPosition:
    if block is None:
        if is_final:
            return "final"
        return "embedding" if not blocks or call.index < blocks[0].call.index else "post"
    if block.kind == "post" and of_stream_shape(call, block):
        return "post"
    if call.name in adding:
        return "sandwich"
    return "pre" if has_readers else "qk"
