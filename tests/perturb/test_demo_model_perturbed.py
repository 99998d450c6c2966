"""The real model: known numbers of flips, exact undo, and planted outliers that do not move it."""

from __future__ import annotations

import pytest
import torch
from weight_oracle import first_columns, logical

from ternary_probe import anatomy
from ternary_probe.measure import measure_activations, outlier_amplitude
from ternary_probe.perturb import Columns, OutlierColumns, SignFlip, parse, sha256_weights
from ternary_probe.text import make_windows, read_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(demo_model):
    return anatomy.examine(demo_model.model)


@pytest.fixture(scope="module")
def text(demo_model):
    return make_windows(read_text(), demo_model.tokenizer, window=192, windows=1)


def nll(model, ids):
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def test_count_matched_flips_have_the_known_totals_and_are_undone(demo_model, found):
    matrices = list(found.block_matrices)
    outlier = first_columns(matrices, 0.05)
    whole = sha256_weights(demo_model.model)
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.29.mlp.down_proj.weight"]
    before = {name: logical(demo_model.model, name) for name in names}
    for rate, flips, inside in ((0.001, 5_160, (5, 44)), (0.005, 25_950, (27, 219)), (0.02, 103_740, (108, 876))):
        columns = Columns(select="outlier")
        with (
            SignFlip(rate=rate, matching="count", columns=columns)
            .resolved_with(matrices, outlier)
            .applied(found) as done
        ):
            assert done.entries == flips
            for name, count in zip(names, inside, strict=True):
                moved = logical(demo_model.model, name).view(torch.int32) != before[name].view(torch.int32)
                assert int(moved.sum()) == count
    assert sha256_weights(demo_model.model) == whole


@pytest.mark.parametrize("k", [2, 16])
def test_preserving_plants_do_not_move_the_clean_nll(demo_model, found, text, k):
    clean = nll(demo_model.model, text.inputs)
    with OutlierColumns(k=k).applied(found) as done:
        planted = nll(demo_model.model, text.inputs)
    assert len(done.matrices) == 60 + 150  # norms in the blocks, and q, k, v, gate and up of thirty blocks
    assert abs(planted - clean) < 1e-4


def test_planted_outliers_are_found_again_and_a_composition_is_undone(demo_model, found, text):
    whole = sha256_weights(demo_model.model)
    planted = OutlierColumns(k=4096, number=8).planted(found)
    options = "rate=0.005,columns=outlier,matching=count,include=" + ";".join(planted)
    recipe = parse(f"outlier_columns:k=4096,number=8+sign_flip:{options}").resolve(found, text)
    for name, columns in recipe.parts[1].columns.outlier.items():
        assert set(planted[name]) <= set(columns)
    with recipe.applied(found) as done:
        assert 0 < done.zeros < 1e-3 * done.entries  # the weights lie on a 4-bit grid that has a zero
    assert sha256_weights(demo_model.model) == whole


def test_outlier_columns_stick_out_as_published(found, text):
    measured = measure_activations(found, text)
    outlier = measured.outlier_columns(0.05, "energy")
    amplitudes = [outlier_amplitude(measured.moments[name], columns, None) for name, columns in outlier.items()]
    assert len(amplitudes) == 210
    assert 8 < sum(a.n_alpha2_outlier for a in amplitudes) / 210 < 14
