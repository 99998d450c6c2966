"""Which tensors should there be? No table of architectures says: blocks are compared with their like."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ternary_probe.safetensors_header import TensorEntry

Blocks = Mapping[int, Mapping[str, "TensorEntry"]]

_NUMBER = re.compile(r"(?<![^.])(\d+)(?=\.)")


class Irregularity(NamedTuple):
    """A block that differs from its like.

    Attributes:
        kind: ``lacks``, ``adds`` or ``shape``.
        certain: Whether no healthy architecture is known to look like that.
        where: The block, ``prefix.number``.
        tensors: Full names of the tensors concerned.
        detail: The shapes, for ``shape``.
    """

    kind: Literal["lacks", "adds", "shape"]
    certain: bool
    where: str
    tensors: tuple[str, ...]
    detail: str = ""


def irregularities(prefix: str, blocks: Blocks, rare_share: float) -> Iterator[Irregularity]:
    """Find blocks that lack, add or reshape tensors in comparison with a commoner kind of block.

    Kinds of block may alternate (hybrid and expert models), so a rare kind is judged only where it is another kind less, or
    more, some tensors. Of two blocks it is not known which is right. A first block without some vectors is known from
    healthy models (ModernBERT's first norm is the embedding's), one without a matrix is not. Numbered parts of a block
    (experts) are compared with each other where their block raised no suspicion.

    Args:
        prefix: What the numbers count, such as ``model.layers``.
        blocks: Entries by name within the block, by number.
        rare_share: Kinds of at most this share of blocks (or a single one) are rare.

    Yields:
        What is irregular.
    """
    kinds = Counter(frozenset(block) for block in blocks.values())
    most = max(1, int(rare_share * len(blocks)))
    suspected: set[int] = set()
    for kind, count in kinds.items():
        like = [number for number, block in blocks.items() if frozenset(block) == kind]
        rare = count <= most
        commoner = [other for other, times in kinds.items() if times > count or (len(blocks) == 2 and times == count)]
        larger = [other for other in commoner if kind < other]
        smaller = [other for other in commoner if kind > other and len(blocks) > 2]
        if rare and larger:
            model = min(larger, key=len)
            lacking = sorted(model - kind)
            example = next(block for block in blocks.values() if frozenset(block) == model)
            vectors = all(len(example[name].shape) < 2 for name in lacking)
            certain = len(blocks) > 2 and not (min(like) == 0 and vectors)
            for number in like:
                yield Irregularity("lacks", certain, _join(prefix, number), _full(prefix, number, lacking))
            suspected.update(like)
        elif rare and smaller:
            extra = sorted(kind - max(smaller, key=len))
            for number in like:
                yield Irregularity("adds", False, _join(prefix, number), _full(prefix, number, extra))
            suspected.update(like)
    yield from _odd_shapes(prefix, blocks, most)
    for number, block in blocks.items():
        if number not in suspected:
            for inner, parts in stacks(block).items():
                if len(parts) > 2:
                    yield from irregularities(_join(prefix, number, inner), parts, rare_share)


def stacks(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[int, dict[str, TensorEntry]]]:
    """Sort tensors by the first number in their names.

    Args:
        tensors: Entries by name.

    Returns:
        Stack's prefix, block number, name within the block. A stack is what the *first* number of a name counts:
        ``model.layers`` in ``model.layers.3.mlp.experts.7.w1``.
    """
    found: dict[str, dict[int, dict[str, TensorEntry]]] = defaultdict(lambda: defaultdict(dict))
    for name, entry in tensors.items():
        if number := _NUMBER.search(name):
            prefix, rest = name[: number.start()].rstrip("."), name[number.end() + 1 :]
            found[prefix][int(number[1])][rest] = entry
    return {prefix: dict(numbers) for prefix, numbers in found.items()}


def _odd_shapes(prefix: str, blocks: Blocks, most: int) -> Iterator[Irregularity]:
    shapes: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for number, block in blocks.items():
        for name, entry in block.items():
            shapes[name][number] = entry.shape
    for name, by_number in shapes.items():
        counted = Counter(by_number.values()).most_common()
        if len(by_number) < 3 or len(counted) != 2 or counted[1][1] > most or counted[0][1] == counted[1][1]:
            continue
        odd = next(number for number, shape in by_number.items() if shape == counted[1][0])
        detail = f"{list(counted[1][0])}, where other blocks have {list(counted[0][0])}"
        yield Irregularity("shape", False, _join(prefix, odd), _full(prefix, odd, [name]), detail)


def _join(*parts: object) -> str:
    return ".".join(str(part) for part in parts if part != "")


def _full(prefix: str, number: int, names: list[str]) -> tuple[str, ...]:
    return tuple(_join(prefix, number, name) for name in names)
