"""Recipes one after the other: the later see what the earlier made, each must have an effect, and all is undone."""

from __future__ import annotations

import pytest
import torch
import zoo
from weight_oracle import assert_bit_identical, changed, logical_all, snapshot, text_of, tokens

from ternary_probe import anatomy
from ternary_probe.measure import measure_activations
from ternary_probe.perturb import Columns, Composed, Magnitude, NoEffectError, OutlierColumns, SignFlip

OUTLIER = Columns(select="outlier", fraction=0.1)


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama")


@pytest.fixture(scope="module")
def found(llama):
    return anatomy.examine(llama)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt], ids=str)
def test_a_composition_is_undone_bit_for_bit(dtype, error):
    model = zoo.build("gpt2", dtype)
    whole = snapshot(model)
    recipe = Composed(parts=(OutlierColumns(k=3), Magnitude(rate=0.2), SignFlip(rate=0.1), SignFlip(rate=0.3, seed=1)))
    if error is None:
        with recipe.applied(model) as done:
            assert done.checksum_during != done.checksum_before
        assert done.checksum_after == done.checksum_before
    else:
        with pytest.raises(error), recipe.applied(model):
            raise error
    assert_bit_identical(model, whole)


def test_a_composition_does_what_nesting_its_parts_does(llama, found):
    parts = (OutlierColumns(k=3), SignFlip(rate=0.1), Magnitude(rate=0.2))
    with parts[0].applied(found) as a, parts[1].applied(found) as b, parts[2].applied(found) as c:
        nested = snapshot(llama)
    with Composed(parts=parts).applied(found) as done:
        assert_bit_identical(llama, nested)
        assert done.entries == a.entries + b.entries + c.entries
        assert done.delta_energy == pytest.approx(a.delta_energy + b.delta_energy + c.delta_energy)


def test_each_part_is_resolved_on_the_model_the_parts_before_it_made(llama, found):
    whole = snapshot(llama)
    plant = OutlierColumns(k=50, number=3)
    flip = SignFlip(rate=0.1, columns=OUTLIER)
    clean = measure_activations(found, text_of(tokens())).outlier_columns(0.1, "energy")
    with plant.applied(found):
        planted = measure_activations(found, text_of(tokens())).outlier_columns(0.1, "energy")
    recipe = Composed(parts=(plant, flip)).resolve(found, text_of(tokens()))
    assert recipe.parts[1].columns.outlier == planted
    assert planted != clean
    assert_bit_identical(llama, whole)


def test_equal_parts_are_resolved_one_after_the_other_too(found):
    """The same object twice: its second resolution must see the first one applied."""
    flip = SignFlip(rate=1.0, columns=OUTLIER)
    recipe = Composed(parts=(flip, flip)).resolve(found, text_of(tokens()))
    with recipe.parts[0].applied(found):
        second = measure_activations(found, text_of(tokens())).outlier_columns(0.1, "energy")
    assert recipe.parts[1].columns.outlier == second


def test_a_part_that_hits_nothing_is_refused_although_another_did(llama, found):
    whole = snapshot(llama)
    recipe = Composed(parts=(OutlierColumns(k=2), SignFlip(rate=1e-7)))
    with pytest.raises(NoEffectError, match=r"recipe sign_flip:rate=1e-07.* selects no entry"), recipe.applied(found):
        pass
    assert_bit_identical(llama, whole)


def test_parts_that_cancel_are_refused(llama, found):
    whole = snapshot(llama)
    recipe = Composed(parts=(SignFlip(rate=0.1), SignFlip(rate=0.1)))
    with pytest.raises(NoEffectError, match="changed no weight"), recipe.applied(found):
        pass
    assert_bit_identical(llama, whole)


def test_flips_after_a_plant_are_the_flips_without_it(llama, found):
    names = [m.name for m in found.block_matrices]
    clean = logical_all(llama, names)
    with SignFlip(rate=0.1).applied(found):
        alone = changed(llama, clean)
    with OutlierColumns(k=2).applied(found):
        planted = logical_all(llama, names)
    with Composed(parts=(OutlierColumns(k=2), SignFlip(rate=0.1))).applied(found):
        after = changed(llama, planted)
    assert all((alone[name] == after[name]).all() for name in names)
