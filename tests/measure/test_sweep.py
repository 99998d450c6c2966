"""Sweeps of many experiments against one full run each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo
from small_study import cut, speaking_llama

from ternary_probe.anatomy import SelfCheck, examine, first_affected, negate_inputs, record_blocks
from ternary_probe.errors import ProbeError
from ternary_probe.measure import Evaluator
from ternary_probe.measure.sweep import Sweep
from ternary_probe.perturb import ColumnFlip, Columns, EntryFlip, SignFlip, parse, sha256_weights


@pytest.fixture(scope="module")
def llama():
    found = examine(speaking_llama(num_hidden_layers=3))
    evaluator = Evaluator(found, cut(3))
    return found, evaluator, evaluator.reference()


def recipes(found):
    by_block = {
        f"block {b.index}": SignFlip(
            rate=0.05, include=tuple(m.name for m in found.block_matrices if m.block == b.index)
        )
        for b in found.blocks
    }
    middle = next(m for m in found.block_matrices if m.block == 1)
    return {
        **by_block,
        "entry": EntryFlip(entries={middle.name: ((2, 3),)}),
        "several": parse(f"sign_flip:rate=0.1,include={middle.name}+magnitude:rate=0.1"),
    }


@pytest.mark.parametrize("resumes", [True, False])
def test_every_experiment_is_what_a_full_run_gives(llama, resumes):
    found, evaluator, reference = llama
    before = sha256_weights(found.model)
    sweep = Sweep(evaluator, reference)
    assert sweep.resumes
    assert not sweep.note
    sweep.resumes = resumes
    measured = sweep.perturbed(recipes(found))
    for key, recipe in recipes(found).items():
        with recipe.applied(found):
            full = evaluator.response(reference)
        assert np.array_equal(measured[key].nll.sums, full.nll.sums)
        assert np.array_equal(measured[key].kl.sums, full.kl.sums)
        assert measured[key].kl.mean > 0
    assert sha256_weights(found.model) == before


def test_columns_are_measured_against_a_null_that_is_exactly_zero(llama):
    found, evaluator, reference = llama
    matrix = next(m for m in found.block_matrices if m.block == 1)
    measured = Sweep(evaluator, reference).negated({matrix.name: (0, 5, 7)}, together=2)
    assert set(measured) == {(matrix.name, 0), (matrix.name, 5), (matrix.name, 7)}
    for (_, column), (now, null) in measured.items():
        recipe = ColumnFlip(columns=Columns(select="listed", listed=(column,)), include=(matrix.name,))
        with recipe.applied(found):
            full = evaluator.response(reference)
        assert now.nll.mean == pytest.approx(full.nll.mean, rel=1e-6)
        assert now.kl.mean == pytest.approx(full.kl.mean, rel=1e-4, abs=1e-7)
        assert null.nll.mean == pytest.approx(reference.result.mean, rel=1e-6)
        assert abs(null.kl.mean) < 1e-7


def test_progress_counts_windows_times_experiments(llama):
    found, evaluator, reference = llama
    seen = []
    Sweep(evaluator, reference, progress=lambda done, total: seen.append((done, total))).perturbed(recipes(found))
    total = 3 * len(recipes(found))
    assert seen == [(i, total) for i in range(total)] + [(total, total)]


def test_a_model_that_changed_meanwhile_is_refused(llama):
    found, evaluator, reference = llama
    matrix = found.block_matrices[0]
    with (
        SignFlip(rate=0.1, include=(matrix.name,)).applied(found),
        pytest.raises(ProbeError, match="changed meanwhile"),
    ):
        Sweep(evaluator, reference).perturbed({"again": SignFlip(rate=0.01)})


def test_a_model_without_reruns_says_so():
    found = examine(zoo.build("llama"))
    found.checks["suffix"] = SelfCheck("suffix", False, 1.0, "reason")
    evaluator = Evaluator(found, cut(2))
    sweep = Sweep(evaluator, evaluator.reference())
    assert not sweep.resumes
    assert "reason" in sweep.note
    key = found.block_matrices[-1].name
    with torch.no_grad():
        assert sweep.perturbed({key: SignFlip(rate=0.2, include=(key,))})[key].kl.mean > 0


def test_negation_is_the_flipped_column_bit_for_bit_on_every_matrix_of_the_demo_model(demo_model):
    """Hidden states under a negated input equal those under the flipped weight column, in fp32, difference exactly 0."""
    found = examine(demo_model.model)
    ids = torch.arange(16)[None] * 37 % 1000
    with torch.no_grad():
        recording = record_blocks(found, ids)
        for index, matrix in enumerate(found.block_matrices):
            column = index % matrix.in_features
            start = first_affected(found, [matrix])
            with negate_inputs(found, {matrix.name: torch.tensor([column])}):
                negated = recording.resume(start)
            flip = ColumnFlip(columns=Columns(select="listed", listed=(column,)), include=(matrix.name,))
            with flip.applied(found):
                assert torch.equal(recording.resume(start), negated), matrix.name
