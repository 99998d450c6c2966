"""The packed form of a ternary matrix: codes in bytes and a scale that dequantizes to the dense values, bit for bit.

``weight`` is uint8, so that a loader which does not know the format meets another shape than the ``[out, in]`` it expects
and refuses. ``weight_scale`` has the storage dtype of the dense matrix and is an ordinary floating tensor: cast to another
dtype, it gives the same values as the dense matrix cast to that dtype.

One plane: ``weight [out, bytes]``, ``weight_scale [1 or out, 1 or groups]``, value ``code * scale``. Two planes: ``weight
[2, out, bytes]``; as a rounded sum of two products is not a product of rounded scales, ``weight_scale [4, …]`` holds the
four magnitudes ``s0, s1, s0 + s1, s0 - s1``, each rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ternary_probe import packing
from ternary_probe.errors import ProbeError
from ternary_probe.schemes import Scheme
from ternary_probe.ternary import TernaryWeight

FORMAT_VERSION = 1


class Packed(NamedTuple):
    """A matrix as the checkpoint holds it."""

    weight: Tensor
    weight_scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.weight.nbytes + self.weight_scale.nbytes


class Layout(NamedTuple):
    """What must be known to read a packed matrix.

    Attributes:
        scheme: Which entries share a scale, and how many planes there are.
        out_features: Rows.
        in_features: Columns.
        codes_per_byte: 4 (2 bits each) or 5 (trits).
    """

    scheme: Scheme
    out_features: int
    in_features: int
    codes_per_byte: int = packing.CODES_PER_BYTE

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        shape = (self.out_features, -(-self.in_features // self.codes_per_byte))
        return shape if self.scheme.planes == 1 else (self.scheme.planes, *shape)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        shape = self.scheme.scale_shape(self.out_features, self.in_features)
        return shape if self.scheme.planes == 1 else (4, *shape)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes a matrix takes with scales of a dtype."""
        return torch.Size(self.weight_shape).numel() + torch.Size(self.scale_shape).numel() * dtype.itemsize


def pack(quantized: TernaryWeight, dtype: torch.dtype, codes_per_byte: int = packing.CODES_PER_BYTE) -> Packed:
    """Pack a ternary matrix.

    Args:
        quantized: The matrix.
        dtype: Dtype the dense matrix would be stored in.
        codes_per_byte: 4 or 5.

    Returns:
        Codes and scale, on the matrix' device; `unpack` gives ``quantized.dequantize(dtype)``.

    Raises:
        ProbeError: If a value overflows the dtype.
    """
    put = packing.pack2 if codes_per_byte == packing.CODES_PER_BYTE else packing.pack_trits
    scale = quantized.scale.to(torch.promote_types(torch.float32, dtype))
    if quantized.scheme.planes == 2:
        scale = torch.stack([scale[0], scale[1], scale[0] + scale[1], scale[0] - scale[1]])
    rounded = scale.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise ProbeError(f"scale {float(scale.max()):.4g} overflows {dtype}: use a wider dtype")
    if quantized.scheme.planes == 1:
        return Packed(put(quantized.codes[0]), rounded[0])
    return Packed(put(quantized.codes), rounded)


def unpack(packed: Packed, layout: Layout) -> Tensor:
    """Return the dense matrix. Bytes are trusted: `check` them once, after reading.

    Args:
        packed: Codes and scale.
        layout: Their layout.

    Returns:
        ``[out_features, in_features]``, contiguous, in the scale's dtype.
    """
    codes = _codes(packed.weight, layout)
    scale = packed.weight_scale
    if layout.scheme.group is not None:
        scale = scale.repeat_interleave(layout.scheme.group, dim=-1)[..., : layout.in_features]
    if layout.scheme.planes == 1:
        return codes.to(scale.dtype).mul_(scale)
    first, second = codes
    level = torch.where(first == 0, scale[1], torch.where(second == 0, scale[0], scale[3]))
    level = torch.where(first == second, scale[2], level)
    return torch.where(first == 0, second, first) * level


def check(packed: Packed, layout: Layout) -> None:
    """Refuse what no packing writes: another shape or dtype, unused codes, filling that is not 0, a scale that is not finite.

    Args:
        packed: Codes and scale, as read.
        layout: Their layout.

    Raises:
        ProbeError: If the file is damaged or packed otherwise.
    """
    shapes = tuple(packed.weight.shape), tuple(packed.weight_scale.shape)
    if shapes != (layout.weight_shape, layout.scale_shape):
        raise ProbeError(
            f"packed codes and scales have shapes {[list(s) for s in shapes]} where "
            f"{[list(layout.weight_shape), list(layout.scale_shape)]} belong; the file does not fit its config"
        )
    take = packing.unpack2 if layout.codes_per_byte == packing.CODES_PER_BYTE else packing.unpack_trits
    take(packed.weight, layout.in_features)
    if not bool(torch.isfinite(packed.weight_scale).all()):
        raise ProbeError("a packed scale is not finite; the file is damaged")


def _codes(weight: Tensor, layout: Layout) -> Tensor:
    # packing's own unpacking tests every byte, which costs four times this
    if layout.codes_per_byte == packing.CODES_PER_BYTE:
        digits = [(weight >> shift) & 3 for shift in (0, 2, 4, 6)]
    else:
        digits = [weight // power % 3 for power in (1, 3, 9, 27, 81)]
    codes = torch.stack(digits, dim=-1).flatten(-2)[..., : layout.in_features]
    return codes.to(torch.int8).sub_(1)
