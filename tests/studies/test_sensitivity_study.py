"""The sensitivity study end to end on tiny models: what it finds, what it proves, how it resumes."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import zoo
from small_study import calibration, cut, loaded_llama, tokenizer

from ternary_probe.anatomy import examine
from ternary_probe.errors import ProbeError
from ternary_probe.loading import wrap
from ternary_probe.measure import Evaluator
from ternary_probe.perturb import EntryFlip, NotRestoredError, SignFlip, Ternarize, parse, sha256_weights
from ternary_probe.records import load_record
from ternary_probe.reports.sensitivity_sheet import sensitivity_sheet
from ternary_probe.sensitivity_record import SensitivityRecord
from ternary_probe.studies import sensitivity as study_module
from ternary_probe.studies.sensitivity import run_sensitivity
from ternary_probe.studies.sensitivity_options import SensitivityOptions

SMALL = SensitivityOptions(
    draws=3,
    rates=(0.01, 0.05),
    seeds=4,
    per="matrix",
    unit_rate=0.05,
    controls=1,
    singles=6,
    bound=0.05,
    super_bound=0.1,
    columns=2,
    random_columns=3,
    worst=2,
    fraction=0.1,
)


def run(options=SMALL, loaded=None, **how):
    scored = cut(3)
    return run_sensitivity(loaded or loaded_llama(), scored, calibration(scored), options, **how)


@cache
def record() -> SensitivityRecord:
    return run(replace(SMALL, plan=0.5))


def test_every_part_is_there_and_the_weights_are_as_before():
    loaded = loaded_llama()
    before = sha256_weights(loaded.model)
    found = run(loaded=loaded)
    assert sha256_weights(loaded.model) == before
    assert found.status == "ok"
    assert found.null_control == 0
    assert [(b.pool, b.rate) for b in found.bulk] == [(p, r) for p in ("outlier", "other") for r in (0.01, 0.05)]
    assert {u.unit for u in found.units} == {m.matrix for m in found.matrices}
    assert found.columns
    assert found.agreement
    assert found.super_weights
    assert found.worst_case
    assert found.additivity
    assert found.timing is not None
    assert found.timing.evaluations > 0


def test_a_unit_is_the_plain_measurement_of_its_flips():
    found = record()
    unit = found.units[-1]
    loaded = loaded_llama()
    anatomy = examine(loaded.model)
    evaluator = Evaluator(anatomy, cut(3))
    reference = evaluator.reference()
    spared = tuple(entry for name, entry in study_spared(found) if name == unit.unit)
    values = []
    for seed in range(4):
        flip = SignFlip(rate=0.05, seed=seed, include=(unit.unit,), spared={unit.unit: spared} if spared else None)
        with flip.applied(anatomy):
            values.append(evaluator.response(reference).kl.mean)
    assert unit.measured == pytest.approx(np.mean(values), rel=1e-9)
    assert unit.ci_low < unit.measured < unit.ci_high
    assert unit.stopped_by == "seeds"
    assert unit.looks == 1
    assert unit.seeds == 4
    assert unit.confidence == 0.95


def study_spared(found):
    """Entries of the tail, as the study's own screen names them."""
    loaded = loaded_llama()
    anatomy = examine(loaded.model)
    screen = study_module.fisher_screen(anatomy, cut(3), draws=found.draws, tail=found.bound)
    for entry in screen.tail:
        yield entry.matrix, entry.row * anatomy.matrix(entry.matrix).in_features + entry.column


def test_single_weights_are_measured_by_their_own_recipe():
    found = record()
    anatomy = examine(loaded_llama().model)
    evaluator = Evaluator(anatomy, cut(3))
    reference = evaluator.reference()
    for row in found.super_weights[:3]:
        with parse(row.recipe).applied(anatomy):
            response = evaluator.response(reference)
        assert row.flip_delta_nll == pytest.approx(response.nll.mean - reference.result.mean, abs=1e-9)
        assert row.flip_kl == pytest.approx(response.kl.mean, rel=1e-9)
        assert row.super_weight == (max(abs(row.flip_delta_nll), abs(row.removal_delta_nll or 0)) >= found.super_bound)
        if row.removal_delta_nll is None:
            assert abs(row.flip_delta_nll) < found.super_bound / 10
            continue
        with EntryFlip(entries={row.matrix: ((row.row, row.column),)}, to="zero").applied(anatomy):
            removed = evaluator.response(reference)
        assert row.removal_delta_nll == pytest.approx(removed.nll.mean - reference.result.mean, abs=1e-9)
    damage = [max(abs(r.flip_delta_nll), abs(r.removal_delta_nll or 0)) for r in found.super_weights]
    assert damage == sorted(damage, reverse=True)


