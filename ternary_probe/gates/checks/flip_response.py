"""Check ``flip-response``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Tier, check
from ternary_probe.gates._noninferiority import estimate_mean
from ternary_probe.gates._paired_finding import Wording, paired_finding
from ternary_probe.gates._response_study import StudyLimits, kl_of, nll_of, responses, small_study
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence


class FlipResponseLimits(StudyLimits):
    """How much a few lost signs may cost."""

    max_delta_nll: float = Field(
        0.5,
        gt=0,
        description="mean change in NLL, nats a token, with `rate` of all signs flipped. Our choice: three times what the "
        "second-order theory gives for SmolLM2 (159 p, so 0.16 at 0.1 %), a small model; TinyLlama loses 0.005",
    )
    max_kl: float = Field(
        0.5, gt=0, description="mean KL(clean || flipped), nats a token; as max_delta_nll, which it equals on average"
    )


@check("flip-response", tier=Tier.RESPONSE, limits=FlipResponseLimits, severity="warn", tests=2)
def flip_response(evidence: Evidence, limits: FlipResponseLimits) -> Iterable[Finding]:
    """A small share of flipped signs must not ruin the model: change in NLL, and KL, against itself unflipped.

    Signs are flipped at random over all block matrices, several seeds. The claim is about random flips on this text, so
    seeds are the units (Student's t). ΔNLL carries first-order noise that KL does not (THEORY 1.6); each is a decision of
    its own. The thresholds rest on few models, so it warns.

    Yields:
        One finding for each of the two.
    """
    study = small_study(evidence.subject, limits)
    if isinstance(study, Finding):
        yield study.model_copy(update={"check": "flip-response"})
        return
    cases = (
        ("change in NLL", nll_of, limits.max_delta_nll, study.noise_floor.nll),
        ("KL(clean || flipped)", kl_of, limits.max_kl, study.noise_floor.kl),
    )
    for noun, pick, threshold, floor in cases:
        values = responses(study, "all", pick)
        if values is None:
            yield Finding(
                check="flip-response",
                status="fail",
                subject=noun,
                threshold=threshold,
                message=f"flipping {limits.rate:.2g} of the signs makes the model compute NaN or infinity",
            )
            continue
        wording = Wording(
            "flip-response",
            f"the {noun} with {limits.rate:.2g} of the signs flipped",
            "nat/token",
            "high",
            unit_noun="seeds",
            more="raise seeds of this check in the policy",
        )
        yield paired_finding(
            wording,
            estimate_mean(values),
            threshold,
            evidence,
            subject=noun,
            floor=floor,
            details={"rate": limits.rate, "flips": study.arms[0].flips, "values": list(values)},
        )
