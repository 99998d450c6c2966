"""What a sensitivity map costs: the prediction against forward passes, re-runs of the later blocks against full runs.

Prediction: seconds of the Fisher pass over those of a bare ``model(input)`` on the same windows, at 2 label draws and for
each more; its peak of resident memory above the loaded model (Linux and CPU only). Sweep: one experiment a block, the
later blocks re-run, against the same experiments as full runs, interleaved; the arithmetic limit follows from the time of
the backbone and of the head, ``(B + H) n / sum_b (B (n - b) / n + H)``.

Usage: ``python benchmarks/sensitivity_cost.py [MODEL] [--windows 2] [--window 512] [--repeats 2] [--out FILE]``
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ternary_probe import anatomy as anatomies
from ternary_probe.anatomy import Anatomy
from ternary_probe.loading import load, require_tokenizer, vocabulary_size
from ternary_probe.measure.fisher import fisher_screen
from ternary_probe.measure.nll import Evaluator, Reference
from ternary_probe.measure.sweep import Sweep
from ternary_probe.perturb import Perturbation, SignFlip
from ternary_probe.text import Windows, make_windows, read_text

FORWARDS_AT_TWO = 12.0
FORWARDS_A_DRAW = 4.0
MEMORY_BAR = 2.5
LIMIT_BAR = 0.92
MIB = 2**20


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    loaded = load(options.model, dtype=options.dtype, device="cpu")
    tokenizer, vocabulary = require_tokenizer(loaded), vocabulary_size(loaded.model)
    windows = make_windows(
        read_text(), tokenizer, window=options.window, windows=options.windows, vocab_size=vocabulary
    )
    found = anatomies.examine(loaded.model)
    model_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())

    peak = fisher_peak(found, windows)
    forward, two, four = [], [], []
    for _ in range(options.repeats):
        forward.append(seconds(lambda: bare(loaded.model, windows)))
        two.append(seconds(lambda: fisher_screen(found, windows, draws=2)))
        forward.append(seconds(lambda: bare(loaded.model, windows)))
        four.append(seconds(lambda: fisher_screen(found, windows, draws=4)))
    once = sum(forward) / len(forward)
    at_two = sum(two) / len(two) / once
    a_draw = (sum(four) - sum(two)) / len(two) / 2 / once

    sweep = measure_sweep(found, windows, options.repeats)
    result = {
        "benchmark": "sensitivity_cost",
        "model": loaded.source.name,
        "windows": options.windows,
        "window": options.window,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "forward_seconds": once,
        "fisher_forwards_at_two_draws": at_two,
        "fisher_forwards_each_more": a_draw,
        "fisher_peak_bytes": peak,
        "fisher_peak_of_model": peak / model_bytes,
        **sweep,
    }
    passed = {
        "two draws": at_two < FORWARDS_AT_TWO,
        "each more": a_draw < FORWARDS_A_DRAW,
        "memory": peak / model_bytes < MEMORY_BAR,
        "limit": sweep["share_of_limit"] >= LIMIT_BAR,
    }
    print(f"{loaded.source.name}, {options.windows} x {options.window} tokens, {torch.get_num_threads()} threads")
    row("Fisher pass at 2 label draws, forward passes", at_two, f"below {FORWARDS_AT_TWO:g}", met=passed["two draws"])
    row("each more draw, forward passes", a_draw, f"below {FORWARDS_A_DRAW:g}", met=passed["each more"])
    row("its peak above the model, of the model", peak / model_bytes, f"below {MEMORY_BAR:g}", met=passed["memory"])
    row("sweep over blocks, times faster than full runs", sweep["speed_up"], "", met=None)
    row("arithmetic limit of that", sweep["limit"], "", met=None)
    row("share of the limit", sweep["share_of_limit"], f"at least {LIMIT_BAR:g}", met=passed["limit"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result | {"passed": passed}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


def row(label: str, value: float, bar: str, *, met: bool | None) -> None:
    """Print one line of the table."""
    verdict = "" if met is None else f"  (bar: {bar}: {'met' if met else 'MISSED'})"
    print(f"  {label:<50}{value:8.3f}{verdict}")


def seconds(run: Callable[[], object]) -> float:
    """Time one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.no_grad()
def bare(model: torch.nn.Module, windows: Windows) -> None:
    """Run the model over the windows, as anyone would."""
    for ids in windows.inputs:
        model(ids[None], use_cache=False)


def fisher_peak(found: Anatomy, windows: Windows) -> int:
    """Return the high-water mark of a Fisher pass above the loaded model, bytes."""
    for parameter in found.model.parameters():  # a mapped file is not in memory before it is read
        parameter.detach().flatten()[::1024].sum()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to VmRSS
    fisher_screen(found, windows, draws=2)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Read a figure of this process's memory, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def measure_sweep(found: Anatomy, windows: Windows, repeats: int) -> dict[str, float]:
    """Time one experiment a block both ways, and what backbone and head take."""
    evaluator = Evaluator(found, windows)
    reference = evaluator.reference()
    recipes: dict[str, Perturbation] = {
        f"block {block.index}": SignFlip(
            rate=0.003, include=tuple(m.name for m in found.block_matrices if m.block == block.index)
        )
        for block in found.blocks
    }
    sweep = Sweep(evaluator, reference)
    full, fast, backbone, head = 0.0, 0.0, 0.0, 0.0
    for _ in range(repeats):
        fast += seconds(lambda: sweep.perturbed(recipes))
        full += seconds(lambda: full_runs(found, evaluator, reference, recipes))
        for _ in range(3):
            backbone += seconds(lambda: backbones(found, windows)) / 3
            head += seconds(lambda: heads(evaluator, reference)) / 3
    blocks = len(found.blocks)
    limit = (backbone + head) * blocks / sum(backbone * (blocks - b) / blocks + head for b in range(blocks))
    return {
        "full_seconds": full / repeats,
        "sweep_seconds": fast / repeats,
        "backbone_seconds": backbone / repeats,
        "head_seconds": head / repeats,
        "speed_up": full / fast,
        "limit": limit,
        "share_of_limit": full / fast / limit,
    }


def full_runs(found: Anatomy, evaluator: Evaluator, reference: Reference, recipes: dict[str, Perturbation]) -> None:
    """Run every experiment as a whole forward pass."""
    for recipe in recipes.values():
        with recipe.applied(found):
            evaluator.response(reference)


@torch.no_grad()
def backbones(found: Anatomy, windows: Windows) -> None:
    """Run the model up to its head."""
    for ids in windows.inputs:
        found.head.states(ids[None])


@torch.no_grad()
def heads(evaluator: Evaluator, reference: Reference) -> None:
    """Score hidden states, NLL and KL."""
    for index, states in enumerate(reference.states):
        evaluator.score_window(index, states, reference)


if __name__ == "__main__":
    raise SystemExit(main())
