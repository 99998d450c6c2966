"""From a trace to weight matrices: which parameters are contracted with an activation, and along which axis."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ternary_probe.anatomy._blocks import Block
from ternary_probe.anatomy._layout import Slab
from ternary_probe.anatomy._matrix import Axes, CallInput, WeightMatrix, role_of
from ternary_probe.anatomy._trace import Product, Trace


class Unhandled(NamedTuple):
    """Something of the model that cannot be handled, and why."""

    name: str
    reason: str


class Collected(NamedTuple):
    """The weight matrices of a model in execution order, and contracted parameters that could not be oriented."""

    matrices: tuple[WeightMatrix, ...]
    unhandled: tuple[Unhandled, ...]


@dataclass(slots=True)
class _Found:
    slab: Slab
    axes: Axes
    products: list[Product]
    order: int
    input_of: CallInput | None
    block: int | None
    visited: bool = True


def collect(model: nn.Module, trace: Trace, blocks: tuple[Block, ...]) -> Collected:
    """Find every weight matrix: one for each parameter, or for each member of a fused parameter.

    Args:
        model: The traced model.
        trace: Its recorded forward.
        blocks: Its blocks, as found in the same trace.

    Returns:
        Matrices in the order in which they first ran, tied storage once.
    """
    by_slab: dict[str, list[Product]] = defaultdict(list)
    order: dict[str, int] = {}
    for position, product in enumerate(trace.products):
        name = product.contraction.weight.slab.name
        by_slab[name].append(product)
        order.setdefault(name, position)
    found: list[_Found] = []
    unhandled: list[Unhandled] = []
    for name, products in by_slab.items():
        slab = products[0].contraction.weight.slab
        axes, why = _orient(slab, products)
        if axes is None:
            unhandled.append(Unhandled(name, why))
            continue
        found.append(_Found(slab, axes, products, order[name], _call_input(trace, products), _block(products, blocks)))
    found.extend(_unvisited_siblings(trace, found, blocks))
    found.sort(key=lambda entry: entry.order)
    matrices = [matrix for entry in found for matrix in _matrices(model, trace, entry)]
    return Collected(tuple(matrices), tuple(unhandled))


def _orient(slab: Slab, products: list[Product]) -> tuple[Axes | None, str]:
    """Return the parameter's axes, the input axis being the one whose stride is contracted; or why there is none."""
    answers = {_axes(slab, product) for product in products}
    if None in answers or len(slab.shape) not in {2, 3}:
        return None, f"it is contracted through a view of its shape {list(slab.shape)} that could not be followed"
    if len(answers) > 1:
        return None, "it is contracted along different axes in different places"
    axes = answers.pop()
    lengths = {product.contraction.in_features for product in products}
    if axes is None or lengths != {slab.shape[axes.input]}:
        return None, f"only parts of its input axis are contracted at a time ({sorted(lengths)})"
    return axes, ""


def _axes(slab: Slab, product: Product) -> Axes | None:
    contraction = product.contraction
    weight = contraction.weight
    taken: dict[str, int] = {}
    roles = {"input": contraction.input_axis, "output": contraction.output_axis, "group": contraction.group_axis}
    for role, axis in roles.items():
        if axis is None or weight.sizes[axis] == 1 or (role == "group" and weight.gathered):
            continue
        matching = [
            a
            for a, (n, s) in enumerate(zip(slab.shape, slab.strides, strict=True))
            if n > 1 and s == weight.strides[axis]
        ]
        if len(matching) != 1 or matching[0] in taken.values():
            return None
        taken[role] = matching[0]
        if weight.sizes[axis] > slab.shape[matching[0]]:
            return None  # several axes folded into one
    free = [axis for axis in range(len(slab.shape)) if axis not in taken.values()]
    # Axes of size 1 have no telling stride: they take the remaining places.
    for role in ("input", "output"):
        if role not in taken:
            candidates = [axis for axis in free if slab.shape[axis] == 1] or free
            if not candidates:
                return None
            taken[role] = candidates[-1]
            free.remove(taken[role])
    if not free:
        return Axes(taken["output"], taken["input"], taken.get("group"))
    if len(free) > 1 or "group" in taken:
        return None
    return Axes(taken["output"], taken["input"], free[0])


