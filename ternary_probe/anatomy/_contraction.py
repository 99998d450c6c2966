"""Matrix products of a weight with an activation, recognised at the level of the tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ternary_probe.anatomy._layout import Placed, WeightIndex


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product of a weight operand with an activation.

    Attributes:
        weight: Where the weight operand lies.
        input_axis: Axis of the weight operand that is summed over.
        output_axis: Its other axis; None for a single vector.
        group_axis: Axis along which the operand holds several matrices (experts), or None.
        activation: The other operand.
        argument: Its position among the operation's arguments.
        feature_axis: Axis of the activation that is summed over, counted from the end.
        group_ends: Ends of the activation's row groups, int ``[groups]``, for a grouped product.
    """

    weight: Placed
    input_axis: int
    output_axis: int | None
    group_axis: int | None
    activation: Tensor
    argument: int
    feature_axis: int = -1
    group_ends: Tensor | None = None

    @property
    def in_features(self) -> int:
        """Length of the contracted axis."""
        return self.weight.sizes[self.input_axis]

    def rows(self, group: int | None = None) -> Tensor:
        """Return the activation rows the weight is contracted with, ``[rows, in_features]``; a view where possible."""
        return self._part(self.activation, group).transpose(self.feature_axis, -1).reshape(-1, self.in_features)

    def scaled(self, activation: Tensor, columns: Tensor, factor: float, group: int | None) -> Tensor:
        """Return a copy of an activation with some features of one group multiplied by a factor."""
        result = activation.clone()
        part = self._part(result, group).transpose(self.feature_axis, -1)
        part[..., columns] = part[..., columns] * factor
        return result

    def _part(self, activation: Tensor, group: int | None) -> Tensor:
        if activation.dim() == 1:
            activation = activation.unsqueeze(0)
        if group is None or self.group_axis is None:
            return activation
        if self.group_ends is None:
            return activation[group]
        start = int(self.group_ends[group - 1]) if group else 0
        return activation[start : int(self.group_ends[group])]


# Operation name -> positions of the two operands. Names of tensor operations, never of models.
_PRODUCTS: dict[str, tuple[int, int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "matmul": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
}


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name of a dispatched operation without namespace and overload."""
    name: str = getattr(func, "__name__", str(func))
    return name.split(".", maxsplit=1)[0]


def is_tensor(value: object) -> bool:
    """Return whether a value is a floating-point tensor with storage."""
    return isinstance(value, Tensor) and value.is_floating_point()


def find_contractions(func: Callable[..., Any], args: tuple[Any, ...], weights: WeightIndex) -> Iterator[Contraction]:
    """Yield the weight-activation products an operation performs (none for two activations or two weights)."""
    name = operation_name(func)
    if name == "linear" and _kinds(args[0], args[1], weights) == (False, True):
        placed = weights.place(args[1])
        if placed is not None:
            yield Contraction(placed, 1, 0 if args[1].dim() == 2 else None, None, args[0], 0)
    elif name in _PRODUCTS:
        yield from _product(args, *_PRODUCTS[name], weights)
    elif is_grouped(args):
        kinds = _kinds(args[0], args[1], weights)
        placed = weights.place(args[1]) if kinds == (False, True) else None
        if placed is not None:
            yield Contraction(placed, 1, 2, 0, args[0], 0, group_ends=args[2])


def is_product(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a matrix product."""
    name = operation_name(func)
    return name == "linear" or name in _PRODUCTS or is_grouped(args)


def is_grouped(args: tuple[Any, ...]) -> bool:
    """Return whether operands are those of a grouped product: ``[s, in]``, ``[g, in, out]``, integer ends ``[g]``."""
    if len(args) < 3 or not all(isinstance(value, Tensor) for value in args[:3]):
        return False
    rows, weight, ends = args[:3]
    return bool(
        rows.dim() == 2
        and weight.dim() == 3
        and ends.dim() == 1
        and ends.dtype in {torch.int32, torch.int64}
        and rows.shape[1] == weight.shape[1]
        and ends.shape[0] == weight.shape[0]
    )


def _kinds(left: Tensor, right: Tensor, weights: WeightIndex) -> tuple[bool, bool]:
    return weights.is_weight(left), weights.is_weight(right)


def _product(args: tuple[Any, ...], left: int, right: int, weights: WeightIndex) -> Iterator[Contraction]:
    first, second = args[left], args[right]
    kinds = _kinds(first, second, weights)
    if kinds == (False, True):
        placed, activation, argument = weights.place(second), first, left
        if placed is None:
            return
        if second.dim() == 1:
            yield Contraction(placed, 0, None, None, activation, argument)
        elif second.dim() == 2:
            yield Contraction(placed, 0, 1, None, activation, argument)
        elif second.dim() == 3 and first.dim() == 3:
            yield Contraction(placed, 1, 2, _groups(placed), activation, argument)
    elif kinds == (True, False):
        placed, activation, argument = weights.place(first), second, right
        if placed is None:
            return
        feature = -1 if second.dim() == 1 else -2
        if first.dim() == 1:
            yield Contraction(placed, 0, None, None, activation, argument, feature)
        elif first.dim() == 2:
            yield Contraction(placed, 1, 0, None, activation, argument, feature)
        elif first.dim() == 3 and second.dim() == 3:
            yield Contraction(placed, 2, 1, _groups(placed), activation, argument, feature)


def _groups(placed: Placed) -> int | None:
    """Return the batch axis of a batched product, or None where one matrix is repeated for every batch entry."""
    return 0 if placed.gathered or placed.sizes[0] == 1 or placed.strides[0] != 0 else None
