"""One recorded forward: the tree of module calls, every product with a weight, and what each parameter met first."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ternary_probe.anatomy._contraction import Contraction, find_contractions, is_product, operation_name
from ternary_probe.anatomy._layout import WeightIndex, hold, storage_key

_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "_embedding_bag"})
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "alias", "detach", "index", "index_select"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor handed to or returned by a module: its identity (object and storage) and shape, without its data."""

    serial: int
    storage: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class Call:
    """One call of one module.

    Attributes:
        name: Qualified name of the module ("" for the model itself).
        module: The module.
        index: Position in the order in which calls begin.
        parent: The call it was made in.
        inputs: Floating tensors among its arguments, in order; `input_keys` says where each stood.
        input_keys: Position, or keyword, of each input.
        outputs: Floating tensors it returned.
        first_product: Number of products seen before it began.
        last_product: Number of products seen when it ended.
        ended: Position in the order in which calls end.
    """

    name: str
    module: nn.Module
    index: int
    parent: Call | None
    inputs: tuple[Seen, ...] = ()
    input_keys: tuple[int | str, ...] = ()
    outputs: tuple[Seen, ...] = ()
    first_product: int = 0
    last_product: int = 0
    ended: int = -1
    children: list[Call] = field(default_factory=list)
    operations_on_input: int = 0

    def within(self, other: Call) -> bool:
        """Return whether this call is `other` or happened inside it."""
        call: Call | None = self
        while call is not None:
            if call is other:
                return True
            call = call.parent
        return False


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction that happened, with the call it happened in and the storage of its activation."""

    contraction: Contraction
    call: Call
    activation: Seen
    rows_per_group: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """What one forward showed.

    Attributes:
        calls: Every module call, in the order in which they began; the first is the model's.
        products: Every product of a weight with an activation, in order.
        uses: Parameter name -> the kinds of operation in which it met an activation, in order.
        logits: The model's logits, float, ``[batch, tokens, vocabulary]``.
        roots: Storage -> the storage it is a plain copy of.
        weights: The index that located the parameters.
        gathered: Parameters of which single matrices were copied out by index before the product.
        switched_experts: The experts ran in another implementation than the model's own.
    """

    calls: list[Call]
    products: list[Product]
    uses: dict[str, list[str]]
    logits: Tensor
    roots: dict[int, int]
    weights: WeightIndex
    gathered: set[str]
    switched_experts: bool = False

    def root(self, storage: int) -> int:
        """Return the storage that plain copies (casts, clones, gathered rows) came from."""
        while storage in self.roots:
            storage = self.roots[storage]
        return storage


def record(model: nn.Module, input_ids: Tensor) -> Trace:
    """Run one forward and record it.

    Args:
        model: The model; its parameters are only read.
        input_ids: Token ids, ``[batch, tokens]``.

    Returns:
        The trace; it holds no activation but the logits.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())  # in inference mode products would arrive undecomposed
        switched = stack.enter_context(following_experts(model))
        stack.enter_context(recorder.hooked())
        stack.enter_context(recorder)
        output = model(input_ids, **call_options(model))
    trace = recorder.trace(logits_of(output))
    trace.switched_experts = switched
    return trace


