"""Ternary codes in bytes, 4 a byte (2 bits each) or 5 trits a byte (1.6 bits each), with an exact round trip.

Both formats store ``code + 1`` in {0, 1, 2}, the first code of a byte in its least significant place:

- 2 bits: ``byte = sum_i (code_i + 1) << (2 i)``, i = 0..3;
- trits: ``byte = sum_i (code_i + 1) * 3^i``, i = 0..4, at most 242.

Rows whose length does not divide are filled up with the code 0. Packing along the last axis keeps rows apart: leading
axes can be sliced or sharded without unpacking. Reading checks every byte, so a damaged file is an error and never a
different model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ternary_probe.errors import ProbeError

CODES_PER_BYTE = 4
TRITS_PER_BYTE = 5

_POWERS = (1, 3, 9, 27, 81)
_TWO_BIT_TABLE = torch.stack([((torch.arange(256) >> shift) & 3) - 1 for shift in (0, 2, 4, 6)], dim=1).to(torch.int8)
_TRIT_TABLE = torch.stack([torch.arange(256) // power % 3 - 1 for power in _POWERS], dim=1).to(torch.int8)


def pack2(codes: Tensor) -> Tensor:
    """Pack ternary codes at 2 bits each.

    Args:
        codes: Integers in {-1, 0, 1}, shape ``[..., n]``, any integer dtype.

    Returns:
        uint8, shape ``[..., ceil(n / 4)]``, on the codes' device.
    """
    digits = _digits(codes, CODES_PER_BYTE)
    packed = digits[..., 0].clone()
    for place in range(1, CODES_PER_BYTE):
        packed |= digits[..., place] << (2 * place)
    return packed


def unpack2(packed: Tensor, length: int) -> Tensor:
    """Restore the codes of `pack2`.

    Args:
        packed: uint8, shape ``[..., ceil(length / 4)]``.
        length: Number of codes along the last axis.

    Returns:
        int8 codes, shape ``[..., length]``.
    """
    _check_packed(packed, length, CODES_PER_BYTE)
    _refuse(packed, (packed & (packed >> 1) & 0b01010101) != 0, "holds the unused 2-bit code 3")
    return _expand(packed, length, _TWO_BIT_TABLE)


def pack_trits(codes: Tensor) -> Tensor:
    """Pack ternary codes at 1.6 bits each, five base-3 digits a byte.

    Args:
        codes: Integers in {-1, 0, 1}, shape ``[..., n]``, any integer dtype.

    Returns:
        uint8, shape ``[..., ceil(n / 5)]``, on the codes' device.
    """
    digits = _digits(codes, TRITS_PER_BYTE)
    packed = digits[..., 0].clone()
    for place in range(1, TRITS_PER_BYTE):
        packed += digits[..., place] * _POWERS[place]
    return packed


def unpack_trits(packed: Tensor, length: int) -> Tensor:
    """Restore the codes of `pack_trits`.

    Args:
        packed: uint8, shape ``[..., ceil(length / 5)]``.
        length: Number of codes along the last axis.

    Returns:
        int8 codes, shape ``[..., length]``.
    """
    _check_packed(packed, length, TRITS_PER_BYTE)
    _refuse(packed, packed > 242, "exceeds 242, the largest five trits")
    return _expand(packed, length, _TRIT_TABLE)


def _digits(codes: Tensor, per_byte: int) -> Tensor:
    # code + 1 as uint8, shape [..., bytes, per_byte], filled up with the code 0
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool or codes.ndim == 0:
        raise ProbeError(
            f"ternary codes must be integers with at least 1 dimension, not {codes.dtype} of shape {list(codes.shape)}"
        )
    bad = (codes < -1) | (codes > 1) if codes.is_signed() else codes > 1
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        raise ProbeError(f"code {int(codes[tuple(at)])} at position {at} is not in {{-1, 0, 1}}; pass ternary codes")
    *lead, length = codes.shape
    size = -(-length // per_byte)
    digits = torch.ones((*lead, size * per_byte), dtype=torch.uint8, device=codes.device)
    digits[..., :length] = codes + 1
    return digits.view(*lead, size, per_byte)


def _expand(packed: Tensor, length: int, table: Tensor) -> Tensor:
    places = table.shape[1]
    codes = table.to(packed.device)[packed.int()].view(*packed.shape[:-1], packed.shape[-1] * places)
    if bool(codes[..., length:].any()):
        raise ProbeError(
            f"packed codes of length {length} are not filled up with 0; the file is damaged or the length is wrong"
        )
    return codes[..., :length].contiguous()


def _check_packed(packed: Tensor, length: int, per_byte: int) -> None:
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise ProbeError(
            f"packed codes must be uint8 with at least 1 dimension, not {packed.dtype} of shape {list(packed.shape)}"
        )
    if length < 0 or packed.shape[-1] != -(-length // per_byte):
        raise ProbeError(
            f"{packed.shape[-1]} packed bytes a row do not fit {length} codes at {per_byte} a byte; check the length"
        )


def _refuse(packed: Tensor, bad: Tensor, reason: str) -> None:
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        raise ProbeError(
            f"packed byte {int(packed[tuple(at)])} at position {at} {reason}; the codes are damaged or packed otherwise"
        )