def test_the_worst_case_grows_and_beats_random_flips():
    worst = record().worst_case
    assert worst.flips == len(worst.entries) == len(worst.delta_nll) == 2
    assert worst.delta_nll[0] == pytest.approx(max(s.flip_delta_nll for s in record().super_weights), abs=1e-9)
    assert worst.delta_nll[-1] > worst.random_delta_nll


def test_the_plan_is_measured_as_a_whole():
    plan = record().plan
    anatomy = examine(loaded_llama().model)
    evaluator = Evaluator(anatomy, cut(3))
    reference = evaluator.reference()
    recipe = Ternarize(scheme=plan.scheme, exclude=plan.exclude)
    with recipe.applied(anatomy):
        response = evaluator.response(reference)
    assert plan.plan.delta_nll == pytest.approx(response.nll.mean - reference.result.mean, abs=1e-9)
    assert plan.plan.kept == len(plan.exclude)
    assert 0.5 <= plan.plan.predicted_share < 1
    assert plan.plan.kl < plan.everything.kl
    assert all(m.ternary is not None for m in record().matrices)


def test_the_record_is_read_back(tmp_path):
    record().save(tmp_path / "record.json")
    assert load_record(tmp_path / "record.json") == record()


def test_a_rerun_measures_nothing_again_and_more_may_be_asked(tmp_path):
    first = run(out=tmp_path)
    second = run(out=tmp_path)
    assert second.timing.evaluations == 0
    assert second.model_copy(update={"timing": first.timing}) == first
    more = run(replace(SMALL, seeds=5), out=tmp_path)
    assert 0 < more.timing.evaluations < first.timing.evaluations
    with pytest.raises(ProbeError, match="another study"):
        run(replace(SMALL, draws=4), out=tmp_path)


def test_an_interrupted_study_continues_to_the_same_record(tmp_path, monkeypatch):
    whole = run()
    calls = 0
    sweep = study_module.Sweep
    original = sweep.perturbed

    def stops(self, recipes):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, recipes)

    monkeypatch.setattr(sweep, "perturbed", stops)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path)
    monkeypatch.setattr(sweep, "perturbed", original)
    again = run(out=tmp_path)
    assert again.model_copy(update={"timing": whole.timing}) == whole


def test_a_planted_super_weight_is_found_and_ranked_first():
    model, place = super_model()
    loaded = wrap(model, tokenizer())
    found = run(replace(SMALL, per="none", columns=0, random_columns=0, singles=12, worst=1), loaded)
    first = found.super_weights[0]
    assert (first.matrix, first.row, first.column) == place
    assert first.super_weight
    assert first.removal_delta_nll > 1.0
    assert found.worst_case.entries[0] == "@".join(map(str, place))


