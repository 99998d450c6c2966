"""Check ``decision-margin``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._noninferiority import estimate_median
from ternary_probe.gates._paired_finding import Wording, compared_finding, finite
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence


class DecisionMarginLimits(Limits):
    """How much of its base's decision margin a candidate must keep."""

    min_factor: float = Field(
        0.75,
        gt=0,
        description="median ratio. Our choice, between the medians arXiv 2608.06564 reports for 4 bits (0.86) and for 3 "
        "(0.33)",
    )


_WORDING = Wording("decision-margin", "the median decision margin, candidate over base,", "", "low")


@check("decision-margin", tier=Tier.RESPONSE, limits=DecisionMarginLimits, compares=True, tests=1)
def candidate_margin(evidence: Evidence, limits: DecisionMarginLimits) -> Iterable[Finding]:
    """The candidate must decide by a margin like its base's: log-probability of its first token less that of its second.

    Damage shrinks margins long before it moves a benchmark's score (arXiv 2608.06564). The figure is the median over tokens
    of the ratio of the two margins, bounded by Woodruff's interval over windows; tokens on which the base itself is
    undecided (margin 0) have no ratio and are left out. Beside it stands the factor on the base's own first and second
    token, which turns negative where the candidate prefers the second.

    Yields:
        One finding.
    """
    comparison = evidence.comparison
    decided = comparison.base_margin > 0
    if not decided.any():
        yield Finding(
            check=_WORDING.check,
            status="not_applicable",
            message="the base puts two tokens first everywhere: it takes no decision whose margin could shrink",
        )
        return
    margin = comparison.base_margin[decided]
    estimate = estimate_median(comparison.candidate_margin[decided] / margin, comparison.window[decided])
    yield compared_finding(
        _WORDING,
        estimate,
        limits.min_factor,
        evidence,
        details={
            "median_on_base_tokens": finite(float(np.median(comparison.kept_margin[decided] / margin))),
            "median_base_margin": finite(float(np.median(margin))),
            "undecided_tokens": int((~decided).sum()),
        },
    )
