"""From cells to figures: means, leverage, response curves, predictions. Pure functions, no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ternary_probe.records import Amplitude, Arm, Curve, Leverage, Mean, NoiseFloor, Prediction, Response, Status
from ternary_probe.studies.intervals import bootstrap_ratio, log_log_slope, mean_interval, ratio_of_means

RESPONSES: tuple[Response, ...] = ("nll", "kl")
_LINEAR_TOLERANCE = 0.10


def values_of(arms: Iterable[Arm], response: Response) -> list[float]:
    """Return the finite responses of some arms.

    Args:
        arms: Cells.
        response: ``nll`` for the change in NLL, ``kl`` for KL(clean || perturbed).

    Returns:
        One figure per cell that has one, nats per token.
    """
    found = [arm.delta_nll if response == "nll" else arm.kl for arm in arms if arm.status == "ok"]
    return [value for value in found if value is not None]


def _groups(arms: Sequence[Arm]) -> dict[tuple[str, float, str], list[Arm]]:
    """Group cells by (matching, rate, arm). Seeds that changed the very same bits are one experiment, counted once."""
    groups: dict[tuple[str, float, str], dict[str, Arm]] = {}
    for arm in arms:
        groups.setdefault((arm.matching, arm.rate, arm.arm), {}).setdefault(arm.checksum_during, arm)
    return {key: list(group.values()) for key, group in groups.items()}


def finite(value: float) -> float | None:
    """Return a figure, or ``None`` where it is not finite (the record's NaN policy).

    Args:
        value: Any float.

    Returns:
        The figure or ``None``.
    """
    return value if math.isfinite(value) else None


def summarize_means(arms: Sequence[Arm], floor: NoiseFloor, confidence: float) -> tuple[Mean, ...]:
    """Return the mean response of every arm over its seeds.

    Args:
        arms: All cells.
        floor: The noise floor; a mean within it is marked.
        confidence: Two-sided coverage.

    Returns:
        One entry per (matching, rate, arm, response) that has any figure.
    """
    means = []
    for (matching, rate, arm), group in _groups(arms).items():
        for response in RESPONSES:
            values = values_of(group, response)
            broken = any(cell.status == "non_finite" for cell in group)
            if not values and not broken:
                continue
            status: Status = "non_finite" if broken else "ok"
            interval = None if broken else mean_interval(values, confidence)
            means.append(
                Mean(
                    rate=rate,
                    arm=arm,
                    matching=matching,
                    response=response,
                    seeds=len(values),
                    mean=interval.value if interval else None,
                    sd=float(np.std(values, ddof=1)) if interval and len(values) > 1 else None,
                    ci_low=finite(interval.low) if interval else None,
                    ci_high=finite(interval.high) if interval else None,
                    above_floor=bool(interval and abs(interval.value) > getattr(floor, response)),
                    status=status,
                )
            )
    return tuple(means)


def summarize_leverage(arms: Sequence[Arm], floor: NoiseFloor, confidence: float) -> tuple[Leverage, ...]:
    """Return leverage as ratio of means: outlier over other, outlier over all, and sign over magnitude where run.

    Args:
        arms: All cells.
        floor: The noise floor.
        confidence: Two-sided coverage.

    Returns:
        One entry per (matching, rate, response, pair) whose two arms were run.
    """
    groups = _groups(arms)
    pairs = [("outlier", "other"), ("outlier", "all"), *((p, f"magnitude_{p}") for p in ("outlier", "other", "all"))]
    found = []
    for matching, rate in dict.fromkeys((m, r) for m, r, _ in groups):
        for over, under in pairs:
            above, below = groups.get((matching, rate, over)), groups.get((matching, rate, under))
            if above is None or below is None:
                continue
            found += [
                _leverage(above, below, response, getattr(floor, response), confidence)
                for response in RESPONSES
                if values_of(above + below, response) or any(a.status != "ok" for a in above + below)
            ]
    return tuple(found)


def _leverage(above: list[Arm], below: list[Arm], response: Response, floor: float, confidence: float) -> Leverage:
    over, under = values_of(above, response), values_of(below, response)
    reason, interval, boot = "", None, None
    status: Status = "ok"
    if any(arm.status == "non_finite" for arm in above + below):
        status, reason = "non_finite", "a perturbed model gave NaN or infinity"
    else:
        interval, reason = ratio_of_means(over, under, confidence)
        boot = bootstrap_ratio(over, under, confidence) if len(under) > 1 and len(over) > 1 else None
        if interval is not None and abs(float(np.mean(under))) <= floor:
            reason = "the denominator's mean lies within the noise floor"
        if interval is None or reason:
            status = "inconclusive"
    mean_over, mean_under = (float(np.mean(v)) if v else math.nan for v in (over, under))
    point = mean_over / mean_under if mean_under > 0 else math.nan
    return Leverage(
        rate=above[0].rate,
        matching=above[0].matching,
        response=response,
        numerator=above[0].arm,
        denominator=below[0].arm,
        ratio=finite(point),
        ci_low=interval.low if interval else None,
        ci_high=interval.high if interval else None,
        bootstrap_low=boot.low if boot else None,
        bootstrap_high=boot.high if boot else None,
        confidence=confidence,
        status=status,
        reason=reason,
    )


def summarize_curves(arms: Sequence[Arm], floor: NoiseFloor, confidence: float) -> tuple[Curve, ...]:
    """Return, per arm, the log-log slope of response against rate and the largest rate still linear.

    Args:
        arms: All cells.
        floor: The noise floor; a lowest rate within it cannot anchor the line.
        confidence: Two-sided coverage.

    Returns:
        One entry per (matching, arm, response) with two rates or more.
    """
    groups = _groups(arms)
    curves = []
    for matching, arm in dict.fromkeys((m, a) for m, _, a in groups):
        rates = sorted(r for m, r, a in groups if (m, a) == (matching, arm))
        if len(rates) < 2:
            continue
        for response in RESPONSES:
            values = {rate: values_of(groups[matching, rate, arm], response) for rate in rates}
            if not all(values.values()):
                continue
            slope = log_log_slope(rates, [float(np.mean(v)) for v in values.values()])
            linear, note = _linear_range(values, getattr(floor, response), confidence)
            curves.append(
                Curve(
                    arm=arm,
                    matching=matching,
                    response=response,
                    slope=slope.value if slope else None,
                    slope_se=slope.standard_error if slope else None,
                    linear_up_to=linear,
                    note=note,
                )
            )
    return tuple(curves)


def _linear_range(values: dict[float, list[float]], floor: float, confidence: float) -> tuple[float | None, str]:
    """Follow the rates upwards while response/rate stays that of the lowest usable rate, within interval or 10 %."""
    usable = [rate for rate in values if float(np.mean(values[rate])) > floor]
    if not usable:
        return None, "every mean lies within the noise floor"
    anchor, last = usable[0], usable[0]
    for rate in usable[1:]:
        per_entry = [v / rate * anchor for v in values[rate]]
        ratio = ratio_of_means(per_entry, values[anchor], confidence)
        if ratio.interval is None:
            return (last if last > anchor else None), ratio.reason
        value, low, high = ratio.interval
        if not (low <= 1 <= high or abs(value - 1) <= _LINEAR_TOLERANCE):
            return last, f"at {rate:g} the response per flip is {value:.2g} times that at {anchor:g}"
        last = rate
    return last, ""


def predict(amplitudes: Sequence[Amplitude]) -> Prediction:
    """Return the leverage that amplitudes alone predict, averaged over matrices (THEORY 1.5).

    Args:
        amplitudes: One entry per matrix.

    Returns:
        Predicted leverage over all columns (``n E_out[alpha^2]``) and over the others.
    """

    def mean(pick: Callable[[Amplitude], float]) -> float:
        return float(np.mean([pick(a) for a in amplitudes]))

    plain, other = mean(lambda a: a.n_alpha2_outlier), mean(lambda a: a.n_alpha2_other)
    weighted, weighted_other = mean(lambda a: a.weighted_outlier), mean(lambda a: a.weighted_other)
    return Prediction(
        n_alpha2_outlier=plain,
        ratio_outlier_other=plain / other if other > 0 else None,
        weighted_outlier_all=weighted,
        weighted_outlier_other=weighted / weighted_other if weighted_other > 0 else None,
    )
