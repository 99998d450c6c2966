"""A sweep: one loaded model, tasks built once, paired differences, and nothing lost where a recipe fails."""

from __future__ import annotations

import random

import numpy as np
import pytest
import ternary_probe_lm_eval.model as model_module
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._index import TaskIndex
from lm_eval_runs import SENTENCES, choice_yaml, rolling_yaml, run_tasks, tiny_lm
from small_study import bits, differing, speaking_llama, tokenizer
from ternary_probe_lm_eval import SweepOptions, opening, sweep
from ternary_probe_lm_eval.records import SweepRecord
from tiny import tiny_llama_folder

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import NotRestoredError, SignFlip, parse

RECIPES = ("sign_flip:rate=0.02,seed=1", "magnitude:rate=0.3", "sign_flip:rate=0.05,columns=outlier,fraction=0.1")
OPTIONS = SweepOptions(draws=500)


def run(tmp_path, recipes=RECIPES, *, lm=None, tasks=None, options=OPTIONS, **how) -> SweepRecord:
    tasks = tasks or [rolling_yaml(tmp_path), choice_yaml(tmp_path)]
    return sweep(lm or tiny_lm(), tasks, recipes, options=options, **how)


def values(result) -> dict[str, float | None]:
    return {metric.metric: metric.value for metric in result.metrics}


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """Every recipe in a model and run of its own."""
    folder = tmp_path_factory.mktemp("separate")
    tasks = [rolling_yaml(folder), choice_yaml(folder)]
    recipes = [None, *RECIPES]
    return {recipe: run_tasks(tiny_lm(perturb=recipe) if recipe else tiny_lm(), *tasks) for recipe in recipes}


def test_every_metric_is_that_of_a_run_of_its_own_and_the_weights_are_as_before(tmp_path, separate):
    lm = tiny_lm()
    before = bits(lm.loaded.model)
    record = run(tmp_path, lm=lm)
    assert record.status == "ok"
    assert not differing(lm.loaded.model, before)
    assert record.weights_after == record.model.weights_sha256
    alone = {str(parse(recipe)): found for recipe, found in separate.items() if recipe}
    for name, tasks in [("clean", record.clean), *((r.recipe, r.tasks) for r in record.recipes)]:
        results = separate[None] if name == "clean" else alone[name]
        for task in tasks:
            found = results["results"][task.task]
            assert task.metrics
            for metric in task.metrics:
                assert metric.value == pytest.approx(found[f"{metric.metric},none"], rel=1e-12), (name, metric)
    for recipe in record.recipes:
        assert recipe.checksum_before == recipe.checksum_after != recipe.checksum_during
        assert recipe.entries > 0


def test_differences_are_paired_by_document(tmp_path, separate):
    record = run(tmp_path)
    clean, perturbed = separate[None]["samples"], separate[RECIPES[0]]["samples"]
    name = str(parse(RECIPES[0]))

    acc = record.difference(name, "local_choices", "acc")
    right = [[row["acc"] for row in side["local_choices"]] for side in (clean, perturbed)]
    lost = sum(a > b for a, b in zip(*right, strict=True))
    gained = sum(a < b for a, b in zip(*right, strict=True))
    assert acc.answers is not None
    assert (acc.answers.lost, acc.answers.gained, acc.pairs) == (lost, gained, 14)
    assert acc.difference == pytest.approx((gained - lost) / 14)

    nll = record.difference(name, "local_documents", "token_nll")
    sums = [sum(row["filtered_resps"][0] for row in side["local_documents"]) for side in (clean, perturbed)]
    tokens = sum(row["filtered_resps"][0].tokens for row in clean["local_documents"])
    assert nll.difference == pytest.approx((sums[0] - sums[1]) / tokens, rel=1e-9)
    assert nll.ci_low < nll.difference < nll.ci_high

    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        found = record.difference(name, "local_documents", metric)
        both = [values(side)[metric] for side in (record.clean[0], record.recipes[0].tasks[0])]
        assert found.difference == pytest.approx(both[1] - both[0], rel=1e-9), metric
        assert found.answers is None
        assert found.ci_low <= found.difference <= found.ci_high


