"""Short ways to run lm-eval in this process on the tiny model, and local tasks it can run offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from small_study import loaded_llama
from ternary_probe_lm_eval import TernaryProbeLM
from ternary_probe_lm_eval.console import TASKS

NLL_YAML = TASKS / "ternary_probe_nll.yaml"
LEVERAGE_YAML = TASKS / "ternary_probe_leverage.yaml"
SENTENCES = (
    "The mill stood still all winter, and the river went on without it.",
    "Nine lanterns, said the harbour master, and not one of them lit.",
    "Water the roots. The leaves will see to themselves, or they will not.",
    "In 1931 somebody wound the tower clock; nobody knows who it was.",
    "A ferry that leaves at nine has left, whatever the timetable says.",
    "She wrote the number down twice and trusted neither of the two.",
)


def tiny_lm(**options: Any) -> TernaryProbeLM:
    return TernaryProbeLM(loaded_llama(), **options)


def run_tasks(lm: Any, *specs: Any, limit: int | None = None, cache: bool = False, **metadata: Any) -> dict[str, Any]:
    """What lm-eval makes of some tasks; ``metadata`` is that of the command line."""
    manager = TaskManager(include_defaults=False, include_path=[str(TASKS)], metadata=metadata)
    loaded = manager.load([str(spec) if isinstance(spec, Path) else spec for spec in specs])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
    found = evaluate(lm, loaded, limit=limit, bootstrap_iters=0, cache_requests=cache)
    assert found is not None
    return dict(found)


def rolling_yaml(folder: Path, *, name: str = "local_documents", sentences: tuple[str, ...] = SENTENCES) -> Path:
    """A task of documents in a local JSON-lines file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return _write(
        folder,
        name,
        dataset_kwargs={"data_files": {"test": str(data)}},
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": metric} for metric in metrics],
    )


def choice_yaml(folder: Path, *, name: str = "local_choices", documents: int = 14, **settings: Any) -> Path:
    """A multiple-choice task in a local JSON-lines file; which word ends the sentence?"""
    words = ["mill", "clock", "river", "lantern", "number"]
    rows = []
    for index in range(documents):
        choices = [words[(index + step) % len(words)] for step in (0, 1, 3)]
        rows.append({"question": f"{SENTENCES[index % len(SENTENCES)]} The", "choices": choices, "gold": index % 3})
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _write(
        folder,
        name,
        dataset_kwargs={"data_files": {"test": str(data)}},
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="gold",
        doc_to_choice="choices",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **settings,
    )


def _write(folder: Path, name: str, **settings: Any) -> Path:
    file = folder / f"{name}.yaml"
    settings |= {"task": name, "dataset_path": "json", "test_split": "test", "metadata": {"version": 0}}
    file.write_text(yaml.safe_dump(settings))
    return file
