"""The small leverage study that the checks of a single model's response share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pydantic import Field

from ternary_probe.errors import ProbeError
from ternary_probe.gates._check import Limits
from ternary_probe.records import Arm, Finding, LeverageRecord

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Subject

_ARMS = ("outlier", "other", "all")


class StudyLimits(Limits):
    """What the study runs; two checks with equal values share one study."""

    rate: float = Field(
        0.001,
        gt=0,
        le=0.05,
        description="share of signs flipped. Small: responses are linear up to about 0.003 on SmolLM2 (THEORY 1.6)",
    )
    seeds: int = Field(8, ge=2, description="random draws of flips; below 8 intervals are rough (DESIGN 3.4)")
    windows: int = Field(
        1,
        ge=1,
        description="windows of the text to score. Our choice: seeds, not windows, carry the error, and every window costs "
        "some 30 passes over it",
    )


_done: WeakKeyDictionary[Subject, dict[tuple[float, int, int], LeverageRecord]] = WeakKeyDictionary()


def small_study(subject: Subject, limits: StudyLimits) -> LeverageRecord | Finding:
    """Run the study, once per subject and settings.

    Outlier columns are chosen on the text after the scored windows.

    Args:
        subject: The model.
        limits: Rate, seeds and windows.

    Returns:
        The record; a finding that it does not apply where the weights are packed and have no sign to flip.

    Raises:
        ProbeError: If the text is too short, or no flip is left at that rate.
    """
    from ternary_probe.anatomy import stored_as_integers
    from ternary_probe.loading import require_tokenizer, vocabulary_size
    from ternary_probe.measure.nll import HEAD_BYTES
    from ternary_probe.studies.leverage import run_leverage
    from ternary_probe.studies.plan import LeverageOptions
    from ternary_probe.text import calibration_windows, make_windows

    integers = stored_as_integers(subject.loaded.model)
    if integers is not None:
        return Finding(
            check="",
            status="not_applicable",
            message=f"the weights of {subject.name} are packed as {integers}: no sign of them can be flipped",
        )
    key = (limits.rate, limits.seeds, limits.windows)
    finished = _done.setdefault(subject, {})
    if key not in finished:
        options = subject.options
        tokenizer = require_tokenizer(subject.loaded)
        size = vocabulary_size(subject.loaded.model)
        scored = make_windows(
            subject.text,
            tokenizer,
            protocol=options.protocol,  # type: ignore[arg-type]  # an enum's value
            window=options.window,
            windows=min(limits.windows, subject.windows.protocol.windows),
            bos=options.bos,  # type: ignore[arg-type]
            vocab_size=size,
        )
        seeds = tuple(range(options.seed, options.seed + limits.seeds))
        finished[key] = run_leverage(
            subject.loaded,
            scored,
            calibration_windows(subject.text, tokenizer, scored, vocab_size=size),
            LeverageOptions(rates=(limits.rate,), seeds=seeds, arms=_ARMS, head_bytes=options.head_bytes or HEAD_BYTES),
        )
    return finished[key]


def responses(study: LeverageRecord, arm: str, pick: Callable[[Arm], float | None]) -> tuple[float, ...] | None:
    """Return one arm's responses, one per seed.

    Args:
        study: The study.
        arm: Name of the arm.
        pick: The response.

    Returns:
        Nats a token; draws that changed the very same bits count once. None if any is not finite.

    Raises:
        ProbeError: If the study has no such response.
    """
    found: dict[str, float] = {}
    for cell in study.arms:
        if cell.arm != arm:
            continue
        value = pick(cell)
        if cell.status != "ok" or value is None:
            return None
        found.setdefault(cell.checksum_during, value)
    if not found:
        raise ProbeError(f"the study of {study.model.name} has no {arm} flips: raise rate in the policy")
    return tuple(found.values())


def nll_of(cell: Arm) -> float | None:
    """The change in NLL of one cell."""
    return cell.delta_nll


def kl_of(cell: Arm) -> float | None:
    """KL(clean || perturbed) of one cell."""
    return cell.kl
