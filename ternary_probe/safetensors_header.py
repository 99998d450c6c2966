"""The header of a safetensors file: read by hand, so that a broken file can be told exactly what is wrong with it.

The format: eight bytes little-endian header length, a JSON object ``name -> {dtype, shape, data_offsets}``, then
the tensors' bytes without gaps (https://github.com/huggingface/safetensors, "Format"). The reference reader answers
a missing byte, a surplus byte and a Git LFS pointer with messages that do not tell them apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ternary_probe.errors import ProbeError

LONGEST_HEADER = 100_000_000  # the reference reader's own limit, bytes

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

IMPOSTORS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the weights: fetch them with `git lfs pull`",
    b"GGUF": "is a GGUF file: give it a name that ends in .gguf and pass that",
    b"PK\x03\x04": "is a PyTorch pickle under another name",
    b"<": "is a web page or XML, not the weights: download it again",
}


class BrokenFileError(ProbeError):
    """A weight file is damaged or is not what its name says.

    Args:
        message: The sentence.
        fault: The kind of damage in one word: ``empty``, ``truncated``, ``trailing``, ``zeroed``, ``impostor``
            (a file of another kind), ``unreadable`` or ``damaged`` (a header that contradicts itself).
    """

    def __init__(self, message: str, fault: str = "damaged") -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        file: The safetensors file that holds it.
        dtype: The format's own name, for example ``BF16``.
        shape: Sizes of the axes as stored.
        begin: First byte, counted from the start of the file.
        end: One past the last byte.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one safetensors file; no tensor data is read.

    Args:
        file: The file.

    Returns:
        The entries by tensor name, in the order of their bytes.

    Raises:
        BrokenFileError: If the file is missing, empty, truncated, too long, zeroed or of another kind, or its header
            contradicts itself.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:

            def read(begin: int, end: int) -> bytes:
                stream.seek(begin)
                return stream.read(end - begin)

            entries, data_start = header_of(file, size, read)
    except OSError as error:
        raise BrokenFileError(f"{file} cannot be read: {error.strerror or error}", "unreadable") from error
    check_layout(file, entries, data_start=data_start, size=size)
    return entries


def header_of(file: Path, size: int, read: Callable[[int, int], bytes]) -> tuple[dict[str, TensorEntry], int]:
    """Read a header through a function that fetches bytes, wherever the file lies; `check_layout` is left to the caller.

    Args:
        file: Its name, for the entries and messages.
        size: Its length in bytes.
        read: Fetches the bytes from one position up to another.

    Returns:
        The entries by tensor name, in the order of their bytes, and the byte at which tensor data begin.

    Raises:
        BrokenFileError: If there is no header to speak of, or it contradicts itself.
    """
    start = read(0, min(64, size))
    length = int.from_bytes(start[:8], "little")
    reject_impostors(file, start, size)
    if length > LONGEST_HEADER:
        raise BrokenFileError(f"{file} is not a safetensors file: it announces a header of {length} bytes", "impostor")
    if 8 + length > size:
        raise BrokenFileError(
            f"{file} is truncated: it ends {8 + length - size} bytes before the end of its header", "truncated"
        )
    return parse(file, read(8, 8 + length), data_start=8 + length), 8 + length


def reject_impostors(file: Path, start: bytes, size: int) -> None:
    """Refuse what is recognisably not a safetensors file.

    Args:
        file: The file, for the message.
        start: Its first bytes, at least 8 of them where it has that many.
        size: Its length in bytes.

    Raises:
        BrokenFileError: If it is empty, zeroed, too short, or starts like a file of another kind.
    """
    if size == 0:
        raise BrokenFileError(f"{file} is empty: download or save it again", "empty")
    for magic, what in IMPOSTORS.items():
        if start.startswith(magic) and not start[8:9] == b"{":
            raise BrokenFileError(f"{file} {what}", "impostor")
    if size < 8:
        raise BrokenFileError(f"{file} is truncated: {size} bytes cannot hold a header", "truncated")
    if not any(start[:8]):
        raise BrokenFileError(
            f"{file} is zeroed: its header is all zero bytes, as an interrupted download or a full disk leaves it",
            "zeroed",
        )


def parse(file: Path, raw: bytes, data_start: int) -> dict[str, TensorEntry]:
    """Turn header bytes into entries, each consistent in itself.

    Args:
        file: The file, for the entries and messages.
        raw: The header's JSON bytes.
        data_start: Byte of the file at which tensor data begins.

    Returns:
        The entries by tensor name, in the order of their bytes.

    Raises:
        BrokenFileError: If the bytes are not the JSON of a header, or an entry contradicts itself.
    """
    if not any(raw):
        raise BrokenFileError(
            f"{file} is zeroed: its header is all zero bytes, as an interrupted download or a full disk leaves it",
            "zeroed",
        )
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: unique(file, pairs))
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{file} has a damaged header: it is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise BrokenFileError(f"{file} has a damaged header: it is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: parse_entry(file, name, fields, data_start) for name, fields in header.items()}
    return dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))


def unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from JSON pairs, refusing a name that occurs twice.

    Args:
        file: The file, for the message.
        pairs: Names and values in order.

    Returns:
        The same as a dict.

    Raises:
        BrokenFileError: If a name occurs twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BrokenFileError(f"{file} has a damaged header: {name!r} occurs twice")
        found[name] = value
    return found


def parse_entry(file: Path, name: str, fields: object, data_start: int) -> TensorEntry:
    """Check one header entry against itself: known dtype, sane shape, as many bytes as both ask for.

    Args:
        file: The file, for the entry and messages.
        name: The tensor's name.
        fields: The JSON value found under it.
        data_start: Byte of the file at which tensor data begins.

    Returns:
        The entry, its offsets counted from the start of the file.

    Raises:
        BrokenFileError: If a field is missing, of the wrong type, or at odds with another.
    """
    damaged = f"{file} has a damaged header: tensor {name!r}"
    if not isinstance(fields, dict):
        raise BrokenFileError(f"{damaged} is not described by an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BrokenFileError(f"{damaged} has the unknown dtype {dtype!r}")
    if not is_sizes(shape):
        raise BrokenFileError(f"{damaged} has the impossible shape {shape!r}")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BrokenFileError(f"{damaged} has the impossible offsets {offsets!r}")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if (end - begin) * 8 != bits:
        raise BrokenFileError(f"{damaged} has {end - begin} bytes, but shape {shape} in {dtype} needs {bits / 8:g}")
    return TensorEntry(file, dtype, tuple(shape), data_start + begin, data_start + end)


def is_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether a JSON value is a list of integers that are not negative.

    Args:
        value: The value.

    Returns:
        The answer; JSON's ``true`` is no integer here.
    """
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def check_layout(file: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Check that the tensors lie one after another without gaps and end where the file ends.

    Args:
        file: The file, for the message.
        entries: Its entries, in the order of their bytes.
        data_start: Byte of the file at which tensor data begins.
        size: Length of the file in bytes.

    Raises:
        BrokenFileError: If two tensors overlap, bytes lie between them, or the file is not as long as the header says.
    """
    end = data_start
    for name, entry in entries.items():
        if entry.begin != end:
            what = (
                "overlaps the tensor before it"
                if entry.begin < end
                else f"leaves {entry.begin - end} unused bytes before it"
            )
            raise BrokenFileError(f"{file} has a damaged header: tensor {name!r} {what}")
        end = entry.end
    if size < end:
        raise BrokenFileError(
            f"{file} is truncated: {end - size} of {end} bytes are missing; download or save it again", "truncated"
        )
    if size > end:
        raise BrokenFileError(
            f"{file} has {size - end} trailing bytes after its last tensor; download or save it again", "trailing"
        )
