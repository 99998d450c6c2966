"""Sign-preserving noise: one constant, the flip's norm, every sign kept, undone bit for bit."""

from __future__ import annotations

import pytest
import torch
import zoo
from weight_oracle import assert_bit_identical, bits, first_columns, logical, logical_all, snapshot

from ternary_probe import anatomy
from ternary_probe.perturb import Columns, Magnitude, SignFlip

# Relative error of the norm: rounding of the sum of a weight and the constant, entry by entry, averages out.
NORM = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", NORM, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_noise_is_one_constant_along_the_sign_at_the_norm_of_the_matched_flip(name, dtype):
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    model = zoo.build(name, dtype, **options)
    found = anatomy.examine(model)
    names = [m.name for m in found.block_matrices]
    before, whole = logical_all(model, names), snapshot(model)
    recipe = Magnitude(rate=0.05, seed=2)
    with SignFlip(rate=0.05, seed=2).applied(found):
        norms = {n: float((logical(model, n).double() - before[n].double()).norm()) for n in names}
    with recipe.applied(found) as done:
        energy = 0.0
        for n in names:
            old, moved = before[n].double(), logical(model, n).double() - before[n].double()
            energy += float(moved.square().sum())
            assert float(moved.norm()) == pytest.approx(norms[n], rel=NORM[dtype])
            expected = norms[n] / int((old != 0).sum()) ** 0.5 * old.sign()
            grain = torch.finfo(dtype).eps * (old.abs() + expected.abs())  # the sum is rounded to the storage dtype
            assert bool(((moved - expected).abs() <= grain + 1e-9 * expected.abs()).all())
            assert torch.equal(logical(model, n).sign(), before[n].sign())
        assert done.delta_energy == pytest.approx(energy, rel=1e-9)
        assert done.entries == sum(old.numel() for old in before.values())
    assert_bit_identical(model, whole)


@pytest.mark.parametrize("matching", ["rate", "count", "energy"])
@pytest.mark.parametrize("select", ["outlier", "other"])
def test_noise_over_some_columns_stays_there_and_has_their_flips_norm(select, matching):
    model = zoo.build("llama")
    found = anatomy.examine(model)
    matrices = list(found.block_matrices)
    outlier = first_columns(matrices, 0.25)
    options = {"rate": 0.1, "columns": Columns(select=select, fraction=0.25), "matching": matching, "seed": 4}
    flip, noise = (kind(**options).resolved_with(matrices, outlier) for kind in (SignFlip, Magnitude))
    before, whole = logical_all(model, [m.name for m in matrices]), snapshot(model)
    with flip.applied(found):
        norms = {n: float((logical(model, n) - old).double().norm()) for n, old in before.items()}
    with noise.applied(found):
        for n, old in before.items():
            moved = (logical(model, n) - old).double()
            columns = torch.zeros(old.shape[1], dtype=torch.bool)
            columns[list(outlier[n])] = True
            touched = columns if select == "outlier" else ~columns
            assert bool((moved[:, touched] != 0).all())
            assert not bool(moved[:, ~touched].any())
            assert float(moved.norm()) == pytest.approx(norms[n], rel=1e-6)
    assert_bit_identical(model, whole)


def test_zeros_stay_zero_and_the_norm_is_still_the_flips():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    weight = model.model.layers[1].mlp.gate_proj.weight
    with torch.no_grad():
        weight[::3] = 0.0
        weight[0, :7] = -0.0
    whole, old = snapshot(model), weight.detach().clone()
    only = {"include": ("*layers.1.mlp.gate_proj*",)}
    with SignFlip(rate=0.2, **only).applied(found) as flipped:
        norm = float((weight - old).double().norm())
        assert flipped.zeros > 0
    with Magnitude(rate=0.2, **only).applied(found) as done:
        assert not bool(weight[old == 0].any())
        assert bool((weight[old != 0] != old[old != 0]).all())
        assert done.zeros == int((old == 0).sum())
        assert float((weight - old).double().norm()) == pytest.approx(norm, rel=1e-6)
    assert torch.equal(bits(weight), bits(old))
    assert_bit_identical(model, whole)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_noise_is_taken_back_on_an_exception(error):
    model = zoo.build("gpt_neox", torch.bfloat16)
    whole = snapshot(model)
    with pytest.raises(error), Magnitude(rate=0.3).applied(model):
        raise error
    assert_bit_identical(model, whole)


def test_entries_whose_grain_swallows_the_constant_are_counted_as_unmoved():
    model = zoo.build("llama", torch.bfloat16)
    found = anatomy.examine(model)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)
        weight[0, 0] = 1e-6
    one = {"rate": 1 / weight.numel(), "include": (name,)}
    matrix = found.matrix(name)
    seed = next(s for s in range(20_000) if SignFlip(seed=s, **one).draw(matrix).tolist() == [0])  # hits the tiny one
    with Magnitude(seed=seed, **one).applied(found) as done:
        assert int((weight != 1).sum()) == 1
        assert done.changed == 1
        assert done.zeros == weight.numel() - 1
