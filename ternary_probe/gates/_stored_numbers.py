"""Stored bytes to numbers with numpy alone: what safetensors calls BF16, F8 and so on."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from ternary_probe.errors import ProbeError

Vector = NDArray[np.float64]

_PLAIN = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
# Exponent bits, mantissa bits, bias, and what the topmost codes mean: "ieee" keeps the last exponent for infinity and
# NaN, "fn" only its all-ones code for NaN, "fnuz" only the code of -0.
_EIGHT_BITS = {
    "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3": (4, 3, 7, "fn"),
    "F8_E5M2FNUZ": (5, 2, 16, "fnuz"),
    "F8_E4M3FNUZ": (4, 3, 8, "fnuz"),
}

FLOATS = frozenset({"F64", "F32", "F16", "BF16", *_EIGHT_BITS})
"""Stored dtypes that are floating numbers by themselves."""


def decode(data: bytes, dtype: str, name: str) -> Vector:
    """Turn stored bytes into numbers.

    Args:
        data: The bytes, little-endian.
        dtype: The format's name of the dtype.
        name: Of the tensor, for the message.

    Returns:
        fp64, flat; eight-bit floats without their companion scale.

    Raises:
        ProbeError: If the dtype does not hold one number an entry, such as F4.
    """
    if dtype == "BF16":  # the upper half of an fp32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "F8_E8M0":  # a bare exponent
        codes = np.frombuffer(data, np.uint8).astype(np.float64)
        return np.where(codes == 255, np.nan, np.exp2(codes - 127))
    if dtype in _EIGHT_BITS:
        return _table(dtype)[np.frombuffer(data, np.uint8)]
    if dtype not in _PLAIN:
        raise ProbeError(f"{name} is stored as {dtype}, which does not hold one number an entry")
    return np.frombuffer(data, _PLAIN[dtype]).astype(np.float64)


@cache
def _table(dtype: str) -> Vector:
    """Return the value of each of the 256 codes."""
    exponent_bits, mantissa_bits, bias, kind = _EIGHT_BITS[dtype]
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = sign * np.where(exponent == 0, np.exp2(1 - bias) * mantissa, np.exp2(exponent - bias) * (1 + mantissa))
    if kind == "ieee":
        last = exponent == (1 << exponent_bits) - 1
        value = np.where(last, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    elif kind == "fn":
        value[[0x7F, 0xFF]] = np.nan
    else:
        value[0x80] = np.nan
    return np.asarray(value, dtype=np.float64)
