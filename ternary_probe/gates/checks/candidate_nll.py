"""Check ``candidate-nll``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._noninferiority import estimate_mean
from ternary_probe.gates._paired_finding import Wording, compared_finding, worst_block

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.records import Finding


class CandidateNllLimits(Limits):
    """How much likelihood a candidate may lose."""

    max_delta_nll: float = Field(
        0.05,
        description="nats a token (0.05: 5 % perplexity). Our choice, between what llama.cpp's table for Llama 3 8B has for "
        "4 bits (Q4_K_M 0.028, Q4_0 0.072) and for 3 (Q3_K_M 0.10); 2 bits there cost 0.45",
    )


_WORDING = Wording("candidate-nll", "the change in NLL from base to candidate", "nat/token", "high")


@check("candidate-nll", tier=Tier.RESPONSE, limits=CandidateNllLimits, compares=True, tests=1)
def candidate_nll(evidence: Evidence, limits: CandidateNllLimits) -> Iterable[Finding]:
    """The candidate must not predict the text worse than its base by more than is allowed.

    Paired on the same tokens; Student's t over windows. ΔNLL may be negative: a candidate may predict a text better.

    Yields:
        One finding.
    """
    comparison = evidence.comparison
    delta = comparison.delta_nll
    estimate = estimate_mean(comparison.window_sums(delta), comparison.counts)
    yield compared_finding(
        _WORDING,
        estimate,
        limits.max_delta_nll,
        evidence,
        floor=comparison.nll_floor,
        details={
            "base_nll": float(comparison.base_nll.mean()),
            "candidate_nll": float(comparison.candidate_nll.mean()),
            "worst_block": worst_block(comparison, delta),
        },
    )
