"""A judgement in words: what was found, against what, and what more text would show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ternary_probe.gates._noninferiority import FEW_UNITS, Estimate, Judgement, judge
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._comparison import Comparison
    from ternary_probe.gates._evidence import Evidence

NOTHING_DIFFERS = (
    "candidate and base give the same bits on all {tokens} tokens, so nothing was lost; "
    "did the quantization take effect?"
)


def fail_rate(evidence: Evidence) -> float:
    """Return the error rate of one decision's failing: its share of the family's.

    Args:
        evidence: What the check is called with.

    Returns:
        ``alpha / family``.
    """
    return evidence.alpha / max(1, evidence.family)


@dataclass(frozen=True)
class Wording:
    """How a figure is spoken of.

    Attributes:
        check: Name of the check.
        noun: The figure: ``"the change in NLL"``.
        unit: Its unit.
        bad: Which way is worse.
        unit_noun: What the independent units are: ``windows`` or ``seeds``.
        more: What to do for more of them.
    """

    check: str
    noun: str
    unit: str
    bad: Literal["high", "low"]
    unit_noun: str = "windows"
    more: str = "--windows, with a longer --text where it ends"


def paired_finding(
    wording: Wording,
    estimate: Estimate,
    threshold: float,
    evidence: Evidence,
    *,
    subject: str = "",
    floor: float = 0.0,
    tokens: int = 0,
    details: dict[str, Any] | None = None,
) -> Finding:
    """Judge a figure and put it in words.

    Args:
        wording: How the figure is spoken of.
        estimate: The figure.
        threshold: What it may reach.
        evidence: What the check is called with, for the error rates.
        subject: What of the model it speaks of.
        floor: What numerics alone do to it; no threshold below it can be held.
        tokens: Tokens read, where more text would help.
        details: Further evidence.

    Returns:
        The finding.
    """
    limit = max(threshold, floor)
    found = judge(estimate, limit, bad=wording.bad, alpha=evidence.alpha, fail_alpha=fail_rate(evidence))
    shown: dict[str, Any] = {
        "lower_bound": finite(found.lower),
        "upper_bound": finite(found.upper),
        "pass_error_rate": evidence.alpha,
        "fail_error_rate": fail_rate(evidence),
        "smallest_detectable_difference": finite(found.detectable),
        wording.unit_noun: found.units,
        f"{wording.unit_noun}_to_decide": found.units_needed,
    }
    if tokens:
        shown["tokens"] = tokens
        each = tokens / max(1, found.units)
        shown["tokens_to_decide"] = None if found.units_needed is None else math.ceil(found.units_needed * each)
    if floor:
        shown["noise_floor"] = floor
    message = _sentence(wording, found, tokens, evidence.alpha, fail_rate(evidence))
    if floor > threshold:
        message += f"; the threshold {threshold:.3g} lies below the noise floor {floor:.2g}, which was used instead"
    return Finding(
        check=wording.check,
        status=found.status if math.isfinite(found.value) else "fail",
        subject=subject,
        measured=finite(found.value),
        threshold=limit,
        unit=wording.unit,
        message=message,
        details=shown | (details or {}),
    )


def compared_finding(
    wording: Wording,
    estimate: Estimate,
    threshold: float,
    evidence: Evidence,
    *,
    floor: float = 0.0,
    details: dict[str, Any] | None = None,
) -> Finding:
    """Judge a figure of the comparison; a candidate that differs in no bit passes whatever the amount of text.

    Args:
        wording: How the figure is spoken of.
        estimate: The figure.
        threshold: What it may reach.
        evidence: What the check is called with.
        floor: What numerics alone do to it.
        details: Further evidence.

    Returns:
        The finding.
    """
    comparison = evidence.comparison
    if comparison.identical:
        return Finding(
            check=wording.check,
            status="pass",
            measured=finite(estimate.value),
            threshold=threshold,
            unit=wording.unit,
            message=NOTHING_DIFFERS.format(tokens=f"{comparison.tokens:,}"),
            details={"tokens": comparison.tokens, "windows": comparison.windows, "identical": True},
        )
    extra = dict(details or {})
    if comparison.notes:
        extra["notes"] = list(comparison.notes)
    return paired_finding(wording, estimate, threshold, evidence, floor=floor, tokens=comparison.tokens, details=extra)


def worst_block(comparison: Comparison, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """Say where in the text a per-token figure is largest.

    Args:
        comparison: The comparison.
        values: ``[tokens]``.

    Returns:
        Window, positions and mean of the worst block of tokens.
    """
    worst = max(comparison.blocks(values), key=lambda block: block.mean)
    return {"window": worst.window, "first": worst.first, "last": worst.last, "mean": finite(worst.mean)}


def finite(value: float) -> float | None:
    """Return a figure, or None where it is not finite.

    Args:
        value: Any float.

    Returns:
        The figure or None.
    """
    return float(value) if math.isfinite(value) else None


def _sentence(wording: Wording, found: Judgement, tokens: int, alpha: float, fail_alpha: float) -> str:
    unit = f" {wording.unit}" if wording.unit else ""
    text = f" ({tokens:,} tokens)" if tokens else ""
    size = f"{found.units} {wording.unit_noun}{text}"
    if not math.isfinite(found.value):
        return f"{wording.noun} is not finite over {size}"
    value = f"{wording.noun} is {found.value:.4g}{unit}"
    high = wording.bad == "high"
    most, beyond = ("at most", "above") if high else ("at least", "below")
    power = f"{size} can show a difference of {found.detectable:.2g}{unit}"
    if found.status == "pass":
        return f"{value}, {most} {found.bound:.4g} at {_level(alpha)}, and {found.threshold:.4g} is allowed; {power}"
    if found.status == "fail":
        least = "at least" if high else "at most"
        bound = f"{least} {found.bound:.4g} at {_level(fail_alpha)}"
        return f"{value}, {bound}, {beyond} the {found.threshold:.4g} allowed; {power}"
    if found.units < 2:
        return (
            f"{value}, but one {wording.unit_noun.removesuffix('s')} has no error of its own: use {FEW_UNITS} or more "
            f"({wording.more})"
        )
    if not math.isfinite(found.bound):
        return f"{value}, without a bound against {found.threshold:.4g} from {size}: use more ({wording.more})"
    undecided = (
        f"{value}, between {found.lower:.4g} and {found.upper:.4g}, so {found.threshold:.4g} is not decided; {power}"
    )
    if found.units_needed is None:
        return f"{undecided}, and no amount in sight would decide"
    share = f" ({math.ceil(found.units_needed * tokens / found.units):,} tokens)" if tokens else ""
    return f"{undecided}; about {found.units_needed:,} {wording.unit_noun}{share} would decide ({wording.more})"


def _level(alpha: float) -> str:
    return f"{100 * (1 - alpha):.4g} % confidence"
