"""Perplexity of a model on a text: token, word and byte, with an interval and the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ternary_probe import anatomy as anatomies
from ternary_probe.measure import Evaluator, perplexity
from ternary_probe.measure.grid import grid_note
from ternary_probe.measure.nll import HEAD_BYTES
from ternary_probe.perturb import parse
from ternary_probe.records import Environment, PerplexityRecord, ProtocolInfo, Timing
from ternary_probe.studies.intervals import mean_interval
from ternary_probe.studies.leverage import model_info
from ternary_probe.studies.summary import finite

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel
    from ternary_probe.text import Windows


def run_perplexity(
    loaded: LoadedModel,
    windows: Windows,
    *,
    recipe: str | None = None,
    calibration: Callable[[], Windows] | None = None,
    head_bytes: int = HEAD_BYTES,
) -> PerplexityRecord:
    """Score a text.

    Args:
        loaded: The model.
        windows: The text.
        recipe: Recipe string of a perturbation applied while scoring.
        calibration: Makes the windows on which such a recipe's outlier columns are measured.
        head_bytes: Upper bound for one chunk of logits.

    Returns:
        The record. The interval is Student's t over windows: a claim about other text of this kind.
    """
    started = time.perf_counter()
    anatomy = anatomies.examine(loaded.model)
    notes = [*loaded.source.notes, *grid_note(anatomy)]
    applied = nullcontext()
    if recipe is not None:
        perturbation = parse(recipe)
        if perturbation.needs_measurement and calibration is not None:
            perturbation = perturbation.resolve(anatomy, calibration())
        applied = perturbation.applied(anatomy)  # type: ignore[assignment]
        notes.append(f"perturbed while scored: {perturbation}")
    evaluator = Evaluator(anatomy, windows, head_bytes=head_bytes)
    with applied:
        result = evaluator.nll()
    total, protocol = float(result.sums.sum()), windows.protocol
    interval = mean_interval(result.windows) if len(result.sums) > 1 else None
    if interval is None:
        notes.append("one window gives no interval")
    return PerplexityRecord(
        model=model_info(loaded, None),
        protocol=ProtocolInfo.model_validate(protocol.model_dump()),
        environment=Environment.here(torch.get_num_threads()),
        timing=Timing(seconds=time.perf_counter() - started, evaluations=evaluator.evaluations),
        status="ok",
        notes=tuple(notes),
        nll=result.mean,
        token_perplexity=result.perplexity,
        word_perplexity=perplexity(total / protocol.words) if protocol.words else None,
        byte_perplexity=perplexity(total / protocol.bytes) if protocol.bytes else None,
        ci_low=perplexity(interval.low) if interval and finite(interval.low) is not None else None,
        ci_high=perplexity(interval.high) if interval and finite(interval.high) is not None else None,
        tokens_scored=int(result.counts.sum()),
        nll_windows=tuple(float(v) for v in result.windows),
    )
