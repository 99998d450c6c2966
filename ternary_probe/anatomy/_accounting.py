"""Where every parameter of a model went: nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from ternary_probe.anatomy._collect import Unhandled
from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._norms import NormSite
from ternary_probe.anatomy._trace import Trace

ParameterClass = Literal["matrix", "lookup", "norm", "bias", "elementwise", "convolution", "unused", "unknown"]


@dataclass(frozen=True, slots=True)
class Accounted:
    """Every distinct parameter by what it is used for.

    Attributes:
        names: Class -> parameter names. ``matrix``: contracted with an activation; ``lookup``: a table read by index
            and nothing else; ``norm``: gain or bias of a norm; ``bias``; ``elementwise``; ``convolution``: a kernel;
            ``unused``: not reached in the recorded forward; ``unknown``: used in a way that was not understood.
        numel: Class -> number of entries.
    """

    names: Mapping[ParameterClass, tuple[str, ...]]
    numel: Mapping[ParameterClass, int]

    @property
    def total(self) -> int:
        """Number of parameters, tied storage once."""
        return sum(self.numel.values())

    @property
    def fraction(self) -> float:
        """Share of the parameters of which the use is known (``unused`` is known)."""
        return 1 - self.numel["unknown"] / self.total if self.total else 1.0


def account(
    model: nn.Module,
    trace: Trace,
    matrices: Iterable[WeightMatrix],
    norms: Iterable[NormSite],
    unhandled: Iterable[Unhandled],
) -> Accounted:
    """Sort the parameters by use.

    Args:
        model: The model.
        trace: Its recorded forward.
        matrices: The weight matrices found.
        norms: The norms found.
        unhandled: Parameters that were contracted but could not be oriented.

    Returns:
        The account.
    """
    contracted = {matrix.parameter_name for matrix in matrices}
    in_norms = {name for site in norms for name in site.parameters()}
    lost = {entry.name for entry in unhandled}
    names: dict[ParameterClass, list[str]] = {kind: [] for kind in get_args(ParameterClass)}
    numel: dict[ParameterClass, int] = dict.fromkeys(get_args(ParameterClass), 0)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    slabs = {name for slab in trace.weights.slabs for name in (slab.name, *slab.aliases)}
    for slab in trace.weights.slabs:
        kind = _class(slab.name, slab.aliases, contracted, in_norms, lost, trace.uses.get(slab.name, []))
        if kind == "unknown" and len(slab.shape) < 2 and tensors[slab.name].is_floating_point():
            kind = "elementwise"  # a vector that is no gain and no bias; certainly no matrix
        names[kind].append(slab.name)
        numel[kind] += tensors[slab.name].numel()
    for name in tensors.keys() - slabs:
        names["unknown"].append(name)
        numel["unknown"] += tensors[name].numel()
    return Accounted({kind: tuple(found) for kind, found in names.items()}, numel)


def _class(
    name: str,
    aliases: tuple[str, ...],
    contracted: set[str],
    in_norms: set[str],
    lost: set[str],
    uses: list[str],
) -> ParameterClass:
    if name in contracted:
        return "matrix"
    if name in lost:
        return "unknown"
    if {name, *aliases} & in_norms:
        return "norm"
    if not uses:
        return "unused"
    if set(uses) == {"lookup"}:
        return "lookup"
    for kind in ("bias", "convolution", "elementwise"):
        if uses[0] == kind:
            return kind
    return "unknown"


def unhandled_parameters(model: nn.Module, trace: Trace, accounted: Accounted) -> list[Unhandled]:
    """List the parameters that perturbations of weight matrices cannot touch, with the reason.

    Args:
        model: The model.
        trace: Its recorded forward.
        accounted: The account of its parameters.

    Returns:
        Name and reason of each.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    reasons: list[Unhandled] = []
    for kind, words in (
        ("convolution", "it is a convolution kernel, not a matrix"),
        ("unused", "no token reached it in the recorded forward"),
        ("unknown", ""),
    ):
        for name in accounted.names[kind]:  # type: ignore[index]
            if not tensors[name].is_floating_point():
                dtype = str(tensors[name].dtype).removeprefix("torch.")
                reasons.append(Unhandled(name, f"it is stored as {dtype}: dequantize the model first"))
            else:
                met = ", ".join(dict.fromkeys(trace.uses.get(name, []))) or "nothing"
                reasons.append(Unhandled(name, words or f"it met an activation in: {met}"))
    return reasons
