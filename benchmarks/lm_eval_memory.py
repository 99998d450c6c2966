"""Perplexity through lm-eval: memory and time of the plugin's model beside those of ``--model hf``, in one run.

Each measurement is a process of its own: load the model, touch every page of it, reset the high-water mark of resident
memory (``/proc/self/clear_refs``, so Linux and CPU only), then score one document as lm-eval's rolling log-likelihood does.
The two sides take turns, and the best time of each counts. Both score with a float32 softmax, and their log-likelihoods
must agree. Seconds of loading, the plugin's one examination of the model included, are printed beside.

The second part repeats it with the same model at a synthetic vocabulary of 151,936 entries, drawn at random.

Usage: ``python benchmarks/lm_eval_memory.py [MODEL] [--window 2048] [--windows 4] [--repeats 3] [--vocabulary 151936]
[--out FILE]``
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
MEMORY_BAR = 1 / 7
TIME_BARS = {"own": 1.15, "synthetic": 1.3}
AGREEMENT = 1e-6
MIB = 2**20
PAGE = 4096
SIDES = ("hf", "ternary_probe")


class Scored(NamedTuple):
    """What one process measured."""

    model: int
    peak_above_model: int
    seconds: float
    log_likelihood: float
    vocabulary: int
    threads: int
    load_seconds: float


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=151936, help="of the synthetic model; 0 leaves it out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        scored = score(options.side, options.model, options.window, options.windows)
        sys.stdout.write(json.dumps(scored._asdict()) + "\n")
        return 0

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"own": folder_of(options.model)}
        if options.vocabulary:
            models["synthetic"] = synthesize(models["own"], options.vocabulary, Path(folder) / "synthetic")
        for name, model in models.items():
            found[name] = compare(name, model, options)
    passed = all(all(result["passed"].values()) for result in found.values())
    if options.out:
        result = {
            "benchmark": "lm_eval_memory",
            "model": options.model,
            "window": options.window,
            **found,
            "passed": passed,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


def compare(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn and print the table."""
    runs: dict[str, list[Scored]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            runs[side].append(measure(side, model, options))
    memory = {side: statistics.median(run.peak_above_model for run in runs[side]) for side in SIDES}
    seconds = {side: min(run.seconds for run in runs[side]) for side in SIDES}
    share, ratio = (values["ternary_probe"] / values["hf"] for values in (memory, seconds))
    theirs, ours = (runs[side][0].log_likelihood for side in SIDES)
    difference = abs(ours - theirs) / abs(theirs)
    bar = TIME_BARS[name]
    passed = {"memory": share < MEMORY_BAR, "time": ratio <= bar, "agreement": difference <= AGREEMENT}

    first = runs["hf"][0]
    print(
        f"{model.name}: vocabulary {first.vocabulary}, {options.windows} windows of {options.window}, {first.threads} threads"
    )
    row("model", first.model / MIB, "MiB")
    for side in SIDES:
        row(f"{side}: peak above the loaded model", memory[side] / MIB, "MiB")
    row("share", share, against(MEMORY_BAR, passed=passed["memory"]))
    for side in SIDES:
        row(f"{side}: best of {options.repeats}", seconds[side], "s")
        row(f"{side}: loading, once", min(run.load_seconds for run in runs[side]), "s")
    row("ratio", ratio, against(bar, passed=passed["time"]))
    row("relative difference of log-likelihoods", difference, against(AGREEMENT, passed=passed["agreement"]))
    return {
        "vocabulary": first.vocabulary,
        "windows": options.windows,
        "threads": first.threads,
        "runs": {side: [run._asdict() for run in runs[side]] for side in SIDES},
        "memory_share": share,
        "time_ratio": ratio,
        "relative_difference": difference,
        "passed": passed,
    }


def row(label: str, value: float, unit: str) -> None:
    """Print one line of the table."""
    shown = f"{value:10.3f}" if value >= 1e-3 or value == 0 else f"{value:10.1e}"
    print(f"  {label:<44}{shown} {unit}")


def against(bar: float, *, passed: bool) -> str:
    """Say how a figure stands to its bar."""
    return f"(bar: {bar:.3g}: {'met' if passed else 'MISSED'})"


def measure(side: str, model: Path, options: argparse.Namespace) -> Scored:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, str(model), "--side", side]
    command += ["--window", str(options.window), "--windows", str(options.windows)]
    paths = [str(REPOSITORY), str(REPOSITORY / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return Scored(**json.loads(done.stdout.strip().splitlines()[-1]))


def folder_of(model: str) -> Path:
    """Return the checkpoint folder, which both sides take."""
    if model != "demo":
        return Path(model)
    from ternary_probe.demo_model import fetch_demo

    return fetch_demo()


def synthesize(model: Path, vocabulary: int, folder: Path) -> Path:
    """Save the same model with random weights and another vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def score(side: str, model: str, window: int, windows: int) -> Scored:
    """Load the model one side's way and score the text, which is the sample text cut to some windows."""
    import torch
    from lm_eval.api.instance import Instance

    from ternary_probe.text import read_text

    logging.disable(logging.WARNING)
    began = time.perf_counter()
    options = {"device": "cpu", "dtype": "float32", "softmax_dtype": "float32", "batch_size": 1, "max_length": window}
    lm: Any
    if side == "hf":
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(pretrained=model, add_bos_token=False, **options)
    else:
        from ternary_probe_lm_eval.model import TernaryProbeLM

        lm = TernaryProbeLM(model, **options)
    load_seconds = time.perf_counter() - began
    text = read_text().content
    ids = lm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if len(ids["input_ids"]) < window * windows:
        raise SystemExit(
            f"the sample text has {len(ids['input_ids'])} tokens: give fewer --windows or a smaller --window"
        )
    text = text[: ids["offset_mapping"][window * windows - 1][1]]
    request = Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("sample", 0, 1))

    for parameter in lm.model.parameters():  # a mapped file is not in memory before it is read
        parameter.detach().flatten()[:: PAGE // parameter.element_size()].sum()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to VmRSS
    started = time.perf_counter()
    (found,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
    seconds = time.perf_counter() - started
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in lm.model.parameters()}
    rows = lm.model.get_input_embeddings().weight.shape[0]
    peak = resident("VmHWM") - before
    return Scored(sum(storages.values()), peak, seconds, float(found), rows, torch.get_num_threads(), load_seconds)


def resident(field: str) -> int:
    """Read a figure of this process's memory, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
