"""A sweep of six recipes over two lm-eval tasks on one loaded model, beside six separate runs of the console command.

The sweep may cost one start-up plus 1.1 x 7 evaluations (the clean one and six). A bare ``lm_eval.evaluate`` of both tasks on
the clean model is timed just before each of its evaluations and taken out of its time, so both sides see the same load of
the machine. The tasks are local: documents and a choice of continuations, both cut from the sample text.

Usage: ``python benchmarks/lm_eval_sweep.py [MODEL] [--documents 16] [--choices 24] [--separate 6] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from ternary_probe_lm_eval import SweepOptions, SweepRecord, TernaryProbeLM, sweep

from ternary_probe.data import sample_text

BAR = 1.1


def recipes(rate: float) -> tuple[str, ...]:
    """Return the six recipes."""
    kinds = ("sign_flip", "sign_flip", "sign_flip", "sign_flip", "magnitude")
    options = (";columns=outlier", ";columns=other", "", ";seed=1", "")
    return (
        *(f"{kind}:rate={rate:g}{more}" for kind, more in zip(kinds, options, strict=True)),
        "ternarize:scheme=absmean",
    )


class Seconds(NamedTuple):
    """What was timed."""

    startup: float
    """Loading and examining the model, and measuring its outlier columns."""
    sweep: float
    """The sweep on the loaded model, bare evaluations taken out."""
    evaluation: float
    """One bare evaluation of both tasks, mean."""
    evaluations: int
    separate: float | None
    """Six console commands, one after the other."""

    @property
    def ratio(self) -> float:
        """The sweep over as many bare evaluations."""
        return self.sweep / (self.evaluations * self.evaluation)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--choices", type=int, default=24)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.005)
    parser.add_argument("--separate", type=int, default=6, help="separate runs to time; 0 for none")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        tasks = [documents_task(Path(folder), options.documents), choices_task(Path(folder), options.choices)]
        wanted = recipes(options.rate)
        seconds, record = measure(options.model, tasks, wanted, dtype=options.dtype, window=options.window)
        if options.separate:
            few = wanted[: options.separate]
            elapsed = separate(options.model, tasks, few, dtype=options.dtype, window=options.window)
            seconds = seconds._replace(separate=elapsed)
    passed = seconds.ratio <= BAR and record.status == "ok" and record.weights_after == record.model.weights_sha256
    print(f"{record.model.name}, {options.dtype}, {options.documents} documents and {options.choices} choices")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {len(wanted)} recipes")
    row("start-up: load, examine, measure outlier columns", seconds.startup, "s")
    row("one bare evaluation of both tasks, mean", seconds.evaluation, "s")
    row(f"sweep of {seconds.evaluations} evaluations, start-up not in it", seconds.sweep, "s")
    row("sweep / bare evaluations", seconds.ratio, f"(bar: at most {BAR:g}: {'met' if passed else 'MISSED'})")
    row("start-up and sweep", seconds.startup + seconds.sweep, "s")
    if seconds.separate is not None:
        row(f"{options.separate} separate console runs", seconds.separate, "s")
    if options.out:
        result = {
            "benchmark": "lm_eval_sweep",
            "model": record.model.name,
            "dtype": options.dtype,
            "documents": options.documents,
            "choices": options.choices,
            "recipes": wanted,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": {**seconds._asdict(), "ratio": seconds.ratio, "bar": BAR},
            "separate_runs": options.separate,
            "passed": passed,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


def row(label: str, value: float, unit: str) -> None:
    """Print one line of the table."""
    print(f"  {label:<52}{value:10.3f} {unit}")


def paragraphs() -> list[str]:
    """Return the sample text's paragraphs, titles left out."""
    return [part for part in sample_text().split("\n\n") if len(part.split()) > 20]


def documents_task(folder: Path, number: int) -> Path:
    """Write a rolling task whose documents are paragraphs."""
    texts = paragraphs()
    rows = [{"text": texts[i % len(texts)]} for i in range(number)]
    return write_task(
        folder,
        "sweep_documents",
        rows,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    )


def choices_task(folder: Path, number: int) -> Path:
    """Write a multiple-choice task: which of four endings belongs to the paragraph?"""
    texts = paragraphs()
    halves = [(" ".join(words[:24]), " ".join(words[24:36])) for words in (text.split() for text in texts)]
    rows = []
    for i in range(number):
        others = [halves[(i + 5 * step + 1) % len(halves)][1] for step in range(3)]
        right = i % 4
        choices = [*others[:right], halves[i % len(halves)][1], *others[right:]]
        rows.append({"question": halves[i % len(halves)][0], "choices": choices, "gold": right})
    return write_task(
        folder,
        "sweep_choices",
        rows,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_target="gold",
        doc_to_choice="choices",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a task's documents and its YAML, which is JSON here."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings |= {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    settings |= {"test_split": "test", "num_fewshot": 0, "metadata": {"version": 0}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


class BareEvaluations:
    """Times a bare evaluation of the clean model each time the sweep is about to evaluate."""

    def __init__(self, lm: TernaryProbeLM, tasks: list[Path]) -> None:
        self.lm = lm
        self.tasks = TaskManager(include_defaults=False).load([str(task) for task in tasks])
        self.seconds: list[float] = []

    def __call__(self, done: int, total: int, label: str) -> None:
        """Be the sweep's progress callback."""
        del label
        if done == total:
            return
        started = time.perf_counter()
        evaluate(self.lm, self.tasks, bootstrap_iters=0)
        self.seconds.append(time.perf_counter() - started)


def measure(
    model: str, tasks: list[Path], wanted: tuple[str, ...], *, dtype: str, window: int
) -> tuple[Seconds, SweepRecord]:
    """Time start-up and sweep."""
    started = time.perf_counter()
    lm = TernaryProbeLM(model, dtype=dtype, window=window, device="cpu")
    lm.resolve(wanted[0])  # examines the model and measures its outlier columns, once
    startup = time.perf_counter() - started
    bare = BareEvaluations(lm, tasks)
    bare(0, 1, "warm up")
    bare.seconds.clear()
    started = time.perf_counter()
    record = sweep(lm, tasks, wanted, options=SweepOptions(), progress=bare)
    elapsed = time.perf_counter() - started - sum(bare.seconds)
    count = len(bare.seconds)
    return Seconds(startup, elapsed, sum(bare.seconds) / count, count, None), record


def separate(model: str, tasks: list[Path], wanted: tuple[str, ...], *, dtype: str, window: int) -> float:
    """Time the console command, once for each recipe."""
    started = time.perf_counter()
    for recipe in wanted:
        command = [sys.executable, "-m", "ternary_probe_lm_eval.console", "--model", "ternary_probe", "--device", "cpu"]
        command += ["--model_args", f"pretrained={model},dtype={dtype},window={window},perturb={recipe}"]
        command += ["--tasks", ",".join(map(str, tasks))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if ran.returncode:
            raise SystemExit(ran.stderr[-2000:])
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
