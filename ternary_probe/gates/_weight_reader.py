"""Weights straight from files, one piece of a matrix in memory at a time, and the figures of one pass over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.gates._parameters import ParameterEvidence

PIECE_BYTES = 8 << 20  # both the piece and its fp32 copy stay in a cache, or near one

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


class Piece(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        first_row: Position of its first row.
        rows: ``[rows, width]`` in the stored dtype; eight-bit floats are widened to fp32, without their scale.
    """

    first_row: int
    rows: torch.Tensor


def is_float(dtype: str) -> bool:
    """Tell whether a stored dtype is read here.

    Args:
        dtype: The format's name.

    Returns:
        The answer.
    """
    return dtype in _TORCH


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is one or several weight matrices: two axes or more, more than one row, and no bias.

    Args:
        name: Its name.
        shape: Its shape.

    Returns:
        The answer; experts' biases have two axes, too, and are no matrices.
    """
    return len(shape) > 1 and math.prod(shape[:-1]) > 1 and shape[-1] > 1 and "bias" not in name.rpartition(".")[2]


def pieces(evidence: ParameterEvidence, name: str, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Read a floating tensor from end to end as rows of its last axis.

    Args:
        evidence: The files.
        name: The tensor, of a dtype `is_float` accepts.
        piece_bytes: Bytes held at a time.

    Yields:
        The pieces in order; together ``[numel / width, width]``. A piece is valid until the next is asked for.

    Raises:
        ProbeError: If the file ends before the tensor does.
    """
    entry = evidence.tensors[name]
    width = entry.shape[-1] if entry.shape else 1
    total = math.prod(entry.shape)
    if total == 0 or evidence.files is None:
        return
    dtype = _TORCH[entry.dtype]
    row_bytes = width * dtype.itemsize
    step = max(1, piece_bytes // row_bytes)
    buffer = bytearray(min(step, total // width) * row_bytes)  # reused: fresh pages cost more than the reading
    for first in range(0, total // width, step):
        count = min(step, total // width - first)
        part = memoryview(buffer)[: count * row_bytes]
        if evidence.files.read_into(entry.file.name, entry.begin + first * row_bytes, part) != len(part):
            raise ProbeError(f"{entry.file} ended while {name} was read: has it changed?")
        rows = torch.frombuffer(buffer, dtype=dtype, count=count * width).view(count, width)
        yield Piece(first, rows.float() if dtype.itemsize == 1 else rows)


def sample_rows(evidence: ParameterEvidence, name: str, count: int) -> torch.Tensor:
    """Read rows spread evenly over a matrix, the same ones of every matrix of that shape.

    Args:
        evidence: The files.
        name: A floating tensor of two axes or more.
        count: Rows to read.

    Returns:
        ``[min(count, rows), width]``, fp32, or fp64 where stored so; half-precision values keep their dtype.

    Raises:
        ProbeError: If the file ends before the tensor does.
    """
    entry = evidence.tensors[name]
    width, dtype = entry.shape[-1], _TORCH[entry.dtype]
    rows = math.prod(entry.shape[:-1])
    row_bytes = width * dtype.itemsize
    chosen = range(0, rows, max(1, rows // count))[:count]
    data = bytearray(b"".join(evidence.read_bytes(name, row * row_bytes, row_bytes) for row in chosen))
    found = torch.frombuffer(data, dtype=dtype).view(len(chosen), width)
    return found.float() if dtype.itemsize == 1 else found