def test_the_model_is_loaded_once_the_tasks_built_once_and_lm_evals_index_is_left_alone(tmp_path, monkeypatch):
    loads, builds, indexed = [], [], []
    load, download, build = opening.load, ConfigurableTask.download, TaskIndex.build
    monkeypatch.setattr(opening, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    monkeypatch.setattr(ConfigurableTask, "download", lambda self, *a, **k: builds.append(1) or download(self, *a, **k))
    monkeypatch.setattr(TaskIndex, "build", staticmethod(lambda paths: indexed.extend(paths) or build(paths)))
    folder = tiny_llama_folder(tmp_path)
    steps = []
    record = sweep(
        str(folder),
        [rolling_yaml(tmp_path), "ternary_probe_nll"],
        RECIPES[:2],
        options=SweepOptions(draws=200, metadata={"window": 32, "windows": 3}),
        progress=lambda done, total, label: steps.append((done, total, label)),
    )
    assert record.status == "ok"
    assert len(loads) == 1
    assert len(builds) == 2
    assert not any("site-packages" in str(path) for path in indexed)
    assert record.timing.evaluations == 3
    assert [step[0] for step in steps] == [0, 1, 2, 3]


def test_a_text_cut_by_its_task_is_paired_by_window(tmp_path):
    options = SweepOptions(draws=200, metadata={"window": 32, "windows": 4})
    lm = tiny_lm()
    record = run(tmp_path, RECIPES[:1], lm=lm, tasks=["ternary_probe_nll"], options=options)
    found = record.difference(str(parse(RECIPES[0])), "ternary_probe_nll", "token_nll")
    assert (found.resampled, found.pairs) == ("windows", 4)
    assert found.difference == pytest.approx(
        values(record.recipes[0].tasks[0])["nll"] - values(record.clean[0])["nll"], rel=1e-9
    )
    assert found.ci_low < found.difference < found.ci_high
    assert record.tasks[0].facts["protocol"]["windows"] == 4


def test_a_recipe_that_fails_says_why_and_costs_no_other(tmp_path):
    record = run(tmp_path, [RECIPES[0], "sign_flip:rate=0.1,include=no.such.matrix", RECIPES[1]])
    assert [recipe.status for recipe in record.recipes] == ["ok", "failed", "ok"]
    assert "no.such.matrix" in record.recipes[1].reason
    assert record.status == "failed"
    assert any("no.such.matrix" in note for note in record.notes)
    assert values(record.recipes[2].tasks[0]) == values(run(tmp_path, [RECIPES[1]]).recipes[0].tasks[0])


def test_a_task_that_fails_under_one_recipe_costs_neither_the_other_tasks_nor_the_other_recipes(tmp_path, monkeypatch):
    plain = model_module.TernaryProbeLM.plain_loglikelihood

    def failing(self, requests, *args, **kwargs):
        if self.recipe_now is not None and self.recipe_now.kind == "magnitude":
            raise RuntimeError("CUDA out of memory")
        return plain(self, requests, *args, **kwargs)

    monkeypatch.setattr(model_module.TernaryProbeLM, "plain_loglikelihood", failing)
    lm = tiny_lm()
    before = bits(lm.loaded.model)
    record = run(tmp_path, RECIPES[:2], lm=lm)
    assert [recipe.status for recipe in record.recipes] == ["ok", "failed"]
    documents, choices = record.recipes[1].tasks
    assert documents.status == "ok"
    assert documents.differences
    assert choices.status == "failed"
    assert "out of memory" in choices.reason
    assert not differing(lm.loaded.model, before)


def test_after_weights_that_were_not_restored_nothing_is_run_and_the_sweep_is_an_error(tmp_path, monkeypatch):
    edits = SignFlip.edits

    def leaky(self, anatomy):
        for edit in edits(self, anatomy):
            yield edit._replace(undo=lambda: None)

    monkeypatch.setattr(SignFlip, "edits", leaky)
    with pytest.raises(NotRestoredError):
        run(tmp_path, RECIPES[:2])


def test_an_interrupted_sweep_continues_where_it_stopped(tmp_path):
    def stop(done, total, label):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, out=tmp_path / "sweep", progress=stop)
    steps = []
    record = run(tmp_path, out=tmp_path / "sweep", progress=lambda done, *_: steps.append(done))
    assert record.timing.evaluations == 2
    assert steps == [0, 2, 3, 4]
    whole = run(tmp_path)
    assert record.clean == whole.clean
    for found, expected in zip(record.recipes, whole.recipes, strict=True):
        assert found.model_copy(update={"seconds": 0.0}) == expected.model_copy(update={"seconds": 0.0})
    assert SweepRecord.load(tmp_path / "sweep" / "record.json") == record
    with pytest.raises(ProbeError, match="another study"):
        run(tmp_path, out=tmp_path / "sweep", options=SweepOptions(draws=500, limit=2))


