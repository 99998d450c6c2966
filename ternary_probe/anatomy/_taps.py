"""Watching and changing what a matrix is contracted with, at the module where that is enough, at the product where not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ternary_probe.anatomy._contraction import Contraction, find_contractions, operation_name
from ternary_probe.anatomy._layout import WeightIndex
from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._trace import following_experts, tensors_in
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy._anatomy import Anatomy

Callback = Callable[[WeightMatrix, Tensor], object]


class InputError(ProbeError):
    """The input of a matrix cannot be changed the way that was asked for."""


@contextmanager
def tap_inputs(anatomy: Anatomy, matrices: Iterable[WeightMatrix], callback: Callback) -> Iterator[None]:
    """Call back with every activation the matrices are contracted with, during any forward inside the context.

    Args:
        anatomy: The model's anatomy.
        matrices: The matrices to watch.
        callback: Called as ``callback(matrix, x)``, x ``[rows, in_features]`` in the activation's dtype; for an
            expert only the rows routed to it, and not at all where there are none. x is the live activation: do not
            write to it.

    Yields:
        Nothing; watch inside the context.
    """
    chosen = list(matrices)
    at_modules: dict[tuple[str, int | str], list[WeightMatrix]] = defaultdict(list)
    for matrix in chosen:
        if matrix.input_of is not None:
            at_modules[matrix.input_of].append(matrix)
    at_products = [matrix for matrix in chosen if matrix.input_of is None]

    def tap(read: tuple[str, int | str], watchers: list[WeightMatrix]) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = _argument(args, kwargs, read[1]).detach()
            for matrix in watchers:
                callback(matrix, x.reshape(-1, matrix.in_features))

        return hook

    with ExitStack() as stack:
        for read, watchers in at_modules.items():
            module = anatomy.model.get_submodule(read[0])
            handle = module.register_forward_pre_hook(tap(read, watchers), with_kwargs=True)
            stack.callback(handle.remove)
        if at_products:
            stack.enter_context(following_experts(anatomy.model))
            stack.enter_context(_Products(anatomy.model, at_products, watch=callback))
        yield


@contextmanager
def scale_inputs(anatomy: Anatomy, columns: Mapping[str, Tensor], factor: float) -> Iterator[None]:
    """Multiply some input features of some matrices by a factor, for every row of any forward inside the context.

    No weight is touched, so it serves any storage; each matrix sees its own scaled copy, other readers of the same
    activation do not.

    Args:
        anatomy: The model's anatomy.
        columns: Matrix name -> input columns, int64 ``[k]``.
        factor: The factor.

    Yields:
        Nothing; run forwards inside the context.
    """
    chosen = {anatomy.matrix(name): torch.as_tensor(picked, dtype=torch.long) for name, picked in columns.items()}
    at_products = {matrix: picked for matrix, picked in chosen.items() if matrix.input_of is None}

    def scale(matrix: WeightMatrix, key: int | str) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = _argument(args, kwargs, key)
            signs = torch.ones(matrix.in_features, dtype=x.dtype, device=x.device)
            signs[chosen[matrix].to(x.device)] = factor
            if isinstance(key, str):
                return args, kwargs | {key: x * signs}
            return (*args[:key], x * signs, *args[key + 1 :]), kwargs

        return hook

    with ExitStack() as stack:
        for matrix in chosen:
            if matrix.input_of is None:
                continue
            module = anatomy.model.get_submodule(matrix.input_of.module_name)
            handle = module.register_forward_pre_hook(scale(matrix, matrix.input_of.key), with_kwargs=True)
            stack.callback(handle.remove)
        if at_products:
            stack.enter_context(following_experts(anatomy.model))
            stack.enter_context(_Products(anatomy.model, at_products, scale=at_products, factor=factor))
        yield


@contextmanager
def negate_inputs(anatomy: Anatomy, columns: Mapping[str, Tensor]) -> Iterator[None]:
    """Negate some input features of some matrices: the same function as with the signs of those whole columns flipped.

    Args:
        anatomy: The model's anatomy.
        columns: Matrix name -> input columns, int64 ``[k]``.

    Yields:
        Nothing; run forwards inside the context.

    Raises:
        InputError: If a matrix is also read as an embedding table: flipping its column would change the embeddings too.
    """
    for name in columns:
        if anatomy.matrix(name).also_lookup:
            raise InputError(
                f"{name} is also the embedding table: negating its input is not the same as flipping its column, "
                "flip the column itself"
            )
    with scale_inputs(anatomy, columns, -1.0):
        yield


@contextmanager
def negate_each(anatomy: Anatomy, matrix: WeightMatrix, columns: Sequence[int | None]) -> Iterator[None]:
    """Negate one input feature in each batch entry: many whole-column flips in one forward.

    Args:
        anatomy: The model's anatomy.
        matrix: The matrix whose input it is.
        columns: A column for each of equal parts of the batch, in order; ``None`` leaves a part as it is.

    Yields:
        Nothing; run forwards of a batch that divides into ``len(columns)`` parts inside the context.

    Raises:
        InputError: If the matrix is also an embedding table, or its input cannot be told batch entry from batch entry.
    """
    if matrix.also_lookup:
        raise InputError(f"{matrix.name} is also the embedding table: flip the column itself")
    if matrix.input_of is None:
        raise InputError(f"the input of {matrix.name} is only seen at the product, where batch entries are not apart")
    key = matrix.input_of.key

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = _argument(args, kwargs, key)
        if x.shape[-1] != matrix.in_features or x.numel() // matrix.in_features % len(columns):
            raise InputError(
                f"the input of {matrix.name}, {list(x.shape)}, does not divide into {len(columns)} batch entries"
            )
        signs = torch.ones((len(columns), 1, matrix.in_features), dtype=x.dtype, device=x.device)
        for part, column in enumerate(columns):
            if column is not None:
                signs[part, 0, column] = -1
        # Batch entries come first in memory, flattened into rows or not.
        changed = (x.reshape(len(columns), -1, matrix.in_features) * signs).reshape(x.shape)
        if isinstance(key, str):
            return args, kwargs | {key: changed}
        return (*args[:key], changed, *args[key + 1 :]), kwargs

    module = anatomy.model.get_submodule(matrix.input_of.module_name)
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str) -> Tensor:
    """Fetch the tapped argument, also where this call passes by position what the recorded one passed by keyword."""
    if isinstance(key, str):
        if key in kwargs:
            return kwargs[key]  # type: ignore[no-any-return]
        raise InputError(f"argument {key!r} of the recorded call is missing in this one: examine the model again")
    if key < len(args):
        return args[key]  # type: ignore[no-any-return]
    raise InputError(f"argument {key} of the recorded call is missing in this one: examine the model again")


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches or scales the activations of products with chosen matrices."""

    def __init__(
        self,
        model: nn.Module,
        matrices: Iterable[WeightMatrix],
        *,
        watch: Callback | None = None,
        scale: Mapping[WeightMatrix, Tensor] | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = WeightIndex(model)
        self._chosen: dict[str, dict[int, WeightMatrix]] = defaultdict(dict)
        for matrix in matrices:
            self._chosen[matrix.parameter_name][matrix.axes.member] = matrix
        self._watch = watch
        self._scale = scale or {}
        self._factor = factor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs or {}))]
        weights = [tensor for tensor in tensors if self._weights.is_weight(tensor)]
        if not weights:
            return func(*args, **(kwargs or {}))
        for contraction in find_contractions(func, args, self._weights):
            args = self._met(contraction, args)
        result = func(*args, **(kwargs or {}))
        if len(weights) == len(tensors) and operation_name(func) != "embedding":
            for _, output in tensors_in(result):
                self._weights.derive(output, weights)
            self._weights.forget_dead()
        return result

    def _met(self, contraction: Contraction, args: tuple[Any, ...]) -> tuple[Any, ...]:
        activation = contraction.activation
        for matrix, group in self._matrices(contraction):
            if self._watch is not None:
                rows = contraction.rows(group).detach()
                if rows.shape[0]:
                    self._watch(matrix, rows)
            elif matrix in self._scale:
                if torch.is_grad_enabled() and activation.requires_grad:
                    raise InputError(
                        f"the input of {matrix.name} can only be changed below autograd: "
                        "run the forward under torch.no_grad()"
                    )
                columns = self._scale[matrix].to(activation.device)
                activation = contraction.scaled(activation, columns, self._factor, group)
        if activation is contraction.activation:
            return args
        position = contraction.argument
        return (*args[:position], activation, *args[position + 1 :])

    def _matrices(self, contraction: Contraction) -> Iterator[tuple[WeightMatrix, int | None]]:
        """Yield the chosen matrices an operand holds, each with its group in the operand."""
        weight = contraction.weight
        chosen = self._chosen.get(weight.slab.name)
        if not chosen:
            return
        axes = next(iter(chosen.values())).axes
        if axes.group is None:
            yield chosen[0], None
            return
        if weight.gathered:
            raise InputError(
                f"{weight.slab.name} is copied for every token before the product: choose the 'eager' or 'grouped_mm' experts"
            )
        step = weight.slab.strides[axes.group]
        first = weight.offset // step if weight.slab.shape[axes.group] > 1 else 0
        groups = 1 if contraction.group_axis is None else weight.sizes[contraction.group_axis]
        for group in range(groups):
            if first + group in chosen:
                yield chosen[first + group], None if contraction.group_axis is None else group
