"""Depth profile of the demo model on 4,096 tokens, against the bare forward pass over the same text, in one run.

Usage: ``python benchmarks/depth_profile.py [--model demo] [--tokens 4096] [--window 512] [--rounds 3]``

Timed in turn, the best round of each counts: the forward pass up to the final norm (what the profile runs; the stricter
comparison), the whole forward pass with its logits, and `observe_forward`, which is the same pass with fp64 Gram matrices of
every residual stream, the final norm's covariance, all `eigvalsh` and both decompositions of the covariance. Bar: the last
below 1.35 times the first. Exit code 1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ternary_probe.anatomy import examine
from ternary_probe.gates._forward import observe_forward, runner
from ternary_probe.loading import load, require_tokenizer, vocabulary_size
from ternary_probe.text import make_windows, read_text

BAR = 1.35


def best_seconds(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every contender once per round, in turn, after one round that warms up; the best time of each."""
    for run in contenders.values():
        run()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    loaded = load(options.model, dtype=options.dtype, device=options.device)
    anatomy = examine(loaded.model)
    windows = make_windows(
        read_text(),
        require_tokenizer(loaded),
        window=options.window,
        windows=-(-options.tokens // options.window),
        vocab_size=vocabulary_size(loaded.model),
    )
    run = runner(anatomy)

    @torch.no_grad()
    def states() -> None:
        for ids in windows.inputs:
            run(ids[None])

    @torch.no_grad()
    def whole() -> None:
        for ids in windows.inputs:
            loaded.model(ids[None].to(anatomy.input_device), use_cache=False)

    seconds = best_seconds(
        {
            "forward up to the final norm": states,
            "forward with logits": whole,
            "depth profile": lambda: observe_forward(anatomy, windows),
        },
        options.rounds,
    )
    evidence = observe_forward(anatomy, windows)
    profile = evidence.profile
    if profile is None:
        print(f"no depth profile: {evidence.profile_exception or 'too few tokens'}", file=sys.stderr)
        return 2
    ratio = seconds["depth profile"] / seconds["forward up to the final norm"]
    whole_ratio = seconds["depth profile"] / seconds["forward with logits"]
    passed = ratio < BAR
    print(
        f"{options.model}, {options.dtype}, {evidence.tokens:,} tokens, {len(profile.names)} streams of {profile.width}"
    )
    print(f"best of {options.rounds}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, value in seconds.items():
        print(f"  {name:<32}{value:10.3f} s")
    print(f"  {'ratio':<32}{ratio:10.3f} x   (bar: below {BAR:g} x: {'met' if passed else 'MISSED'})")
    print(f"  {'ratio to the whole forward':<32}{whole_ratio:10.3f} x")
    print(f"  lowest sigma_min ratio {np.nanmin(profile.ratio()[1:]):.3g}, lowest step {np.nanmin(profile.step()):.3g}")
    if options.out:
        result = {
            "benchmark": "depth_profile",
            "model": options.model,
            "dtype": options.dtype,
            "tokens": evidence.tokens,
            "streams": len(profile.names),
            "width": profile.width,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": seconds,
            "ratio": ratio,
            "ratio_to_whole_forward": whole_ratio,
            "lowest_ratio": float(np.nanmin(profile.ratio()[1:])),
            "lowest_step": float(np.nanmin(profile.step())),
            "bar": BAR,
            "passed": passed,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
