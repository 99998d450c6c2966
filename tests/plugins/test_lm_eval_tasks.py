"""The task ``ternary_probe_nll``: the command's figures, in lm-eval's table, and the traps of lm-eval's tasks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from lm_eval_runs import NLL_YAML, SENTENCES, choice_yaml, rolling_yaml, run_tasks, tiny_lm
from small_study import bits, differing, loaded_llama, speaking_llama, tokenizer
from ternary_probe_lm_eval import TernaryProbeLM
from ternary_probe_lm_eval.console import TASKS
from ternary_probe_lm_eval.document import DocumentLogLikelihood, WindowNll
from ternary_probe_lm_eval.routes import HOOK_YAML
from ternary_probe_lm_eval.task_options import LeverageRequest, TextRequest
from ternary_probe_lm_eval.text_tasks import NLL_TASK, standard_error, text_figures

from ternary_probe.errors import ProbeError
from ternary_probe.loading import wrap
from ternary_probe.studies.perplexity import run_perplexity
from ternary_probe.text import calibration_windows, make_windows, read_text

CUTS = {
    "default": {"window": 32, "windows": 5},
    "rolling": {"protocol": "rolling", "window": 32, "windows": 5},
    "strided": {"protocol": "strided", "window": 32, "stride": 8, "windows": 5},
    "disjoint with BOS": {"protocol": "disjoint", "window": 32, "bos": "every_window", "windows": 5},
    "paper": {"protocol": "dong2026", "window": 32, "windows": 5},
}


def figures(results, task: str = NLL_TASK) -> dict[str, float]:
    return {key.removesuffix(",none"): value for key, value in results["results"][task].items() if "," in key}


def of_the_command(recipe: str | None = None, **cut):
    text = read_text()
    windows = make_windows(text, tokenizer(), **cut)
    return run_perplexity(
        loaded_llama(), windows, recipe=recipe, calibration=lambda: calibration_windows(text, tokenizer(), windows)
    )


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_protocol_gives_the_figures_of_the_perplexity_command(cut):
    lm = tiny_lm()
    found = figures(run_tasks(lm, NLL_TASK, **cut))
    record = of_the_command(**cut)
    for name in ("nll", "token_perplexity", "word_perplexity", "byte_perplexity"):
        assert found[name] == pytest.approx(getattr(record, name), rel=1e-12), name
    protocol = lm.get_model_info()["ternary_probe"]["tasks"][NLL_TASK]["protocol"]
    assert protocol["tokens_scored"] == record.tokens_scored
    assert protocol["name"] == cut.get("protocol", "disjoint")


def test_without_any_option_the_task_and_the_command_score_the_same_windows():
    request = TextRequest.from_metadata({}, NLL_TASK)
    options = request.cutting()
    assert options == type(options)()


@pytest.mark.parametrize("recipe", ["sign_flip:rate=0.05,seed=3", "sign_flip:rate=0.05,columns=outlier,fraction=0.1"])
def test_a_perturbed_model_gives_the_commands_figure_and_is_clean_afterwards(recipe):
    lm = tiny_lm(perturb=recipe)
    before = bits(lm.loaded.model)
    found = figures(run_tasks(lm, NLL_TASK, window=32, windows=5))
    assert found["nll"] == pytest.approx(of_the_command(recipe, window=32, windows=5).nll, rel=1e-12)
    assert found["nll"] != pytest.approx(of_the_command(window=32, windows=5).nll, rel=1e-3)
    assert not differing(lm.loaded.model, before)


def test_a_vocabulary_of_a_real_models_size_does_not_part_the_task_from_the_command():
    """Torch's log-softmax on a CPU loses 5e-6 of the NLL there."""
    loaded = wrap(speaking_llama(vocab_size=50_000), tokenizer())
    found = figures(run_tasks(TernaryProbeLM(loaded), NLL_TASK, window=32, windows=3))
    record = run_perplexity(loaded, make_windows(read_text(), tokenizer(), window=32, windows=3))
    assert found["nll"] == pytest.approx(record.nll, rel=1e-12)


def test_mixed_precision_is_scored_as_the_model_scores_every_other_text():
    plain = figures(run_tasks(tiny_lm(), NLL_TASK, window=32, windows=3))["nll"]
    mixed = figures(run_tasks(tiny_lm(mixed_precision_dtype="bfloat16"), NLL_TASK, window=32, windows=3))["nll"]
    assert mixed != plain
    assert mixed == pytest.approx(plain, rel=0.05)


def test_the_standard_error_is_that_of_the_mean_of_equal_windows():
    found = figures(run_tasks(tiny_lm(), NLL_TASK, window=32, windows=6))
    means = np.array(of_the_command(window=32, windows=6).nll_windows)
    assert found["nll_stderr"] == pytest.approx(means.std(ddof=1) / math.sqrt(6), rel=1e-5)
    assert found["token_perplexity_stderr"] == pytest.approx(found["token_perplexity"] * found["nll_stderr"], rel=1e-9)
    assert found["bits_per_byte_stderr"] / found["bits_per_byte"] == pytest.approx(found["nll_stderr"] / found["nll"])