def logits_of(output: Any) -> Tensor:
    """Return the logits of a causal language model's output: its `logits`, or its first tensor."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else next(tensors_in(output))[1]


def call_options(model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of a plain forward: no key-value cache where the model takes that option."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def following_experts(model: nn.Module) -> Iterator[bool]:
    """Run fused experts in an implementation whose products still act on the stored weights.

    Some implementations copy, for every token, the matrices of its experts; products with such copies cannot be
    traced back. Where the model offers the choice, the plain loop over experts is used instead, and the choice is
    put back on exit.

    Args:
        model: The model.

    Yields:
        Whether the implementation was switched.
    """
    chosen = getattr(getattr(model, "config", None), "_experts_implementation", None)
    switch = getattr(model, "set_experts_implementation", None)
    if switch is None or chosen in {None, "eager", "grouped_mm"}:
        yield False
        return
    switch("eager")
    try:
        yield True
    finally:
        switch(chosen)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._weights = WeightIndex(model)
        self._calls: list[Call] = []
        self._stack: list[Call] = []
        self._ended = 0
        self._products: list[Product] = []
        self._uses: dict[str, list[str]] = {}
        self._activations: dict[int, StorageWeakRef] = {}
        self._roots: dict[int, int] = {}
        self._gathered: set[str] = set()
        self._serials: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._count = 0

    def trace(self, logits: Tensor) -> Trace:
        return Trace(self._calls, self._products, self._uses, logits, self._roots, self._weights, self._gathered)

    # --- module calls -------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            parent = self._stack[-1] if self._stack else None
            call = Call(name, module, len(self._calls), parent, first_product=len(self._products))
            found = [*_keyed(enumerate(args)), *_keyed(kwargs.items())]
            call.inputs = tuple(self._seen(tensor) for _, tensor in found)
            call.input_keys = tuple(key for key, _ in found)
            if parent is not None:
                parent.children.append(call)
            self._calls.append(call)
            self._stack.append(call)

        return hook

    def _leave(self, _module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        call = self._stack.pop()
        call.outputs = tuple(self._seen(tensor) for _, tensor in tensors_in(output))
        call.last_product = len(self._products)
        call.ended = self._ended
        self._ended += 1

    def _seen(self, tensor: Tensor) -> Seen:
        known = self._serials.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._count += 1
            known = self._serials[id(tensor)] = (weakref.ref(tensor), self._count)
        return Seen(known[1], self._key(tensor), tuple(tensor.shape))

    def _key(self, tensor: Tensor) -> int:
        """Return the storage's identity and hold a weak reference, so that it stays unique for the whole trace."""
        key = storage_key(tensor)
        if key not in self._activations and not self._weights.is_weight(tensor):
            self._activations[key] = hold(tensor)
        return key

    # --- tensor operations --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs or {}))]
        weights = [tensor for tensor in tensors if self._weights.is_weight(tensor)]
        contractions = list(find_contractions(func, args, self._weights)) if weights else []
        self._count_input_use(func, tensors)
        result = func(*args, **(kwargs or {}))
        for contraction in contractions:
            self._note_product(contraction)
        if weights:
            self._note_use(func, args, tensors, weights, result, contracted=bool(contractions))
        else:
            self._note_copy(func, tensors, result)
        return result

    def _note_product(self, contraction: Contraction) -> None:
        groups = contraction.weight.sizes[contraction.group_axis] if contraction.group_axis is not None else 1
        rows = tuple(contraction.rows(group).shape[0] for group in range(groups))
        activation = self._seen(contraction.activation)
        # The tensors are dropped: a trace must not keep activations alive.
        kept = Contraction(
            contraction.weight,
            contraction.input_axis,
            contraction.output_axis,
            contraction.group_axis,
            contraction.activation.new_empty(0),
            contraction.argument,
            contraction.feature_axis,
        )
        self._products.append(Product(kept, self._stack[-1], activation, rows))
        if contraction.weight.gathered:
            self._gathered.add(contraction.weight.slab.name)

    def _note_use(
        self,
        func: Any,
        args: tuple[Any, ...],
        tensors: list[Tensor],
        weights: list[Tensor],
        result: Any,
        *,
        contracted: bool,
    ) -> None:
        others = [tensor for tensor in tensors if not self._weights.is_weight(tensor)]
        met = [tensor for tensor in others if storage_key(tensor) in self._activations] or (
            others if contracted else []
        )
        outputs = [tensor for _, tensor in tensors_in(result)]
        lookup = operation_name(func) in _LOOKUPS and not others
        gathered = lookup and weights[0].dim() >= 3
        if not met and not (lookup and not gathered):
            for output in outputs:
                if not any(output is weight for weight in weights):
                    self._weights.derive(output, weights, gathered=gathered)
            return
        for weight in weights:
            for name in self._weights.names(weight):
                self._uses.setdefault(name, []).append(_kind_of_use(func, args, weight, lookup, contracted))
        for output in outputs:
            self._key(output)

    def _note_copy(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        if not any(storage_key(tensor) in self._activations for tensor in tensors):
            return
        name = operation_name(func)
        for _, output in tensors_in(result):
            key = self._key(output)
            source = storage_key(tensors[0])
            if len(tensors) == 1 and key != source and name in _COPIES and output.shape[-1:] == tensors[0].shape[-1:]:
                self._roots.setdefault(key, source)

    def _count_input_use(self, func: Any, tensors: list[Tensor]) -> None:
        """Count the operations of the innermost call that read its first input: views and shape queries aside."""
        if not self._stack or not self._stack[-1].inputs or _is_view(func):
            return
        call = self._stack[-1]
        if any(storage_key(tensor) == call.inputs[0].storage for tensor in tensors):
            call.operations_on_input += 1


def _kind_of_use(func: Any, args: tuple[Any, ...], weight: Tensor, lookup: bool, contracted: bool) -> str:
    name = operation_name(func)
    if contracted:
        return "bias" if args[0] is weight and name.startswith(("addmm", "_addmm", "baddbmm", "addmv")) else "matrix"
    if lookup:
        return "lookup"
    if "conv" in name:
        return "convolution"
    if name in {"add", "add_", "sub", "sub_"}:
        return "bias"
    if is_product(func, args):
        return "unfollowed product"
    if "norm" in name or torch.Tag.pointwise in func.tags or weight.dim() == 1:
        return "elementwise"
    return f"operation {name}"


def _is_view(func: Any) -> bool:
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in func._schema.returns)


def _keyed(pairs: Any) -> Iterator[tuple[int | str, Tensor]]:
    for key, value in pairs:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield key, value
        elif isinstance(value, (list, tuple)):
            yield from ((key, tensor) for _, tensor in tensors_in(value))


def tensors_in(value: Any) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """Yield the floating tensors in nested tuples, lists and dicts with their paths."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield (), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            for path, tensor in tensors_in(item):
                yield (key, *path), tensor
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            for path, tensor in tensors_in(item):
                yield (position, *path), tensor
