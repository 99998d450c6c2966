"""Flip and undo random signs of one matrix: sampled positions and XOR, against a mask and a copy back, in one run.

Usage: ``python benchmarks/flip_speed.py [--size 4096] [--rate 0.001] [--repeats 7] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ternary_probe.anatomy import WeightMatrix
from ternary_probe.anatomy._matrix import Axes
from ternary_probe.perturb import SignFlip

BAR = 60.0


def matrix_of(layer: nn.Linear) -> WeightMatrix:
    """Describe a lone linear layer as the anatomy would."""
    return WeightMatrix(
        model=layer,
        name="weight",
        parameter_name="weight",
        aliases=(),
        role="linear",
        block=0,
        shape=(layer.out_features, layer.in_features),
        axes=Axes(output=0, input=1),
        input_of=None,
        also_lookup=False,
        rows_seen=1,
    )


def best(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    layer = nn.Linear(options.size, options.size, bias=False, dtype=torch.bfloat16)
    layer.requires_grad_(requires_grad=False)
    matrix, weight = matrix_of(layer), layer.weight
    original = weight.clone()
    recipe = SignFlip(rate=options.rate, seed=0)

    def ours() -> None:
        entries = recipe.draw(matrix)
        matrix.flip_signs(entries)
        matrix.flip_signs(entries)

    def mask_and_copy() -> None:
        mask = torch.rand(weight.shape) < options.rate
        weight.copy_(torch.where(mask, -weight, weight))
        weight.copy_(original)

    entries = recipe.draw(matrix)
    matrix.flip_signs(entries)
    flipped = int((weight != original).sum())
    matrix.flip_signs(entries)
    exact = bool(torch.equal(weight.view(torch.int16), original.view(torch.int16)))

    seconds = {
        "mask, torch.where, copy back": best(mask_and_copy, options.repeats),
        "sampled positions, XOR twice": best(ours, options.repeats),
        "  of which sampling": best(lambda: recipe.draw(matrix), options.repeats),
        # Twice, so that the matrix is as before.
        "  of which flip and undo": best(lambda: [matrix.flip_signs(entries) for _ in range(2)], options.repeats),
    }
    ratio = seconds["mask, torch.where, copy back"] / seconds["sampled positions, XOR twice"]
    passed = ratio >= BAR and exact and flipped == entries.numel()
    print(f"{options.size} x {options.size} bfloat16, rate {options.rate:g}: {flipped:,} flips, undo exact: {exact}")
    print(f"best of {options.repeats}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, value in seconds.items():
        print(f"  {name:<32}{1e3 * value:10.3f} ms")
    print(f"  {'ratio':<32}{ratio:10.1f} x   (bar: at least {BAR:g} x: {'met' if passed else 'MISSED'})")
    if options.out:
        result = {
            "benchmark": "flip_speed",
            "size": options.size,
            "rate": options.rate,
            "flips": flipped,
            "undo_exact": exact,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": {name.strip(): value for name, value in seconds.items()},
            "ratio": ratio,
            "bar": BAR,
            "passed": passed,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