def test_the_standard_error_of_unequal_windows_covers_what_repeated_texts_do():
    rng = np.random.Generator(np.random.Philox(key=11))
    rates, errors = [], []
    for _ in range(400):
        counts = rng.integers(5, 60, 40)
        sums = counts * 3.0 + rng.normal(0, 2.0, 40) * counts
        score = DocumentLogLikelihood([WindowNll(float(s), int(c), 0.0) for s, c in zip(sums, counts, strict=True)])
        rates.append(score.nll / score.tokens)
        errors.append(standard_error(score))
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.08)


def test_lm_evals_table_shows_the_standard_error_beside_the_figure():
    results = run_tasks(tiny_lm(), NLL_TASK, window=32, windows=5)
    found = figures(results)
    row = next(line for line in make_table(results).splitlines() if "|nll " in line)
    assert f"{found['nll']:.4f}" in row
    assert f"{found['nll_stderr']:.4f}" in row


def test_one_window_gives_a_figure_and_no_standard_error():
    found = figures(run_tasks(tiny_lm(), NLL_TASK, window=32, windows=1))
    assert found["nll_stderr"] == "N/A"
    assert found["nll"] > 0


def test_an_overflowing_perplexity_keeps_its_nll():
    score = DocumentLogLikelihood([WindowNll(9e5, 10, 0.0), WindowNll(8e5, 10, 0.0)], words=2, bytes=40_000)
    found = text_figures({}, [score])
    assert found["nll"] == 85_000
    assert found["token_perplexity"] is None
    assert found["word_perplexity"] is None
    assert found["byte_perplexity"] == pytest.approx(math.exp(1.7e6 / 40_000))
    assert "token_perplexity_stderr" not in found


def test_a_broken_model_gives_no_figure_says_why_and_costs_no_other_task(tmp_path):
    lm = tiny_lm()
    with torch.no_grad():
        next(iter(lm.loaded.model.parameters())).fill_(math.nan)
    results = run_tasks(lm, NLL_TASK, choice_yaml(tmp_path), window=32, windows=2)
    found = figures(results)
    assert [found[name] for name in ("nll", "token_perplexity", "word_perplexity", "bits_per_byte")] == [None] * 4
    assert "acc,none" in results["results"]["local_choices"]
    assert any("not finite" in note for note in lm.get_model_info()["ternary_probe"]["notes"])
    make_table(results)


def test_a_users_file_is_scored_by_a_path_relative_to_the_working_directory(tmp_path, monkeypatch):
    text = " ".join(SENTENCES)
    (tmp_path / "own.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    found = figures(run_tasks(tiny_lm(), NLL_TASK, text_file="own.txt", window=32))
    windows = make_windows(read_text(tmp_path / "own.txt"), tokenizer(), window=32)
    assert found["nll"] == pytest.approx(run_perplexity(loaded_llama(), windows).nll, rel=1e-6)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"text_file": "/no/such/file.txt"}, "cannot be read"),
        ({"protocol": "rollin"}, "protocol=rollin"),
        ({"window": 1}, "window=1"),
        ({"bos": "twice"}, "bos=twice"),
        ({"windows": 2.5}, "windows=2.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_are_refused_when_the_task_is_built(metadata, message):
    with pytest.raises(ProbeError, match=message):
        TaskManager(include_defaults=False, include_path=[str(TASKS)], metadata=metadata).load([NLL_TASK])


def test_numbers_arrive_as_lm_eval_guesses_them_and_are_cast():
    request = TextRequest.from_metadata({"window": 64.0, "windows": "3", "stride": 16, "bos": None}, NLL_TASK)
    assert (request.window, request.windows, request.stride, request.bos) == (64, 3, 16, "none")
    assert request.protocol == "strided"  # nothing else has a stride


def test_other_tasks_options_pass_and_a_misspelt_one_is_pointed_out(caplog):
    metadata = {"pretrained": "x", "max_seq_lengths": [4096], "dtype": "float32", "protocl": "rolling", "version": 1}
    request = TextRequest.from_metadata(metadata, NLL_TASK)
    assert request.protocol == "disjoint"
    assert [r.message for r in caplog.records] == [
        "ternary_probe_nll: --metadata protocl is not used (did you mean protocol?)"
    ]


def test_a_text_that_changes_between_building_and_scoring_is_refused(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(" ".join(SENTENCES))
    request = TextRequest.from_metadata({"text_file": str(file)}, NLL_TASK)
    file.write_text(" ".join(reversed(SENTENCES)))
    with pytest.raises(ProbeError, match="changed"):
        TextRequest.decode(request.encode()).read()


@pytest.mark.parametrize("kind", [TextRequest, LeverageRequest])
def test_requests_differ_wherever_the_answer_may(kind, tmp_path):
    """lm-eval's caches know a request by its text alone."""
    (tmp_path / "own.txt").write_text(" ".join(SENTENCES))
    changes = [{}, {"text_file": str(tmp_path / "own.txt")}, {"protocol": "rolling"}, {"window": 64}, {"windows": 3}]
    changes += [{"stride": 4}, {"bos": "once"}]
    if kind is LeverageRequest:
        changes += [{"rates": 0.1}, {"seeds": 3}, {"seed": 1}, {"arms": "outlier"}, {"matching": "rate"}]
        changes += [{"fraction": 0.2}, {"by": "mean_abs"}, {"include": "*q_proj"}, {"exclude": "*q_proj"}]
        changes += [{"calibration": "x.txt"}]
    encoded = [kind.from_metadata(change, NLL_TASK).encode() for change in changes]
    assert len(set(encoded)) == len(changes)
    assert all(kind.decode(text).encode() == text for text in encoded)


def test_the_request_cache_never_serves_another_text(tmp_path, monkeypatch):
    """lm-eval's cache of requests is keyed by the task's name; here one task has many texts."""
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "requests"))
    for name, text in (("a", SENTENCES[:3]), ("b", SENTENCES[3:])):
        (tmp_path / f"{name}.txt").write_text(" ".join(text * 2))
    lm = tiny_lm()
    found = [
        figures(run_tasks(lm, NLL_TASK, cache=True, text_file=str(tmp_path / f"{name}.txt"), window=32))["nll"]
        for name in "ab"
    ]
    fresh = figures(run_tasks(lm, NLL_TASK, text_file=str(tmp_path / "b.txt"), window=32))["nll"]
    assert found[1] == fresh != found[0]


