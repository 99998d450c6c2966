"""What a leverage study costs above the bare model: peak memory, and time against plain forward passes, in one run.

Memory: the high-water mark of resident memory above the loaded model (reset through ``/proc/self/clear_refs``, so Linux
and CPU only). Time: every evaluation is preceded by a bare ``model(input)`` over the same windows and one pass of the
head, timed on the spot and taken out of the study's time, so both sides see the same load of the machine.

Usage: ``python benchmarks/study_cost.py [MODEL] [--windows 4] [--window 512] [--seeds 8] [--out FILE]``
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ternary_probe import anatomy as anatomies
from ternary_probe.loading import LoadedModel, load, require_tokenizer, vocabulary_size
from ternary_probe.measure.nll import Evaluator
from ternary_probe.studies.leverage import run_leverage
from ternary_probe.studies.plan import LeverageOptions
from ternary_probe.text import Windows, calibration_windows, make_windows, read_text

MEMORY_BAR = 0.25
TIME_BAR = 1.12
MIB = 2**20
PAGE = 4096


class Texts(NamedTuple):
    """Scored and calibration windows."""

    scored: Windows
    calibration: Windows


class Memory(NamedTuple):
    """Bytes of a study."""

    model: int
    logits_chunk: int
    peak_above_model: int

    @property
    def share(self) -> float:
        """Peak above the model, as a share of the model and one chunk of logits."""
        return self.peak_above_model / (self.model + self.logits_chunk)


class Seconds(NamedTuple):
    """Seconds of a study and of what it is compared with."""

    study: float
    examination: float
    forward: float
    head: float
    evaluations: int
    passes_timed: int

    @property
    def ratio(self) -> float:
        """Study over the same number of bare forward and head passes."""
        return self.study / (self.evaluations * (self.forward + self.head))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    loaded = load(options.model, dtype=options.dtype, device="cpu")
    texts = cut(loaded, options.windows, options.window)
    memory = measure_memory(loaded, texts)
    seconds = measure_time(loaded, texts, options.seeds)
    verdicts = {"memory": memory.share < MEMORY_BAR, "time": seconds.ratio < TIME_BAR}

    print(f"{loaded.source.name}, {options.dtype}, {options.windows} x {options.window} tokens, {options.seeds} seeds")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    row("model", memory.model / MIB, "MiB")
    row("chunk of logits", memory.logits_chunk / MIB, "MiB")
    row("peak of the study above the loaded model", memory.peak_above_model / MIB, "MiB")
    row("share of model and chunk", memory.share, against(MEMORY_BAR, passed=verdicts["memory"]))
    row("bare forward pass over the text, mean", seconds.forward, "s")
    row("head pass, mean", seconds.head, "s")
    row(f"study of {seconds.evaluations} evaluations", seconds.study, "s")
    row("  of which examining the model, once, about", seconds.examination, "s")
    row("study / (evaluations x (forward + head))", seconds.ratio, against(TIME_BAR, passed=verdicts["time"]))
    if options.out:
        result = {
            "benchmark": "study_cost",
            "model": loaded.source.name,
            "dtype": options.dtype,
            "windows": options.windows,
            "window": options.window,
            "seeds": options.seeds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "memory_bytes": {**memory._asdict(), "share": memory.share, "bar": MEMORY_BAR},
            "seconds": {**seconds._asdict(), "ratio": seconds.ratio, "bar": TIME_BAR},
            "passed": verdicts,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(verdicts.values()) else 1


def row(label: str, value: float, unit: str) -> None:
    """Print one line of the table."""
    print(f"  {label:<44}{value:10.3f} {unit}")


def against(bar: float, *, passed: bool) -> str:
    """Say how a ratio stands to its bar."""
    return f"(bar: below {bar:g}: {'met' if passed else 'MISSED'})"


def cut(loaded: LoadedModel, windows: int, window: int) -> Texts:
    """Cut the sample text into scored and calibration windows, as the command does."""
    text, tokenizer, vocabulary = read_text(), require_tokenizer(loaded), vocabulary_size(loaded.model)
    scored = make_windows(text, tokenizer, window=window, windows=windows, vocab_size=vocabulary)
    return Texts(scored, calibration_windows(text, tokenizer, scored, vocab_size=vocabulary))


def measure_memory(loaded: LoadedModel, texts: Texts) -> Memory:
    """Run a small study, all arms at the highest default rate, and read the high-water mark."""
    for parameter in loaded.model.parameters():  # a mapped file is not in memory before it is read
        parameter.detach().flatten()[:: PAGE // parameter.element_size()].sum()
    chunk = Evaluator(anatomies.examine(loaded.model), texts.scored).chunk_bytes
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to VmRSS
    run_leverage(loaded, texts.scored, texts.calibration, LeverageOptions(rates=(0.005,), seeds=(0,)))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in loaded.model.parameters()}
    return Memory(sum(storages.values()), chunk, resident("VmHWM") - before)


def resident(field: str) -> int:
    """Read a figure of this process's memory, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


class BarePasses:
    """Times a bare forward and a head pass each time the study is about to evaluate."""

    def __init__(self, loaded: LoadedModel, windows: Windows) -> None:
        self.model, self.inputs = loaded.model, windows.inputs
        started = time.perf_counter()
        self.head = anatomies.examine(loaded.model).head
        self.examination = time.perf_counter() - started
        self.states = [self.head.states(row[None])[0] for row in self.inputs]
        self.forward: list[float] = []
        self.heads: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds spent here, not to be counted as the study's."""
        return sum(self.forward) + sum(self.heads)

    @torch.no_grad()
    def __call__(self, done: int, total: int, label: str) -> None:
        """Be the study's progress callback."""
        del label
        if done == total:
            return
        started = time.perf_counter()
        for row in self.inputs:
            self.model(row[None], use_cache=False)
        middle = time.perf_counter()
        for states in self.states:
            self.head.logits(states)
        self.forward.append(middle - started)
        self.heads.append(time.perf_counter() - middle)


def measure_time(loaded: LoadedModel, texts: Texts, seeds: int) -> Seconds:
    """Time a study with the default rates and arms, bare passes taken out."""
    bare = BarePasses(loaded, texts.scored)
    bare(0, 1, "warm up")
    bare.forward.clear()
    bare.heads.clear()
    started = time.perf_counter()
    options = LeverageOptions(seeds=tuple(range(seeds)))
    record = run_leverage(loaded, texts.scored, texts.calibration, options, progress=bare)
    study = time.perf_counter() - started - bare.seconds
    if record.timing is None:
        raise SystemExit("the study gave no timing")
    passes = len(bare.forward)
    forward, head = sum(bare.forward) / passes, sum(bare.heads) / passes
    return Seconds(study, bare.examination, forward, head, record.timing.evaluations, passes)


if __name__ == "__main__":
    sys.exit(main())
