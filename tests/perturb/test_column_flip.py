"""Flipping whole columns is negating input features: exactly, in every storage."""

from __future__ import annotations

import pytest
import torch
import zoo
from weight_oracle import assert_bit_identical, logical, logical_all, logits, snapshot, text_of, tokens

from ternary_probe import anatomy
from ternary_probe.perturb import ColumnFlip, Columns, SignFlip

LISTED = (1, 9, 30)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "mixtral"])
def test_flipping_columns_gives_exactly_the_logits_of_negated_inputs(name):
    model = zoo.build(name)
    found = anatomy.examine(model)
    before, whole = logical_all(model, [m.name for m in found.block_matrices]), snapshot(model)
    clean = logits(model, tokens())
    with anatomy.negate_inputs(found, {n: torch.tensor(LISTED) for n in before}):
        negated = logits(model, tokens())
    with ColumnFlip(columns=Columns(select="listed", listed=LISTED)).applied(found) as done:
        flipped = logits(model, tokens())
        for n, old in before.items():
            signs = torch.ones(old.shape[1], dtype=old.dtype)
            signs[list(LISTED)] = -1
            assert torch.equal(logical(model, n), old * signs)
        assert done.entries == sum(old.shape[0] * len(LISTED) for old in before.values())
        energy = sum(4 * float(old[:, LISTED].double().square().sum()) for old in before.values())
        assert done.delta_energy == pytest.approx(energy, rel=1e-12)
    assert torch.equal(flipped, negated)
    assert not torch.equal(flipped, clean)
    assert_bit_identical(model, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_flipped_columns_come_back_bit_for_bit(dtype):
    model = zoo.build("gpt2", dtype)
    whole = snapshot(model)
    with pytest.raises(KeyboardInterrupt), ColumnFlip(columns=Columns(select="listed", listed=LISTED)).applied(model):
        raise KeyboardInterrupt
    assert_bit_identical(model, whole)


@pytest.mark.parametrize("select", ["outlier", "other"])
def test_measured_columns_are_flipped_in_every_matrix(select):
    model = zoo.build("llama")
    found = anatomy.examine(model)
    before = logical_all(model, [m.name for m in found.block_matrices])
    recipe = ColumnFlip(columns=Columns(select=select, fraction=0.2)).resolve(found, text_of(tokens()))
    with recipe.applied(found):
        for n, old in before.items():
            flipped = {int(j) for j in torch.nonzero((logical(model, n) != old).all(0))[:, 0]}
            outlier = set(recipe.columns.outlier[n])
            assert len(outlier) == int(0.2 * old.shape[1])
            assert flipped == (outlier if select == "outlier" else set(range(old.shape[1])) - outlier)


def test_all_columns_at_rate_one_are_the_same_as_a_full_sign_flip():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    with ColumnFlip(columns=Columns()).applied(found) as columns:
        pass
    with SignFlip(rate=1.0).applied(found) as entries:
        pass
    assert columns.checksum_during == entries.checksum_during
    assert columns.entries == entries.entries
