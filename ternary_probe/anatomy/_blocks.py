"""Blocks of a model: the outermost chain of calls in which each hands its output to the next."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from torch import nn

from ternary_probe.anatomy._trace import Call, Trace

SkipKind = Literal["pre", "post", "sandwich", "parallel", "scaled", "none", "not measurable"]

# A container counts as the stack of blocks from this share of the executed products on.
_MINIMAL_SHARE = 0.05


@dataclass(slots=True)
class Block:
    """One call of one block.

    Attributes:
        index: Position in execution order; a block that runs twice has two.
        name: Qualified name of its module.
        module: The module.
        call: The recorded call.
        kind: How it adds to the residual stream; set by `skips.classify`.
        skip: Measured coefficient of the block's input in its output, or None.
        reason: Why `kind` is what it is, where that needs words.
    """

    index: int
    name: str
    module: nn.Module
    call: Call = field(repr=False)
    kind: SkipKind = "not measurable"
    skip: float | None = None
    reason: str = "not probed"


def find_blocks(trace: Trace) -> tuple[Block, ...]:
    """Find the blocks in a trace.

    The members of one registered container form the stack of blocks if at least two of them were called, each
    mapping a tensor to one of the same shape, if at least half of the calls receive the very object the one before
    returned, and if at least 5 % of the products with weights happen inside them. Of several such containers the
    outermost is taken.

    Args:
        trace: A recorded forward.

    Returns:
        Blocks in execution order; empty if there is no such chain.
    """
    members: dict[str, list[Call]] = defaultdict(list)
    for call in trace.calls:
        container, _, last = call.name.rpartition(".")
        if last and _keeps_shape(call) and call.last_product > call.first_product:
            members[container].append(call)
    stacks = {container: calls for container, calls in members.items() if _is_stack(calls, len(trace.products))}
    if not stacks:
        return ()
    container = min(stacks, key=lambda name: (len(name.split(".")) if name else 0, -_products(stacks[name])))
    return tuple(Block(index, call.name, call.module, call) for index, call in enumerate(stacks[container]))


def _keeps_shape(call: Call) -> bool:
    return bool(call.inputs and call.outputs and call.inputs[0].shape == call.outputs[0].shape)


def _products(calls: list[Call]) -> int:
    return sum(call.last_product - call.first_product for call in calls)


def _is_stack(calls: list[Call], products: int) -> bool:
    if len(calls) < 2 or _products(calls) < _MINIMAL_SHARE * products:
        return False
    links = sum(before.outputs[0].serial in {seen.serial for seen in after.inputs} for before, after in pairwise(calls))
    return links >= (len(calls) - 1) / 2


def of_stream_shape(call: Call, block: Block) -> bool:
    """Return whether a call's input has as many entries and features as the block's (tokens may be flattened)."""
    ours, theirs = call.inputs[0].shape, block.call.inputs[0].shape
    return math.prod(ours) == math.prod(theirs) and ours[-1] == theirs[-1]
