"""The sign flip: the right entries, exactly negated, nothing else, the same in every dtype and order, undone bit for bit."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
import zoo
from weight_oracle import assert_bit_identical, bits, changed, fake_matrix, logical, logical_all, snapshot

from ternary_probe import anatomy
from ternary_probe.perturb import Columns, Magnitude, SignFlip

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
STORAGES = ["llama", "gpt2", "gpt_neox", "mixtral"]  # plain, [in, out], fused qkv, stacks of experts
RATES = [0.001, 0.02, 0.1, 0.7, 1.0]


def build(name, dtype=torch.float32):
    """The fused experts' kernel knows no float64, so experts run one by one."""
    return zoo.build(name, dtype, **({"experts_implementation": "eager"} if name == "mixtral" else {}))


def names_of(found):
    return [matrix.name for matrix in found.block_matrices]


def half_even(share: float, pool: int) -> int:
    """``share * pool`` rounded to the nearest integer, halves to even, from the exact value of the float product."""
    exact = Fraction(share * pool)
    below = exact.numerator // exact.denominator
    rest = exact - below
    return below + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_exactly_the_expected_number_of_entries_is_negated_and_nothing_else(name, dtype):
    model = build(name, dtype)
    found = anatomy.examine(model)
    before, whole = logical_all(model, names_of(found)), snapshot(model)

    for rate in RATES:
        with SignFlip(rate=rate, seed=3).applied(found) as done:
            hit = changed(model, before)
            for matrix_name, entries in hit.items():
                old, new = before[matrix_name].reshape(-1), logical(model, matrix_name).reshape(-1)
                assert entries.size == half_even(rate, old.numel())
                torch.testing.assert_close(new[entries], -old[entries], rtol=0, atol=0)
            assert done.entries == sum(entries.size for entries in hit.values())
            assert done.zeros == sum(int((before[n].reshape(-1)[e] == 0).sum()) for n, e in hit.items())
            others = {n: v for n, v in snapshot(model).items() if not any(h.startswith(n) for h in hit)}
            assert all(torch.equal(value, whole[n]) for n, value in others.items())
            wanted = sum(float(4 * before[n].reshape(-1)[e].double().square().sum()) for n, e in hit.items())
            assert done.delta_energy == pytest.approx(wanted, rel=1e-12)
        assert_bit_identical(model, whole)


@pytest.mark.parametrize("name", STORAGES)
def test_the_same_entries_are_flipped_in_every_dtype(name):
    hits = []
    for dtype in DTYPES:
        model = build(name, dtype)
        found = anatomy.examine(model)
        before = logical_all(model, names_of(found))
        with SignFlip(rate=0.05, seed=11).applied(found):
            hits.append(changed(model, before))
    for other in hits[1:]:
        assert other.keys() == hits[0].keys()
        for matrix_name, entries in other.items():
            np.testing.assert_array_equal(entries, hits[0][matrix_name])


