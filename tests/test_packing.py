"""Packing: exact round trips at any shape, the documented byte order, and no damaged byte accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ternary_probe.errors import ProbeError
from ternary_probe.packing import pack2, pack_trits, unpack2, unpack_trits

FORMATS = pytest.mark.parametrize(
    ("pack", "unpack", "per_byte"), [(pack2, unpack2, 4), (pack_trits, unpack_trits, 5)], ids=["2-bit", "trits"]
)


@FORMATS
@given(shape=st.lists(st.integers(0, 13), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_round_trip_is_exact_for_any_shape(pack, unpack, per_byte, shape, seed):
    codes = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack(codes)

    assert packed.dtype == torch.uint8
    assert list(packed.shape) == [*shape[:-1], -(-shape[-1] // per_byte)]
    restored = unpack(packed, shape[-1])
    assert restored.dtype == torch.int8
    assert torch.equal(restored, codes)


def test_first_code_of_a_byte_is_in_its_least_significant_place():
    codes = torch.tensor([1, 0, -1, 0, 1])

    assert pack2(codes).tolist() == [2 + (1 << 2) + (0 << 4) + (1 << 6), 2 + (1 << 2) + (1 << 4) + (1 << 6)]
    assert pack_trits(codes).tolist() == [2 * 1 + 1 * 3 + 0 * 9 + 1 * 27 + 2 * 81]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
@FORMATS
def test_any_integer_dtype_and_any_strides_are_packed(pack, unpack, per_byte, dtype):
    codes = torch.randint(-1, 2, (6, 9)).to(dtype).T

    assert torch.equal(unpack(pack(codes), 6), codes.to(torch.int8))


@FORMATS
def test_leading_axes_can_be_sliced_without_unpacking(pack, unpack, per_byte):
    codes = torch.randint(-1, 2, (2, 5, 11), dtype=torch.int8)

    assert torch.equal(unpack(pack(codes)[1, 2:4], 11), codes[1, 2:4])


@pytest.mark.parametrize("bad", [2, -2, 127, -128])
@FORMATS
def test_codes_out_of_range_are_refused_by_position(pack, unpack, per_byte, bad):
    codes = torch.zeros(3, 4, dtype=torch.int8)
    codes[1, 2] = bad
    with pytest.raises(ProbeError, match=rf"code {bad} at position \[1, 2\]"):
        pack(codes)


@FORMATS
def test_floats_booleans_and_scalars_are_refused(pack, unpack, per_byte):
    for codes in (torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.tensor(1)):
        with pytest.raises(ProbeError, match="integers"):
            pack(codes)


def test_every_damaged_two_bit_byte_is_refused():
    for byte in range(256):
        packed = torch.tensor([byte], dtype=torch.uint8)
        if any(byte >> shift & 3 == 3 for shift in (0, 2, 4, 6)):
            with pytest.raises(ProbeError, match=f"packed byte {byte} at position"):
                unpack2(packed, 4)
        else:
            assert pack2(unpack2(packed, 4)).item() == byte


def test_every_damaged_trit_byte_is_refused():
    for byte in range(256):
        packed = torch.tensor([byte], dtype=torch.uint8)
        if byte > 242:
            with pytest.raises(ProbeError, match=f"packed byte {byte} at position"):
                unpack_trits(packed, 5)
        else:
            assert pack_trits(unpack_trits(packed, 5)).item() == byte


@FORMATS
def test_wrong_length_dtype_or_fill_is_refused(pack, unpack, per_byte):
    packed = pack(torch.ones(per_byte + 1, dtype=torch.int8))
    with pytest.raises(ProbeError, match="check the length"):
        unpack(packed, 2 * per_byte + 1)
    with pytest.raises(ProbeError, match="check the length"):
        unpack(packed, -1)
    with pytest.raises(ProbeError, match="uint8"):
        unpack(packed.to(torch.int8), per_byte + 1)
    full = pack(torch.ones(2 * per_byte, dtype=torch.int8))
    with pytest.raises(ProbeError, match="filled up"):
        unpack(full, 2 * per_byte - 1)
