"""Check ``candidate-agreement``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._noninferiority import estimate_share
from ternary_probe.gates._paired_finding import Wording, compared_finding, worst_block

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.records import Finding


class CandidateAgreementLimits(Limits):
    """How often a candidate must decide as its base does."""

    min_agreement: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of tokens. Our choice, just below what llama.cpp's table has for 4 bits (Q4_K_M: Llama 2 7B "
        "0.947, Llama 3 8B 0.919); 2 bits there agree in 0.86 and 0.71, BF16 and FP16 of one model in 0.997",
    )


_WORDING = Wording("candidate-agreement", "the share of tokens both models put first", "", "low")


@check("candidate-agreement", tier=Tier.RESPONSE, limits=CandidateAgreementLimits, compares=True, tests=1)
def candidate_agreement(evidence: Evidence, limits: CandidateAgreementLimits) -> Iterable[Finding]:
    """Candidate and base must put the same token first, as greedy decoding would.

    Student's t over windows, never narrower than the exact bound for as many independent tokens.

    Yields:
        One finding.
    """
    comparison = evidence.comparison
    estimate = estimate_share(comparison.window_sums(comparison.same_top), comparison.counts)
    differs = (~comparison.same_top).astype(float)
    yield compared_finding(
        _WORDING,
        estimate,
        limits.min_agreement,
        evidence,
        details={
            "tokens_that_differ": int(differs.sum()),
            "worst_block_share_that_differs": worst_block(comparison, differs),
        },
    )