def test_storage_layout_does_not_move_the_entries():
    class Plain(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

    values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    flipped = []
    for stored, axes in (
        (values.clone(), anatomy._matrix.Axes(0, 1)),
        (values.t().contiguous(), anatomy._matrix.Axes(1, 0)),
        (values[None].repeat(3, 1, 1), anatomy._matrix.Axes(1, 2, 0, 1)),
        (values.t()[None].repeat(3, 1, 1), anatomy._matrix.Axes(2, 1, 0, 2)),
    ):
        matrix = anatomy.WeightMatrix(Plain(stored), "w", "weight", (), "w", 0, (30, 20), axes, None, False, 1)
        entries = SignFlip(rate=0.1).draw(matrix)
        matrix.flip_signs(entries)
        flipped.append(matrix.view().clone())
    assert all(torch.equal(flipped[0], other) for other in flipped[1:])
    assert int((flipped[0] != values).sum()) == 60


def test_two_matrices_of_equal_shape_get_different_entries():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    before = logical_all(model, names_of(found))
    with SignFlip(rate=0.1).applied(found):
        hit = changed(model, before)
    masks = [tuple(entries.tolist()) for name, entries in hit.items() if before[name].shape == (32, 32)]
    assert len(masks) == 4  # q_proj and o_proj of two blocks
    assert len(set(masks)) == 4


def test_the_seed_moves_the_entries_and_a_lower_rate_is_a_subset():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    before = logical_all(model, names_of(found))

    def entries(**options):
        with SignFlip(**options).applied(found):
            return changed(model, before)

    low, high, other = entries(rate=0.05), entries(rate=0.2), entries(rate=0.05, seed=1)
    for name in before:
        assert set(low[name]) < set(high[name])
        assert set(low[name]) != set(other[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit], ids=str)
def test_every_bit_comes_back_however_the_body_ends(dtype, error):
    model = zoo.build("gpt2", dtype)
    with torch.no_grad():  # zeros of both signs, infinities and a NaN must survive as they are
        weight = model.transformer.h[0].mlp.c_fc.weight
        found = anatomy.examine(model)
        weight.view(-1)[:5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")]).to(dtype)
    before = snapshot(model)

    if error is None:
        with SignFlip(rate=0.5).applied(found):
            pass
    else:
        with pytest.raises(error), SignFlip(rate=0.5).applied(found):
            raise error
    assert_bit_identical(model, before)


def test_flips_over_a_few_columns_touch_only_these():
    model = zoo.build("mixtral")
    found = anatomy.examine(model)
    before = logical_all(model, names_of(found))
    with SignFlip(rate=0.5, columns=Columns(select="listed", listed=(3, 17, 4))).applied(found):
        for name, entries in changed(model, before).items():
            rows, width = before[name].shape
            assert entries.size == round(0.5 * rows * 3)
            assert set((entries % width).tolist()) <= {3, 4, 17}


def test_arms_applied_in_any_order_hit_the_same_entries():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    before = logical_all(model, names_of(found))
    arms = [
        SignFlip(rate=0.02),
        SignFlip(rate=0.1, seed=5),
        Magnitude(rate=0.1),
        SignFlip(rate=0.02, exclude=("*mlp*",)),
    ]
    seen: dict[int, set[str]] = {}
    for order in list(permutations(range(len(arms))))[::5]:
        for arm in order:
            with arms[arm].applied(found) as done:
                hit = changed(model, before)
            seen.setdefault(arm, set()).add(repr([(n, e.tolist()) for n, e in hit.items()]) + done.checksum_during)
    assert {len(outcomes) for outcomes in seen.values()} == {1}


def test_zeros_that_are_hit_are_counted_and_come_back_with_their_sign():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[:24] = 0.0
        weight[0] = -0.0
    before = snapshot(model)
    recipe = SignFlip(rate=0.25, include=("*layers.0.mlp.up_proj*",))
    old = logical(model, "model.layers.0.mlp.up_proj.weight")
    with recipe.applied(found) as done:
        hit = torch.nonzero((bits(weight) != bits(old)).reshape(-1))[:, 0]
        assert done.entries == hit.numel() == 384
        assert done.zeros == int((old.reshape(-1)[hit] == 0).sum())
        assert done.changed == int((weight != old).sum())
        assert 0 < done.zeros < 384
    assert_bit_identical(model, before)


def test_a_tied_head_and_embedding_is_flipped_once_under_either_name():
    model = zoo.build("llama_tied")
    found = anatomy.examine(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    old = model.lm_head.weight.detach().clone()
    whole = snapshot(model)
    flipped = []
    for pattern in ("lm_head*", "*embed_tokens.weight"):
        recipe = SignFlip(rate=0.01, include=(pattern,))
        with recipe.applied(found) as done:
            assert done.entries == round(0.01 * old.numel())
            assert int((model.lm_head.weight != old).sum()) == done.entries
            flipped.append(model.lm_head.weight.detach().clone())
        assert_bit_identical(model, whole)
    with SignFlip(rate=0.01, include=("lm_head.weight", "model.embed_tokens.weight")).applied(found) as done:
        flipped.append(model.lm_head.weight.detach().clone())
    assert torch.equal(flipped[0], flipped[1])
    assert torch.equal(flipped[0], flipped[2])


def test_one_expert_can_be_named_as_it_is_listed():
    model = zoo.build("mixtral")
    found = anatomy.examine(model)
    name = "model.layers.1.mlp.experts.down_proj[2]"
    before = logical_all(model, names_of(found))
    with SignFlip(rate=0.1, include=(name,)).applied(found):
        hit = {n for n, entries in changed(model, before).items() if entries.size}
    assert hit == {name}


@pytest.mark.parametrize(("rate", "pool", "count"), [(0.5, 5, 2), (0.5, 7, 4), (0.5, 1, 0), (0.1, 25, 2), (0.3, 5, 2)])
def test_halves_are_rounded_to_even(rate, pool, count):
    assert half_even(rate, pool) == count
    assert SignFlip(rate=rate).draw(fake_matrix("w", 1, pool)).numel() == count
