"""How lm-eval reaches the model: registry, hook YAML, console script, entry point, and what ``doctor`` says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from harness_tasks import TEXT, evaluate, text_task
from lm_eval.api.registry import model_registry
from lm_eval.models import MODEL_MAPPING
from lm_eval.tasks._yaml_loader import load_yaml
from small_study import speaking_llama, tokenizer
from ternary_probe_lm_eval import console, registration, routes
from ternary_probe_lm_eval.model import TernaryProbeLM

from ternary_probe.cli import lm_eval_routes
from ternary_probe.errors import ProbeError
from ternary_probe.loading import load
from ternary_probe.studies.perplexity import run_perplexity
from ternary_probe.text import Text, make_windows

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECIPE = "sign_flip:rate=0.2,columns=all"
DOCUMENT = TEXT[:1500]

# As the releases with plugin discovery do it: every entry point of the group, by name.
DISCOVERING = """
import sys
from importlib.metadata import entry_points
import lm_eval.models
from lm_eval.api.registry import model_registry
for entry in entry_points(group="lm_eval.models"):
    if entry.name not in model_registry:
        model_registry.register(entry.name, target=entry.value)
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""


@pytest.fixture
def unregistered(monkeypatch):
    """The registry without our name, put back afterwards."""
    monkeypatch.delitem(model_registry._objs, "ternary_probe", raising=False)
    return model_registry


def environment(*paths: Path) -> dict[str, str]:
    roots = [*paths, REPOSITORY, REPOSITORY / "plugins"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(map(str, roots))}


# ---- the registry


def test_registering_keeps_lm_evals_own_models_and_may_be_repeated(unregistered):
    registration.register()
    registration.register("whatever", a="YAML hands over")
    assert unregistered.get("ternary_probe") is TernaryProbeLM
    registration.register()
    assert set(MODEL_MAPPING) <= set(unregistered)
    assert unregistered.get("hf").__name__ == "HFLM"


def test_the_target_names_the_module_that_defines_the_class(unregistered):
    """The registry refuses a re-export once the class is there, and an `EntryPoint` object."""
    assert f"{TernaryProbeLM.__module__}:{TernaryProbeLM.__qualname__}" == registration.TARGET
    unregistered.register("ternary_probe", target=registration.TARGET)
    unregistered.register("ternary_probe", target=registration.TARGET)
    assert unregistered.get("ternary_probe") is TernaryProbeLM


def test_a_name_taken_by_another_package_is_an_error(unregistered):
    unregistered.register("ternary_probe", target=unregistered.get("hf"))
    with pytest.raises(ProbeError, match="is taken by"):
        registration.register()


def test_the_declared_entry_point_is_the_registered_class():
    value = PROJECT["entry-points"]["lm_eval.models"]["ternary_probe"]
    assert value == registration.TARGET
    assert EntryPoint("ternary_probe", value, "lm_eval.models").load() is TernaryProbeLM
    assert PROJECT["scripts"]["ternary-probe-lm-eval"] == "ternary_probe_lm_eval.console:main"


# ---- the hook YAML


def test_resolving_the_hook_yaml_registers_the_model(unregistered, monkeypatch):
    monkeypatch.delitem(sys.modules, "ternary_probe_lm_eval.registration", raising=False)
    unresolved = load_yaml(routes.HOOK_YAML, resolve_func=False)
    assert "ternary_probe" not in unregistered
    resolved = load_yaml(routes.HOOK_YAML, resolve_func=True)
    assert "ternary_probe" in unregistered
    assert unresolved["task"] == resolved["task"] == []
    assert callable(resolved["metadata"]["register"])


def test_the_hook_adds_no_task_and_no_figure():
    model = TernaryProbeLM(speaking_llama(), tokenizer=tokenizer())
    hook = load_yaml(routes.HOOK_YAML, resolve_func=True)
    results = evaluate(model, text_task(), hook)["results"]
    assert not any(isinstance(value, float) for value in results.pop("ternary_probe_hook", {}).values())
    assert set(results) == {"texts"}


# ---- the console script


def test_the_console_script_lets_the_plugins_tasks_be_named():
    own = ["--include_path", str(console.TASKS)]
    run = ["--model", "x", "--tasks", "y"]
    assert console.with_own_tasks(run) == [*run, *own]
    assert console.with_own_tasks(["run", *run]) == ["run", *run, *own]
    for other in ([*run, "--include_path", "z"], [*run, "--include_path=z"], ["ls", "tasks"], ["--help"], []):
        assert console.with_own_tasks(other) == other


