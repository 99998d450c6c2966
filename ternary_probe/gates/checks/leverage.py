"""Check ``leverage``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Tier, check
from ternary_probe.gates._noninferiority import LogRatioEstimate, judge
from ternary_probe.gates._paired_finding import fail_rate, finite
from ternary_probe.gates._response_study import StudyLimits, kl_of, responses, small_study
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence


class LeverageLimits(StudyLimits):
    """How much more a sign in an outlier column may matter than one elsewhere."""

    max_leverage: float = Field(
        100.0,
        gt=1,
        description="ratio of KL, outlier columns over the others, as many flips. Our choice: three times the largest "
        "measured on a healthy trained model (TinyLlama 10 to 11, arXiv 2605.18933; SmolLM2 28 and 31)",
    )


@check("leverage", tier=Tier.RESPONSE, limits=LeverageLimits, severity="warn", tests=1)
def leverage(evidence: Evidence, limits: LeverageLimits) -> Iterable[Finding]:
    """A sign flipped in an outlier column must not cost out of proportion to one elsewhere (arXiv 2605.18933).

    A small count-matched study (THEORY 1.5): the same number of random flips in outlier columns and in the others, several
    seeds each. The figure is the ratio of mean KL(clean || flipped), the response without first-order noise; seeds are the
    units, bounds are Welch's on the log. A high leverage is a reason to keep outlier columns in higher precision, not a
    defect: it warns.

    Yields:
        One finding.
    """
    subject = evidence.subject
    study = small_study(subject, limits)
    if isinstance(study, Finding):
        yield study.model_copy(update={"check": "leverage"})
        return
    above, below = (responses(study, arm, kl_of) for arm in ("outlier", "other"))
    if above is None or below is None:
        yield Finding(
            check="leverage",
            status="fail",
            message=f"flipping {limits.rate:.2g} of the signs makes the model compute NaN or infinity",
        )
        return
    estimate = LogRatioEstimate(above, below)
    details = {
        "rate": limits.rate,
        "seeds": estimate.units,
        "mean_kl_outlier": sum(above) / len(above),
        "mean_kl_other": sum(below) / len(below),
        "noise_floor_kl": study.noise_floor.kl,
        "predicted_from_amplitude": study.prediction.ratio_outlier_other if study.prediction else None,
    }
    small = abs(details["mean_kl_other"] or 0.0) <= study.noise_floor.kl
    if not math.isfinite(estimate.value) or estimate.reason or small:
        reason = estimate.reason or "the others' mean response lies within the noise floor"
        yield Finding(
            check="leverage",
            status="inconclusive",
            threshold=limits.max_leverage,
            message=f"no leverage can be given: {reason}; raise rate or seeds of this check in the policy",
            details=details,
        )
        return
    found = judge(
        estimate, math.log(limits.max_leverage), bad="high", alpha=evidence.alpha, fail_alpha=fail_rate(evidence)
    )
    low, high = math.exp(found.lower), math.exp(found.upper)
    words = {
        "pass": f"at most {high:.3g}, and {limits.max_leverage:.4g} is allowed",
        "fail": f"at least {low:.3g}, above the {limits.max_leverage:.4g} allowed",
        "inconclusive": f"between {low:.3g} and {high:.3g}, so {limits.max_leverage:.4g} is not decided",
    }[found.status]
    needed = found.units_needed
    more = "" if found.status != "inconclusive" or needed is None else f"; about {needed} seeds would decide"
    yield Finding(
        check="leverage",
        status=found.status,
        measured=finite(math.exp(found.value)),
        threshold=limits.max_leverage,
        message=f"a sign flipped in an outlier column costs {math.exp(found.value):.3g} times one elsewhere, {words}; "
        f"{found.units} seeds can show a factor of {math.exp(found.detectable):.2g}{more}",
        details=details
        | {
            "lower_bound": finite(low),
            "upper_bound": finite(high),
            "smallest_detectable_factor": finite(math.exp(found.detectable)),
            "seeds_to_decide": needed,
        },
    )