def super_model():
    """A model whose stream carries large constants, one of which a single entry of the first down_proj cancels.

    Without it that constant is all the head sees, and it answers with one token, whatever the text.
    """
    model = loaded_llama(seed=3).model
    with torch.no_grad():
        names = dict(model.named_parameters())
        embedding, head = names["model.embed_tokens.weight"], names["lm_head.weight"]
        head *= 0.1
        head[:, 0] = 3 * torch.randn(head.shape[0], generator=torch.Generator().manual_seed(5))
        head[:, 1:4] = 0.0
        embedding[:, :4] = 20.0
        for name, parameter in names.items():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 0.02
        gate, up, down = (names[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        gate[7], up[7], down[:, 7] = 0.0, 0.0, 0.0
        gate[7, :4], up[7, :4] = 0.5, 0.5  # no single one of these is as large a lever
        constant = torch.tensor(embedding.shape[1] ** 0.5)  # what the norm makes of the four coordinates, nearly
        down[0, 7] = float(-20.0 / (torch.nn.functional.silu(constant) * constant))
    return model, ("model.layers.0.mlp.down_proj.weight", 0, 7)


def test_a_random_model_has_no_super_weight():
    model = zoo.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
            else:
                parameter.fill_(1.0)
    found = run(replace(SMALL, per="none", columns=0, random_columns=0), wrap(model, tokenizer()))
    assert not any(s.super_weight for s in found.super_weights)


def test_precision_takes_more_seeds_where_it_must_and_says_so():
    tight = run(replace(SMALL, per="block", singles=0, columns=0, random_columns=0, worst=0, precision=0.25))
    assert {u.stopped_by for u in tight.units} <= {"precision", "seeds"}
    for unit in tight.units:
        half = (unit.ci_high - unit.ci_low) / 2
        if unit.stopped_by == "precision":
            assert half <= 0.25 * unit.measured
        assert unit.seeds in (4, 8, 16, 32, 64, 128)
        assert unit.confidence > 0.95


def test_the_budget_ends_the_looks_not_the_first_one():
    options = replace(SMALL, per="block", singles=0, columns=0, random_columns=0, worst=0, precision=0.001, budget=1e-6)
    found = run(options)
    assert {u.stopped_by for u in found.units} == {"budget"}
    assert all(u.seeds == 4 and u.measured is not None for u in found.units)
    assert any("budget" in note for note in found.notes)


def test_coverage_of_repeated_runs_with_other_seeds():
    """200 repeats of a look at 4 and more seeds of one block: the stopped interval covers the mean of 2,000 flips."""
    loaded = loaded_llama()
    anatomy = examine(loaded.model)
    evaluator = Evaluator(anatomy, cut(1))
    reference = evaluator.reference()
    names = tuple(m.name for m in anatomy.block_matrices if m.block == 1)
    from ternary_probe.measure.sweep import Sweep
    from ternary_probe.studies.sequential import look_at, planned_looks

    recipes = {str(seed): SignFlip(rate=0.05, seed=seed, include=names) for seed in range(2000)}
    values = [r.kl.mean for r in Sweep(evaluator, reference).perturbed(recipes).values()]
    truth = float(np.mean(values))
    looks = [look for look in planned_looks(8, 0.2) if look <= 64]
    generator = np.random.Generator(np.random.Philox(key=1))
    covered = 0
    for _ in range(400):
        drawn = generator.choice(values, 64, replace=False)
        for number, upto in enumerate(looks, start=1):
            looked = look_at(drawn[:upto], number, len(looks), 0.2)
            if looked.precise:
                break
        covered += looked.interval.low <= truth <= looked.interval.high
    assert 0.90 <= covered / 400 <= 0.99


def test_experts_are_ranked_and_those_without_tokens_are_not():
    model = zoo.build("mixtral")
    found = run(replace(SMALL, per="none"), wrap(model, tokenizer()))
    experts = [m for m in found.matrices if "experts" in m.matrix]
    assert experts
    assert any("fused experts" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 0}, "--draws"),
        ({"rates": (0.0,)}, "not in"),
        ({"rates": (float("nan"),)}, "not in"),
        ({"rates": (0.1, 0.1)}, "twice"),
        ({"pools": ("inner",)}, "unknown pool"),
        ({"per": "layer"}, "--per"),
        ({"seeds": 1}, "two seeds"),
        ({"precision": 0.0}, "--precision"),
        ({"budget": float("nan")}, "--budget"),
        ({"bound": -1.0}, "--bound"),
        ({"plan": 1.5}, "--plan"),
        ({"scheme": "nothing"}, "scheme"),
        ({"columns": -1}, "--columns"),
        ({"fraction": 1.0}, "fraction"),
    ],
)
def test_options_that_could_only_give_a_wrong_number_are_refused(change, message):
    with pytest.raises(ProbeError, match=message):
        replace(SMALL, **change)


def test_a_matrix_outside_the_blocks_is_refused():
    with pytest.raises(ProbeError, match="outside every block"):
        run(replace(SMALL, include=("lm_head.weight",)))


def test_weights_that_changed_are_an_error(monkeypatch):
    hashes = iter(["a" * 64, "b" * 64])
    monkeypatch.setattr(study_module, "sha256_weights", lambda _model: next(hashes))
    with pytest.raises(NotRestoredError):
        run(replace(SMALL, per="none", singles=0, columns=0, random_columns=0))


