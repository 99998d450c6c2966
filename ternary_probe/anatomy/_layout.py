"""Where a tensor lies inside a parameter: followed through views, casts and scalings by strides, not by names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Slab:
    """One parameter's stretch of storage; every name that shares it is an alias.

    Attributes:
        name: First qualified name, as `named_parameters` gives it.
        aliases: The other names of the same storage.
        shape: Parameter shape.
        strides: Parameter strides, in elements.
        start: Offset of the first element in the storage.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def span(self) -> int:
        """Elements between the first and one past the last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor found to be (a copy of) a part of a parameter.

    Attributes:
        slab: The parameter.
        offset: Elements from the parameter's first to the tensor's first.
        sizes: The tensor's sizes.
        strides: For each of the tensor's axes the step it makes *in the parameter*; 0 where the size is 1.
        gathered: The leading axis was picked by an index, so `offset` says nothing.
    """

    slab: Slab
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    gathered: bool = False


@dataclass(frozen=True, slots=True)
class _Derived:
    reference: StorageWeakRef  # held, so that the address cannot be given to another storage
    source: Placed | None  # None: made from weights in a way that could not be followed
    names: tuple[str, ...]
    strides: tuple[int, ...]


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; unique while the storage, or a weak reference to it, is held."""
    return int(tensor.untyped_storage()._cdata)


def hold(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage: while it is held, no other storage gets the same key."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def has_died(reference: StorageWeakRef) -> bool:
    """Return whether the storage of a weak reference is gone."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


class WeightIndex:
    """Finds the parameter behind any tensor of a running forward."""

    def __init__(self, model: nn.Module) -> None:
        self._slabs: dict[int, list[Slab]] = {}
        self._derived: dict[int, _Derived] = {}
        # A forward may give a parameter new storage (bitsandbytes repacks on its first call); an activation must not then
        # be taken for the weight whose address it got.
        self._held: list[StorageWeakRef] = []
        found: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tensor = parameter.detach()
            if tensor.device.type == "meta" or tensor.numel() == 0:
                continue
            self._held.append(hold(tensor))
            place = (storage_key(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            found.setdefault(place, []).append(name)
        for (key, start, shape, strides), names in found.items():
            slab = Slab(names[0], tuple(names[1:]), shape, strides, start)
            self._slabs.setdefault(key, []).append(slab)

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """Every distinct parameter, in definition order."""
        return tuple(slab for slabs in self._slabs.values() for slab in slabs)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, a view of one, or made from parameters only."""
        key = storage_key(tensor)
        return key in self._slabs or key in self._derived

    def names(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the parameters a weight-like tensor was made from."""
        key = storage_key(tensor)
        if key in self._derived:
            return self._derived[key].names
        return tuple(slab.name for slab in self._owners(key, tensor))

    def place(self, tensor: Tensor) -> Placed | None:
        """Return where a tensor lies in its parameter, or None where that cannot be followed."""
        key = storage_key(tensor)
        derived = self._derived.get(key)
        if derived is not None:
            return None if derived.source is None else _translate(tensor, derived.source, derived.strides)
        owners = self._owners(key, tensor)
        if len(owners) != 1:
            return None
        strides = tuple(s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return Placed(owners[0], int(tensor.storage_offset()) - owners[0].start, tuple(tensor.shape), strides)

    def derive(self, result: Tensor, sources: Iterable[Tensor], *, gathered: bool = False) -> None:
        """Record that a tensor was computed from weights alone (a cast, a scaling, a gather along the first axis)."""
        sources = list(sources)
        key = storage_key(result)
        if key in self._slabs or key in self._derived:
            return
        names = tuple(dict.fromkeys(name for source in sources for name in self.names(source)))
        like = [source for source in sources if source.shape == result.shape or gathered]
        placed = self.place(like[0]) if len(like) == 1 else None
        if placed is not None and gathered:
            sizes = tuple(result.shape[-len(placed.sizes) :])
            placed = Placed(placed.slab, 0, sizes, (0, *placed.strides[1:]), gathered=True)
        self._derived[key] = _Derived(hold(result), placed, names, result.stride())

    def forget_dead(self) -> None:
        """Drop what was recorded of storages that are gone."""
        self._derived = {key: entry for key, entry in self._derived.items() if not has_died(entry.reference)}

    def _owners(self, key: int, tensor: Tensor) -> list[Slab]:
        slabs = self._slabs.get(key, [])
        if len(slabs) <= 1:
            return slabs
        offset = tensor.storage_offset()
        return [slab for slab in slabs if slab.start <= offset < slab.start + slab.span]


def _translate(tensor: Tensor, source: Placed, layout: tuple[int, ...]) -> Placed | None:
    """Return the place of a view of a copy in the parameter that was copied; None if its strides do not tell."""
    steps = {
        copied: original
        for size, copied, original in zip(source.sizes, layout[-len(source.sizes) :], source.strides, strict=True)
        if size > 1
    }
    strides = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            strides.append(0)
        elif stride in steps:
            strides.append(steps[stride])
        else:
            return None
    offset, rest = source.offset, tensor.storage_offset()
    for copied in sorted(steps, reverse=True):
        offset += rest // copied * steps[copied]
        rest %= copied
    return Placed(source.slab, offset, tuple(tensor.shape), tuple(strides), gathered=source.gathered)