def test_the_console_script_says_that_lm_eval_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as leaving:
        console.main()
    assert leaving.value.code == 2
    assert "pip install 'ternary-probe[lm-eval]'" in capsys.readouterr().err


def test_the_console_script_tells_errors_in_one_sentence(monkeypatch, capsys):
    import lm_eval.__main__

    def fail() -> None:
        raise ProbeError("first line\nsecond line")

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", fail)
    monkeypatch.setattr(sys, "argv", ["ternary-probe-lm-eval", "ls", "tasks"])
    with pytest.raises(SystemExit) as leaving:
        console.main()
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "ternary-probe-lm-eval: first line second line\n"


# ---- what is imported when


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ternary_probe_lm_eval", ("torch", "lm_eval", "transformers")),
        (
            "import ternary_probe.cli.doctor, ternary_probe.cli.lm_eval_routes",
            ("torch", "lm_eval", "ternary_probe_lm_eval"),
        ),
    ],
)
def test_imports_stay_light(statement, absent):
    check = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment(), check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# ---- doctor


def test_doctor_prints_the_path_of_the_hook_without_trying():
    found = lm_eval_routes.find_routes(attempt=False)
    assert Path(found["lm-eval hook YAML"]) == routes.HOOK_YAML
    assert found["lm-eval routes"] == {}
    assert yaml.safe_load(routes.HOOK_YAML.read_text().replace("!function", ""))["group"] == "ternary_probe_hook"


def test_doctor_says_what_is_missing(monkeypatch):
    def gone(_name: str) -> str:
        raise lm_eval_routes.metadata.PackageNotFoundError

    monkeypatch.setattr(lm_eval_routes.metadata, "version", gone)
    assert "pip install 'ternary-probe[lm-eval]'" in lm_eval_routes.find_routes()["lm-eval"]
    monkeypatch.setattr(lm_eval_routes, "PLUGIN", "ternary_probe_no_such_plugin")
    assert "cannot be imported" in lm_eval_routes.find_routes()["lm-eval plugin"]


@pytest.mark.slow
def test_doctor_finds_by_trying_which_routes_work():
    found = lm_eval_routes.find_routes()["lm-eval routes"]
    assert found["lm-eval by hook YAML"] == "works"
    assert found["lm-eval by console script"].startswith("works")
    assert (
        "no model for this name found" in found["lm-eval by entry point"] or found["lm-eval by entry point"] == "works"
    )


# ---- the same figure by every route


@pytest.mark.slow
def test_three_routes_give_one_figure_and_it_is_that_of_ternary_probe_perplexity(tmp_path):
    folder = tmp_path / "model"
    speaking_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": DOCUMENT}) + "\n")
    task = {
        **{key: value for key, value in text_task().items() if key != "custom_dataset"},
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.jsonl")}},
    }
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(task))
    installed = tmp_path / "site" / "ternary_probe-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ternary-probe\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[lm_eval.models]\nternary_probe = {registration.TARGET}\n")

    programs = {
        "hook": [["-m", "lm_eval"], f"{tmp_path / 'texts.yaml'},{routes.HOOK_YAML}"],
        "console": [["-m", "ternary_probe_lm_eval.console"], str(tmp_path / "texts.yaml")],
        "discovery": [["-c", DISCOVERING], str(tmp_path / "texts.yaml")],
    }
    running = {}
    for name, (program, tasks) in programs.items():
        model_args = f"pretrained={folder},perturb={RECIPE},window=32"
        command = [sys.executable, *program, "--model", "ternary_probe", "--model_args", model_args, "--tasks", tasks]
        command += ["--output_path", str(tmp_path / name)]
        env = environment(installed.parent) | {"HF_DATASETS_CACHE": str(tmp_path / "cache" / name)}
        running[name] = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    figures = {}
    for name, process in running.items():
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said[-3000:]
        results = json.loads(next((tmp_path / name).rglob("results_*.json")).read_text())
        assert results["config"]["ternary_probe"]["perturbation"]["flips"] > 0
        figures[name] = results["results"]["texts"]["bits_per_byte,none"]
    assert len(set(figures.values())) == 1

    windows = make_windows(Text(DOCUMENT, "t", "t"), tokenizer(), protocol="rolling", window=32)
    record = run_perplexity(load(str(folder), device="cpu"), windows, recipe=RECIPE)
    total = figures["hook"] * len(DOCUMENT.encode()) * 0.6931471805599453
    assert total == pytest.approx(record.nll * record.tokens_scored, rel=1e-6)
