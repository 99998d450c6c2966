"""Proof of effect and of restore: checksums that see every change, and errors where there is none or one too many."""

from __future__ import annotations

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_oracle import assert_bit_identical, snapshot

from ternary_probe import anatomy
from ternary_probe.perturb import (
    Columns,
    Magnitude,
    NoEffectError,
    NotRestoredError,
    OutlierColumns,
    SignFlip,
    checksum,
    sha256_weights,
)
from ternary_probe.perturb.proof import checksum_tensor

INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
DTYPES = list(INTEGERS)


def values(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slow_checksum(tensor):
    """Signed words of 64 bits, the upper half mixed in, each times its one-based place, summed in Python's integers."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    words = (int.from_bytes(raw[i : i + 8], "little", signed=True) for i in range(0, len(raw), 8))
    return sum(place * (word + 0x9E3779B97F4A7C15 * (word >> 32)) for place, word in enumerate(words, start=1)) % 2**64


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1, 1), (7, 5), (300, 257), (511, 1031)])
def test_the_checksum_is_the_position_weighted_sum_of_the_words(dtype, shape):
    tensor = (100 * values(torch.float32, *shape)).to(dtype)
    assert checksum_tensor(tensor) == slow_checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_that_starts_within_a_word_is_summed_as_its_copy_is(dtype):
    tensor = values(dtype, 1200)
    for start in range(5):
        assert checksum_tensor(tensor[start:]) == slow_checksum(tensor[start:].clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_of_every_entry_is_seen(dtype):
    tensor = values(dtype, 6, 7)
    words = tensor.view(INTEGERS[dtype]).view(-1)
    clean, width = checksum_tensor(tensor), 8 * tensor.element_size()
    for position in range(words.numel()):
        for bit in range(width):
            mask = 1 << bit if bit < width - 1 else -(1 << bit)
            words[position] ^= mask
            assert checksum_tensor(tensor) != clean
            words[position] ^= mask
    assert checksum_tensor(tensor) == clean


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flip_that_moved_and_a_swap_of_two_values_are_seen(dtype):
    tensor = values(dtype, 64)
    sums = set()
    for position in range(64):
        flipped = tensor.clone()
        flipped[position] = -flipped[position]
        sums.add(checksum_tensor(flipped))
    assert len(sums) == 64
    clean = checksum_tensor(tensor)
    for first in range(64):
        for second in range(first):
            if tensor[first] == tensor[second]:
                continue
            swapped = tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            assert checksum_tensor(swapped) != clean


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sets(st.integers(0, 199), max_size=12),
    st.sets(st.integers(0, 199), max_size=2),
)
def test_a_set_of_flips_and_one_with_one_or_two_more_or_fewer_have_different_checksums(dtype, first, changed):
    tensor = values(dtype, 200).abs() + 0.01

    def flipped(positions):
        other = tensor.clone()
        for position in positions:
            other[position] *= -1
        return checksum_tensor(other)

    assert (flipped(first) == flipped(first ^ changed)) == (not changed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_the_same_storage_have_the_same_checksum(dtype):
    tensor = values(dtype, 40, 30)
    assert checksum_tensor(tensor.t()) == checksum_tensor(tensor)
    assert checksum_tensor(tensor.view(-1)) == checksum_tensor(tensor)
    stack = values(dtype, 3, 40, 30)
    assert checksum_tensor(stack[1]) == checksum_tensor(stack[1].clone())
    strided = stack[:, :, 4]
    assert checksum_tensor(strided) == checksum_tensor(strided.contiguous())


def test_the_order_of_tensors_and_their_boundaries_matter():
    first, second = values(torch.float32, 8), values(torch.float32, 8, seed=1)
    assert checksum([first, second]) != checksum([second, first])
    assert checksum([torch.cat([first, second])]) != checksum([first, second])
    assert len(checksum([first])) == 16
    assert checksum([first]) == checksum([first.clone()])


@pytest.fixture
def llama():
    return zoo.build("llama")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "recipe", [SignFlip(rate=0.01), Magnitude(rate=0.1), OutlierColumns(k=2)], ids=lambda r: r.kind
)
def test_an_application_carries_the_proof_of_effect_and_of_restore(dtype, recipe):
    model = zoo.build("llama", dtype)
    found = anatomy.examine(model)
    before = sha256_weights(model)
    with recipe.applied(found) as done:
        assert done.checksum_during == checksum(t for _, t in recipe.touched(found))
        assert done.checksum_during != done.checksum_before
        assert sha256_weights(model) != before
        assert done.checksum_after == ""
    assert done.checksum_after == done.checksum_before
    assert done.matrices == [name for name, _ in recipe.touched(found)]
    assert sha256_weights(model) == before


def test_a_recipe_that_hits_only_zeros_is_refused(llama):
    found = anatomy.examine(llama)
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[:, 5] = 0.0
    whole = snapshot(llama)
    only = {"include": ("*layers.0.mlp.up_proj*",), "columns": Columns(select="listed", listed=(5,))}
    for kind in (SignFlip, Magnitude):
        recipe = kind(rate=1.0, **only)
        with pytest.raises(NoEffectError, match=r"changed no weight \(48 of 48 entries"), recipe.applied(found):
            pass
    assert_bit_identical(llama, whole)


def test_a_rate_that_rounds_to_no_entry_is_refused(llama):
    whole = snapshot(llama)
    for kind in (SignFlip, Magnitude):
        with pytest.raises(NoEffectError, match="selects no entry: raise the rate"), kind(rate=1e-6).applied(llama):
            pass
    assert_bit_identical(llama, whole)


def test_a_storage_that_swallows_edits_is_refused(llama, monkeypatch):
    """As when a matrix is a stale copy of what the model computes with."""
    found = anatomy.examine(llama)
    monkeypatch.setattr(anatomy.WeightMatrix, "flip_signs", lambda self, entries: None)
    with pytest.raises(NoEffectError, match="changed no weight"), SignFlip(rate=0.1).applied(found):
        pass


@pytest.mark.parametrize(
    "recipe",
    [SignFlip(rate=0.01), Magnitude(rate=0.1, columns=Columns(select="listed", listed=(1,))), OutlierColumns(k=2)],
    ids=lambda r: r.kind,
)
def test_a_weight_something_else_changed_meanwhile_is_an_error(llama, recipe):
    found = anatomy.examine(llama)
    name = "model.layers.1.self_attn.v_proj.weight"
    weight = llama.get_parameter(name)
    copied = {1, *(recipe.planted(found)[name] if isinstance(recipe, OutlierColumns) else ())}
    free = min(set(range(32)) - copied)

    def tamper():
        with recipe.applied(found):
            weight.view(torch.int32)[3, free] ^= 1  # one bit of one entry that no copy covers

    with pytest.raises(NotRestoredError, match="something else changed these weights"):
        tamper()


def test_a_stale_known_checksum_is_an_error(llama):
    found = anatomy.examine(llama)
    with pytest.raises(NotRestoredError), SignFlip(rate=0.1).applied(found, known_checksum="0123456789abcdef"):
        pass


def test_a_known_checksum_that_holds_is_taken_over(llama):
    found = anatomy.examine(llama)
    recipe = SignFlip(rate=0.1)
    known = checksum(t for _, t in recipe.touched(found))
    with recipe.applied(found, known_checksum=known) as done:
        assert done.checksum_before == known
    assert done.checksum_after == known


def test_weights_on_the_meta_device_are_refused(llama):
    with pytest.raises(anatomy.StorageError, match="meta"), SignFlip(rate=0.1).applied(llama.to("meta")):
        pass


def test_a_matrix_that_went_to_the_meta_device_after_it_was_examined_is_refused(llama):
    found = anatomy.examine(llama)
    llama.model.layers[1].mlp.down_proj.to("meta")
    with (
        pytest.raises(anatomy.StorageError, match=r"layers\.1\.mlp\.down_proj.*meta"),
        SignFlip(rate=0.1).applied(found),
    ):
        pass


def test_quantized_bytes_are_refused(llama):
    found = anatomy.examine(llama)
    layer = llama.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    with (
        pytest.raises(anatomy.StorageError, match=r"up_proj.weight is stored as uint8"),
        SignFlip(rate=0.1).applied(found),
    ):
        pass
    with pytest.raises(anatomy.StorageError, match="uint8"), Magnitude(rate=0.1).applied(found):
        pass


def test_the_digest_of_all_weights_sees_names_dtypes_and_every_bit(llama):
    clean = sha256_weights(llama)
    assert sha256_weights(zoo.build("llama")) == clean
    assert sha256_weights(zoo.build("llama", torch.float64)) != clean
    weight = llama.lm_head.weight
    with torch.no_grad():
        weight.view(torch.int32)[-1, -1] ^= 1
    assert sha256_weights(llama) != clean


def test_the_digest_knows_tied_storage_from_a_copy_and_still_sees_every_bit_of_it():
    tied, untied = zoo.build("llama_tied"), zoo.build("llama_tied")
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone(), requires_grad=False)
    assert sha256_weights(tied) == sha256_weights(zoo.build("llama_tied"))
    assert sha256_weights(tied) != sha256_weights(untied)
    with torch.no_grad():
        clean = sha256_weights(tied)
        tied.lm_head.weight.view(torch.int32)[0, 0] ^= 1
        assert sha256_weights(tied) != clean