def test_another_model_class_gets_no_figure_instead_of_a_plausible_one(tmp_path, caplog):
    plain = HFLM(pretrained=speaking_llama(), tokenizer=tokenizer())
    results = run_tasks(plain, NLL_TASK, rolling_yaml(tmp_path), window=32)
    assert figures(results)["nll"] is None
    assert "--model ternary_probe" in caplog.text
    assert results["results"]["local_documents"]["bits_per_byte,none"] > 0
    make_table(results)


def test_the_yaml_named_by_path_is_the_task_and_can_be_included_under_another_name(tmp_path):
    by_path = figures(run_tasks(tiny_lm(), NLL_YAML, window=32, windows=2))
    own = tmp_path / "mine.yaml"
    own.write_text(f"include: {NLL_YAML}\ntask: my_nll\n")
    included = figures(run_tasks(tiny_lm(), own, window=32, windows=2), "my_nll")
    assert by_path["nll"] == included["nll"]


def lm_eval(folder, work, *arguments: str):
    """lm-eval's own command line, in a process that has not seen the plugin."""
    tiny_lm().loaded.model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    command = [sys.executable, "-m", "lm_eval", "--model", "ternary_probe", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folder},perturb=sign_flip:rate=0.05,seed=3", *arguments]
    command += ["--metadata", "window=32", "windows=5", "--output_path", str(work / "out"), "--log_samples"]
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache"), "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(next((work / "out").rglob("results_*.json")).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "tasks",
    [["--tasks", str(NLL_YAML)], ["--include_path", str(TASKS), "--tasks", f"{NLL_TASK},{HOOK_YAML}"]],
    ids=["YAML by path", "name, folder and hook"],
)
def test_the_plain_command_runs_the_task_on_a_model_it_has_never_heard_of(tmp_path, tasks):
    results = lm_eval(tmp_path / "model", tmp_path, *tasks)
    record = of_the_command("sign_flip:rate=0.05,seed=3", window=32, windows=5)
    assert figures(results)["nll"] == pytest.approx(record.nll, rel=1e-12)
    # Both --model_args and --metadata reach every task, and the results file.
    kept = results["configs"][NLL_TASK]["metadata"]
    assert (kept["window"], kept["perturb"]) == (32, "sign_flip:rate=0.05")
    assert results["config"]["ternary_probe"]["tasks"][NLL_TASK]["protocol"]["tokens_scored"] == record.tokens_scored


def test_a_colon_separated_include_path_finds_nothing_though_lm_eval_documents_it(tmp_path):
    choice_yaml(tmp_path)
    joined = TaskManager(include_defaults=False, include_path=f"{TASKS}:{tmp_path}")
    assert joined.match_tasks([NLL_TASK, "local_choices"]) == []
    listed = TaskManager(include_defaults=False, include_path=[str(TASKS), str(tmp_path)])
    assert set(listed.match_tasks([NLL_TASK, "local_choices"])) == {NLL_TASK, "local_choices"}
