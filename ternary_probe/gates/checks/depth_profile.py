"""Check ``depth-profile``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from ternary_probe.errors import ProbeError
from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence, Subject
    from ternary_probe.gates._forward import ForwardEvidence
    from ternary_probe.measure.depth import DepthProfile, Vector

_NAME = "depth-profile"
Grade = Literal["pass", "warn", "fail"]


class DepthProfileLimits(Limits):
    """How far the smallest singular value of the residual stream may fall."""

    ratio_warn: float = Field(
        1.0,
        gt=0,
        description="sigma_min(X_l)/sigma_min(X_0) below which to warn: at least 1 on 13 of 14 published models (arXiv "
        "2606.19491), while a healthy random-init GPT-2 of width 256 falls to 0.50",
    )
    ratio_fail: float = Field(
        0.25, gt=0, description="sigma_min(X_l)/sigma_min(X_0) below which to fail: half of that GPT-2's. Our choice"
    )
    step_warn: float = Field(
        0.3,
        gt=0,
        description="sigma_min(X_l)/sigma_min(X_(l-1)) below which to warn: natural dips of SmolLM2 go down to 0.42",
    )
    step_fail: float = Field(
        0.15,
        gt=0,
        description="sigma_min(X_l)/sigma_min(X_(l-1)) below which to fail: planted 18-fold falls give 0.06-0.09",
    )
    base_warn: float = Field(
        0.3,
        gt=0,
        description="ratio to X_0 of a candidate over its base's, at the same block, below which to warn. As a step's",
    )
    base_fail: float = Field(
        0.15, gt=0, description="ratio to X_0 of a candidate over its base's below which to fail. As a step's"
    )
    tokens_per_dimension: float = Field(
        4.0,
        gt=1,
        description="tokens for every dimension of the stream below which nothing is decided: at 1 sigma_min is 0, from 4 "
        "on it is useful",
    )


@check(_NAME, tier=Tier.FORWARD, limits=DepthProfileLimits)
def depth_profile(evidence: Evidence, limits: DepthProfileLimits) -> Iterable[Finding]:
    """The residual stream's smallest singular value must not collapse with depth (arXiv 2606.19491, Cor. sigma-min-res).

    Two statistics of the uncentred stream X_l after every block: its sigma_min over that of the embedding's output X_0, and
    over that of the block before, since a stream that has grown hides a fall from the first. Where blocks multiply the whole
    stream by a scalar, it is divided out, and the raw figures stand beside. A fall is traced to the sub-layer that causes it.
    The premise is that blocks add to the stream unchanged; models of another make are named, not failed.

    Yields:
        A finding for the ratio, one for the step, and one against the base where there is one.
    """
    forward = evidence.subject.forward
    profile = _profile(forward, limits)
    if isinstance(profile, Finding):
        yield profile
        return
    fresh, clauses = _fresh(evidence.subject, limits)
    details = _figures(forward, profile) | fresh
    for statistic in ("ratio", "step"):
        yield _fall(forward, profile, statistic, limits, details, clauses.get(statistic, ""))
        details = {}
    if evidence.base is not None:
        yield _against_base(evidence.base, forward, profile, limits)


def _profile(forward: ForwardEvidence, limits: DepthProfileLimits) -> DepthProfile | Finding:
    """Return the profile, or the finding that says why nothing can be decided on it."""
    if forward.profile_exception is not None:
        return Finding(
            check=_NAME,
            status="not_applicable",
            message=f"blocks do not add to the residual stream unchanged, which the statement presumes: "
            f"{forward.profile_exception}",
        )
    width = forward.anatomy.blocks[0].call.inputs[0].shape[-1]
    needed = math.ceil(limits.tokens_per_dimension * width)
    if forward.profile is None or forward.tokens < needed:
        return Finding(
            check=_NAME,
            status="inconclusive",
            measured=float(forward.tokens),
            threshold=float(needed),
            unit="tokens",
            message=f"not measurable: {forward.tokens} tokens for a stream of {width} dimensions; give {needed:,} or more "
            "(--windows, --text)",
            details={} if forward.profile is None else _figures(forward, forward.profile),
        )
    profile = forward.profile
    if profile.start > 0 and forward.distinct_tokens <= width:
        return Finding(
            check=_NAME,
            status="inconclusive",
            measured=float(forward.distinct_tokens),
            threshold=float(width),
            unit="distinct tokens",
            message=f"not measurable: {forward.distinct_tokens} distinct token ids cannot span the {width} dimensions of the "
            "embedding's output; give longer or more varied text",
        )
    if not (profile.sigma > profile.floor).any():
        return Finding(
            check=_NAME,
            status="inconclusive",
            message="not measurable: sigma_min lies at the floor of rounding in every block; load with --dtype float32",
            details=_figures(forward, profile),
        )
    return profile


class _Worst(NamedTuple):
    point: int
    value: float
    grade: Grade | Literal["inconclusive"]
    threshold: float


def _worst(values: Vector, upper: Vector, warn: float, fail: float) -> _Worst | None:
    """Return the smallest value with its grade; inconclusive where rounding could have made it so small."""
    finite = [i for i in range(len(values)) if math.isfinite(values[i])]
    if not finite:
        return None
    point = min(finite, key=lambda i: values[i])
    value = float(values[point])
    grade, best = _grade(value, warn, fail), _grade(float(upper[point]), warn, fail)
    return _Worst(point, value, grade if grade == best else "inconclusive", fail if grade == "fail" else warn)


def _grade(value: float, warn: float, fail: float) -> Grade:
    return "fail" if value < fail else "warn" if value < warn else "pass"


def _fall(
    forward: ForwardEvidence,
    profile: DepthProfile,
    statistic: str,
    limits: DepthProfileLimits,
    details: dict[str, Any],
    clause: str,
) -> Finding:
    series = getattr(profile, statistic)
    warn, fail = getattr(limits, f"{statistic}_warn"), getattr(limits, f"{statistic}_fail")
    values = series()
    values[profile.start] = math.nan  # 1 by definition
    worst = _worst(values, series(upper=True), warn, fail)
    to = f"that of {_stream(profile, profile.start)}" if statistic == "ratio" else "that of the stream before it"
    if worst is None:
        return Finding(
            check=_NAME, status="inconclusive", message=f"sigma_min is at the floor of rounding: no {statistic}"
        )
    name = profile.names[worst.point]
    what = f"sigma_min of the residual stream after {name} is {worst.value:.3g} of {to}"
    message = f"{what}, the lowest of {len(profile.names) - 1} blocks" if worst.grade == "pass" else what
    found: dict[str, Any] = {}
    if worst.grade == "inconclusive":
        message += (
            f", but that is at the floor of rounding ({profile.floor[worst.point]:.2g}): load with --dtype float32"
        )
    elif worst.grade != "pass":
        traced = worst.point if statistic == "step" else _steepest(profile, worst.point)
        fall = forward.locate(traced)
        found = {"traced_block": fall.block, "cause": fall.cause, "sub_layer_ratios": fall.parts}
        by = f"to {fall.parts[fall.cause]:.3g} of it" if fall.cause in fall.parts else "as a whole"
        where = "" if traced == worst.point else f" in {fall.block}, the steepest block on the way"
        message += f"; {fall.cause} takes it down {by}{where}"
    return Finding(
        check=_NAME,
        status=worst.grade,
        subject=name,
        measured=worst.value,
        threshold=worst.threshold,
        unit="of X_0" if statistic == "ratio" else "of X_(l-1)",
        message=message + clause,
        details=details | found,
    )


def _steepest(profile: DepthProfile, last: int) -> int:
    step = profile.step()
    usable = [i for i in range(1, last + 1) if math.isfinite(step[i])]
    return min(usable, key=lambda i: step[i])


def _stream(profile: DepthProfile, point: int) -> str:
    if point == 0:
        return "the embedding's output X_0"
    return f"{profile.names[point]}, the first stream above the floor of rounding"


def _figures(forward: ForwardEvidence, profile: DepthProfile) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "tokens": forward.tokens,
        "distinct_tokens": forward.distinct_tokens,
        "width": profile.width,
        "streams": list(profile.names),
        "sigma_min": _plain(profile.sigma),
        "floor": _plain(profile.floor),
        "ratio": _plain(profile.ratio()),
        "step": _plain(profile.step()),
        "dips": {
            profile.names[i]: float(value)
            for i, value in enumerate(profile.step())
            if math.isfinite(value) and value < 1
        },
    }
    if profile.scaled:
        figures |= {
            "stream_scalars": _plain(profile.scale),
            "ratio_raw": _plain(profile.ratio(raw=True)),
            "step_raw": _plain(profile.step(raw=True)),
        }
    return figures


def _plain(values: Vector) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def _fresh(subject: Subject, limits: DepthProfileLimits) -> tuple[dict[str, Any], dict[str, str]]:
    """Return details and clauses of the same model with fresh weights."""
    try:
        fresh = subject.random_init
        if fresh is None:
            return {}, {}
        profile = _profile(fresh.forward, limits)
    except ProbeError as error:
        return {"random_init": str(error)}, {"ratio": f"; random init: not measured ({error})"}
    if isinstance(profile, Finding):
        return {"random_init": profile.message}, {"ratio": f"; random init: {profile.message}"}
    clauses = {}
    for statistic in ("ratio", "step"):
        values = getattr(profile, statistic)()[profile.start + 1 :]
        finite = [float(value) for value in values if math.isfinite(value)]
        if finite:
            clauses[statistic] = f"; random init: lowest {min(finite):.3g}"
    return {"random_init": _figures(fresh.forward, profile)}, clauses


def _against_base(
    base: Subject, forward: ForwardEvidence, profile: DepthProfile, limits: DepthProfileLimits
) -> Finding:
    before = _profile(base.forward, limits)
    if isinstance(before, Finding) or len(before.names) != len(profile.names):
        why = before.message if isinstance(before, Finding) else "it has another number of blocks"
        return Finding(check=_NAME, status="inconclusive", message=f"no comparison with the base {base.name}: {why}")
    old = before.ratio()
    worst = _worst(profile.ratio() / old, profile.ratio(upper=True) / old, limits.base_warn, limits.base_fail)
    if worst is None:
        return Finding(
            check=_NAME, status="inconclusive", message="no stream is above the floor of rounding in both models"
        )
    name = profile.names[worst.point]
    found: dict[str, Any] = {}
    message = (
        f"sigma_min after {name}, relative to the embedding's output, is {worst.value:.3g} of what it is in the base"
    )
    if worst.grade in {"warn", "fail"}:
        change = profile.step() / before.step()
        usable = [i for i in range(1, worst.point + 1) if math.isfinite(change[i])]
        fall = forward.locate(min(usable, key=lambda i: change[i]))
        found = {"traced_block": fall.block, "cause": fall.cause, "sub_layer_ratios": fall.parts}
        message += f"; the steepest change is in {fall.block}, whose {fall.cause} takes it down"
    return Finding(
        check=_NAME,
        status=worst.grade,
        subject=name,
        measured=worst.value,
        threshold=worst.threshold,
        unit="of the base's",
        message=message,
        details={"base": base.name, "base_ratio": _plain(old)} | found,
    )