def without(name, share=1.0):
    """A loaded model of which a share of one matrix is zero."""
    loaded = loaded_llama()
    with torch.no_grad():
        weight = loaded.model.get_parameter(name)
        keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) >= share
        weight.mul_(keep)
    return loaded


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def test_a_matrix_of_zeros_is_not_applicable_and_the_rest_goes_on():
    found = run(replace(SMALL, plan=0.5), without(O_PROJ))
    units = {unit.unit: unit for unit in found.units}
    assert units[O_PROJ].status == "not_applicable"
    assert units[O_PROJ].measured is None
    feeding = {f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"}  # into the zeros: no damage, truly
    assert all((unit.measured > 0) != (name in feeding) for name, unit in units.items() if name != O_PROJ)
    assert found.status == "ok"
    assert found.additivity is not None
    assert any("nothing but zeros" in note for note in found.notes)


def test_a_flip_that_hits_zeros_only_counts_as_no_damage():
    found = run(replace(SMALL, unit_rate=0.002, seeds=6), without(O_PROJ, 0.8))
    unit = next(unit for unit in found.units if unit.unit == O_PROJ)
    assert unit.seeds == 6
    assert unit.measured is not None


def test_a_plan_on_weights_that_are_ternary_already_takes_that_as_no_damage():
    loaded = loaded_llama()
    name = "model.layers.0.mlp.down_proj.weight"
    anatomy = examine(loaded.model)
    with Ternarize(scheme="optimal", include=(name,)).applied(anatomy):
        ternary = anatomy.matrix(name).view().clone()
    with torch.no_grad():
        anatomy.matrix(name).view().copy_(ternary)
    found = run(replace(SMALL, per="none", singles=0, columns=0, random_columns=0, plan=0.5, scheme="optimal"), loaded)
    assert next(m for m in found.matrices if m.matrix == name).ternary == 0
    assert name not in found.plan.exclude


def test_the_prediction_counts_the_entries_really_drawn():
    name = "model.layers.1.self_attn.v_proj.weight"
    found = run(replace(SMALL, include=(name,), rates=(), unit_rate=0.003, singles=0, columns=0, random_columns=0))
    unit = found.units[0]
    assert unit.drawn == round(0.003 * unit.entries) / unit.entries != 0.003
    assert unit.predicted == pytest.approx(found.matrices[0].predicted * unit.drawn)
    assert found.matrices[0].measured == pytest.approx(unit.measured / unit.drawn)


def test_what_breaks_the_model_comes_first():
    loaded = loaded_llama()
    block = loaded.model.model.layers[1]
    weight = block.self_attn.v_proj.weight
    with torch.no_grad():
        weight[0, 0] = 1.0
    block.register_forward_hook(lambda _module, _args, output: output + 0 * weight[0, 0].sqrt())
    found = run(replace(SMALL, per="block", unit_rate=0.9, bound=1e9, rates=(0.01,), pools=("other",)), loaded)
    sheet = sensitivity_sheet(found)
    assert found.status == "non_finite"
    assert "break the model in block 1" in " ".join(sheet.headline)
    table = next(t for t in sheet.tables if t.title == "Worst blocks")
    assert table.rows[0][0] == "block 1"


@pytest.mark.parametrize(
    "cell", [{}, {"delta_nll": "a", "kl": 1.0, "windows": []}, {"delta_nll": 1.0, "kl": 1.0, "windows": None}]
)
def test_a_damaged_cell_is_one_clear_error(tmp_path, cell):
    options = replace(SMALL, per="none", columns=0, random_columns=0, worst=0)
    run(options, out=tmp_path)
    with sqlite3.connect(tmp_path / "cells.sqlite") as db:
        db.execute("UPDATE cells SET value = ?", [json.dumps(cell)])
    with pytest.raises(ProbeError, match="damaged"):
        run(options, out=tmp_path)


def test_a_foreign_database_is_one_clear_error(tmp_path):
    with sqlite3.connect(tmp_path / "cells.sqlite") as db:
        db.execute("CREATE TABLE study (a int)")
    with pytest.raises(ProbeError, match="cannot be read as the cells of a study"):
        run(out=tmp_path)


@pytest.mark.parametrize("change", [{"rates": (1e-7,)}, {"unit_rate": 1e-7}])
def test_a_rate_that_flips_nothing_is_refused_before_anything_is_measured(change, monkeypatch):
    monkeypatch.setattr(study_module, "fisher_screen", lambda *_a, **_k: pytest.fail("measured"))
    with pytest.raises(ProbeError, match="no flip at all"):
        run(replace(SMALL, **change))


def test_a_bound_that_spares_everything_leaves_no_bulk_to_measure():
    found = run(replace(SMALL, bound=1e-30, singles=2, columns=0, random_columns=0, per="none"))
    assert {row.status for row in found.bulk} == {"not_applicable"}
    assert any("raise --singles" in note for note in found.notes)


def test_one_storage_under_two_parameters_is_refused():
    loaded = loaded_llama()
    first, second = (layer.mlp.down_proj for layer in loaded.model.model.layers)
    second.weight = torch.nn.Parameter(first.weight.data, requires_grad=False)
    with pytest.raises(ProbeError, match="two parameters"):
        run(loaded=loaded)
