"""The sensitivity study end to end on tiny models: what it finds, what it proves, how it resumes."""

from __future__ import annotations

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
from ternary_probe.perturb import NotRestoredError, SignFlip, Ternarize, parse, sha256_weights
from ternary_probe.records import load_record
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
        assert row.super_weight == (max(abs(row.flip_delta_nll), abs(row.removal_delta_nll)) >= found.super_bound)
    damage = [max(abs(r.flip_delta_nll), abs(r.removal_delta_nll)) for r in found.super_weights]
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