def _call_input(trace: Trace, products: list[Product]) -> CallInput | None:
    """Return the module whose input is the contracted activation, if that product is all it does with its input."""
    answers = set()
    for product in products:
        call = product.call
        owned = [key for key, _ in call.module.named_parameters(recurse=False)]
        slab = product.contraction.weight.slab
        names = {f"{call.name}.{key}" if call.name else key for key in owned}
        if not names & {slab.name, *slab.aliases} or not call.inputs or call.children:
            return None
        first, activation = call.inputs[0], product.activation
        same = first.storage in {activation.storage, trace.roots.get(activation.storage)}
        whole = (
            math.prod(first.shape) == math.prod(activation.shape) and first.shape[-1] == product.contraction.in_features
        )
        if not (same and whole) or call.operations_on_input != 1 or len(slab.shape) != 2:
            return None
        answers.add(CallInput(call.name, call.input_keys[0]))
    return answers.pop() if len(answers) == 1 else None


def _block(products: list[Product], blocks: tuple[Block, ...]) -> int | None:
    for block in blocks:
        if products[0].call.within(block.call):
            return block.index
    return None


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _unvisited_siblings(trace: Trace, found: list[_Found], blocks: tuple[Block, ...]) -> list[_Found]:
    """Return parameters no token reached (experts kept as modules), oriented like siblings of like name and shape."""
    known = {entry.slab.name for entry in found}
    like = {(_pattern(entry.slab.name), entry.slab.shape): entry for entry in found}
    result = []
    for slab in trace.weights.slabs:
        sibling = like.get((_pattern(slab.name), slab.shape))
        if slab.name in known or slab.name in trace.uses or sibling is None:
            continue
        owner = slab.name.rpartition(".")[0]
        block = next((b.index for b in blocks if owner.startswith(b.name + ".")), None)
        near = [e for e in found if _pattern(e.slab.name) == _pattern(slab.name) and e.block == block] or [sibling]
        input_of = None if sibling.input_of is None else CallInput(owner, sibling.input_of.key)
        result.append(_Found(slab, sibling.axes, [], near[-1].order, input_of, block, visited=False))
    return result


def _matrices(model: nn.Module, trace: Trace, entry: _Found) -> list[WeightMatrix]:
    slab, axes = entry.slab, entry.axes
    members = range(1 if axes.group is None else slab.shape[axes.group])
    rows: dict[int, int] = defaultdict(int)
    for product in entry.products:
        for member, seen in _rows_by_member(slab, axes, product):
            rows[member] += seen
    calls = len({product.call.index for product in entry.products})
    return [
        WeightMatrix(
            model=model,
            name=slab.name if axes.group is None else f"{slab.name}[{member}]",
            parameter_name=slab.name,
            aliases=tuple(alias if axes.group is None else f"{alias}[{member}]" for alias in slab.aliases),
            role=role_of(_used_name(entry)),
            block=entry.block,
            shape=(slab.shape[axes.output], slab.shape[axes.input]),
            axes=axes._replace(member=member),
            input_of=entry.input_of,
            also_lookup="lookup" in trace.uses.get(slab.name, ()),
            rows_seen=rows[member],
            shared_calls=max(calls, 1),
        )
        for member in members
    ]


def _used_name(entry: _Found) -> str:
    """Return the name under which a tied parameter is contracted, not the one under which it is looked up."""
    owners = {product.call.name for product in entry.products}
    names = (entry.slab.name, *entry.slab.aliases)
    return next((name for name in names if name.rpartition(".")[0] in owners), names[0])


def _rows_by_member(slab: Slab, axes: Axes, product: Product) -> list[tuple[int, int]]:
    if axes.group is None:
        return [(0, sum(product.rows_per_group))]
    weight = product.contraction.weight
    if weight.gathered:
        return []
    first = weight.offset // slab.strides[axes.group] if slab.shape[axes.group] > 1 else 0
    return [(first + position, rows) for position, rows in enumerate(product.rows_per_group)]
