"""Check ``candidate-kl``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._noninferiority import estimate_mean
from ternary_probe.gates._paired_finding import Wording, compared_finding, finite, worst_block

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.records import Finding


class CandidateKlLimits(Limits):
    """How far a candidate's distribution may lie from its base's."""

    max_kl: float = Field(
        0.05,
        ge=0,
        description="nats a token. Our choice, between what llama.cpp's table for Llama 3 8B has for 4 bits (Q4_K_M 0.031, "
        "Q4_0 0.072) and for 3 (Q3_K_M 0.10); Llama 2 7B Q4_K_M is at 0.013",
    )


_WORDING = Wording("candidate-kl", "KL(base || candidate)", "nat/token", "high")


@check("candidate-kl", tier=Tier.RESPONSE, limits=CandidateKlLimits, compares=True, tests=1)
def candidate_kl(evidence: Evidence, limits: CandidateKlLimits) -> Iterable[Finding]:
    """The candidate's distribution over the next token must stay near its base's.

    Unlike ΔNLL it cannot be hidden by a change that happens to suit the text. Student's t over windows, corrected for the
    long tail of the few tokens that carry most of it.

    Yields:
        One finding.
    """
    comparison = evidence.comparison
    estimate = estimate_mean(comparison.window_sums(comparison.kl), comparison.counts)
    yield compared_finding(
        _WORDING,
        estimate,
        limits.max_kl,
        evidence,
        floor=comparison.kl_floor,
        details={
            "largest": finite(float(comparison.kl.max())),
            "worst_block": worst_block(comparison, comparison.kl),
        },
    )