def test_few_shot_examples_are_the_same_for_every_recipe(tmp_path):
    seen: list[list[tuple]] = []

    class Listening(model_module.TernaryProbeLM):
        def plain_loglikelihood(self, requests, *args, **kwargs):
            seen.append([request.args for request in requests])
            return super().plain_loglikelihood(requests, *args, **kwargs)

    lm = Listening(tiny_lm().loaded, max_length=512)
    task = choice_yaml(tmp_path, fewshot_split="test", num_fewshot=2)
    sweep(lm, [task], RECIPES[:2], options=SweepOptions(draws=200))
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert all(
        context.count("The mill") + context.count("The clock") >= 0 and "\n\n" in context for context, _ in seen[0]
    )


def test_the_callers_random_generators_are_left_as_they_were(tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    run(tmp_path, RECIPES[:1])
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_a_broken_model_is_flagged_and_its_figures_are_null_with_a_reason(tmp_path, monkeypatch):
    edits = SignFlip.edits

    def breaking(self, anatomy):
        for edit in edits(self, anatomy):
            matrix = self.targets(anatomy)[0].view()
            kept = matrix.clone()
            matrix.fill_(float("nan"))
            yield edit._replace(undo=lambda kept=kept, matrix=matrix, undo=edit.undo: (matrix.copy_(kept), undo()))

    monkeypatch.setattr(SignFlip, "edits", breaking)
    record = run(tmp_path, ["sign_flip:rate=0.02,include=*layers.0.self_attn.q_proj*"])
    (broken,) = record.recipes
    assert any("NaN" in warning for warning in broken.warnings)
    nll = record.difference(broken.recipe, "local_documents", "token_nll")
    assert (nll.status, nll.difference) == ("non_finite", None)
    assert values(broken.tasks[0])["word_perplexity"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipes": []}, "at least one recipe"),
        ({"recipes": ["sign_flip:rate=0.1", "sign_flip:rate=0.10"]}, "given twice"),
        ({"recipes": ["sing_flip:rate=0.1"]}, "did you mean sign_flip"),
        ({"lm": {"perturb": "sign_flip:rate=0.1"}}, "leave perturb="),
        ({"tasks": ["/no/such/task.yaml"]}, "cannot be built"),
        ({"options": {"include_path": "/no/such/folder"}}, "no folder"),
        ({"options": {"limit": 0}}, "leaves no document"),
        ({"how": {"dtype": "float32"}}, "wrapped already"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path, change, message):
    arguments = {name: value for name, value in change.items() if name in {"recipes", "tasks"}}
    with pytest.raises(ProbeError, match=message):
        run(
            tmp_path,
            lm=tiny_lm(**change.get("lm", {})),
            options=SweepOptions(**change.get("options", {})),
            progress=lambda *_: pytest.fail("something ran"),
            **arguments,
            **change.get("how", {}),
        )


def test_an_unknown_task_name_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))  # an empty index builds at once
    with pytest.raises(ProbeError, match="no task 'local_choicez'"):
        run(tmp_path, tasks=["local_choicez"])


def test_a_folder_of_tasks_and_a_glob_of_names_find_local_tasks(tmp_path):
    choice_yaml(tmp_path)
    rolling_yaml(tmp_path, sentences=SENTENCES[:2])
    record = run(
        tmp_path, RECIPES[:1], tasks=["local_*"], options=SweepOptions(draws=200, include_path=tmp_path, limit=5)
    )
    assert [(task.task, task.documents) for task in record.tasks] == [("local_choices", 5), ("local_documents", 2)]


def test_a_model_in_memory_is_swept_with_its_tokenizer(tmp_path):
    model = speaking_llama()
    with pytest.raises(ProbeError, match="tokenizer"):
        sweep(model, [choice_yaml(tmp_path)], RECIPES[:1])
    record = sweep(model, [choice_yaml(tmp_path)], RECIPES[:1], tokenizer=tokenizer(), options=OPTIONS)
    assert record.model.kind == "memory"
    assert record.status == "ok"
