"""Check ``quantized-twice``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread
from ternary_probe.records import Finding, FindingStatus

if TYPE_CHECKING:
    import torch

    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.measure.grid import Grid

_NAME = "quantized-twice"
_SCALE_TOLERANCE = 0.1
_SAME_SIGN = 0.9


class TwiceLimits(Limits):
    """When a candidate was not made from its base directly."""

    warn_astray: float = Field(
        0.01,
        gt=0,
        le=1,
        description="share of entries that one rounding of the base cannot have put where they are. Rounding the base itself "
        "leaves none, rounding what was rounded before several per cent. Our choice",
    )


class Shrinkage(NamedTuple):
    """Scale of a ternary matrix beside the base it came from, over units that share a scale.

    Attributes:
        ratio: Scale over the base's mean |w|: 1 for one absmean.
        share: Share of entries that are not 0. A second absmean multiplies the scale by it.
    """

    ratio: float
    share: float

    @property
    def times(self) -> int:
        """How often absmean was applied: 2 or 3 where the scale says so, else 1."""
        for times in (2, 3):
            expected = self.share ** (times - 1)
            if expected < 1 - _SCALE_TOLERANCE and abs(self.ratio / expected - 1) < _SCALE_TOLERANCE:
                return times
        return 1


@check(_NAME, tier=Tier.SCAN, limits=TwiceLimits, compares=True)
def quantized_twice(evidence: Evidence, limits: TwiceLimits) -> Iterable[Finding]:
    """A candidate must be quantized from its base, not from something quantized before.

    Looked at are matrices of the candidate that lie on a grid, by a sample of rows. Absmean is not idempotent: applied again
    it leaves the codes and multiplies the scale by the share of non-zeros (0.69 for Gaussian weights), which fails. Other
    grids: on more than three levels each entry must be at the level of its group nearest to the base's weight, on three or
    fewer the levels must rise with the weight; entries that do not warn. So do methods that compensate errors (GPTQ and its
    kin): for those switch this off.

    Yields:
        One finding.
    """
    from ternary_probe.gates._stored_grids import SAMPLED_ROWS, matrices, stored_grid
    from ternary_probe.gates._weight_reader import sample_rows

    if evidence.base is None:
        return
    base, candidate = evidence.base.parameters, evidence.subject.parameters
    if (nothing := unread(_NAME, base, candidate)) is not None:
        yield nothing
        return
    shared = set(matrices(base))
    astray: dict[str, float] = {}
    again: dict[str, Shrinkage] = {}
    for name in matrices(candidate):
        if name not in shared or base.tensors[name].shape != candidate.tensors[name].shape:
            continue
        grid = stored_grid(candidate, name)
        if grid is None:
            continue
        old, new = sample_rows(base, name, SAMPLED_ROWS).float(), sample_rows(candidate, name, SAMPLED_ROWS).float()
        astray[name] = share_out_of_order(old, new, grid) if grid.levels <= 3 else share_astray(old, new, grid)
        shrunk = shrinkage(old, new, grid) if grid.levels <= 3 else None
        if shrunk is not None and shrunk.times > 1:
            again[name] = shrunk
    if not astray:
        message = "no matrix of the candidate lies on a grid and has its counterpart in the base"
        yield fault(_NAME, "not_applicable", "", message)
        return
    mean = sum(astray.values()) / len(astray)
    worst = max(astray, key=lambda name: astray[name])
    details = {"matrices": len(astray), "worst": worst, "worst_share": astray[worst], "shrunk": len(again)}
    if 2 * len(again) > len(astray):
        name, shrunk = next(iter(again.items()))
        message = (
            f"the candidate was quantized {shrunk.times} times: in {len(again)} of {len(astray)} ternary matrices the scale "
            f"is the base's mean |w| times (share of non-zeros)^{shrunk.times - 1} ({name}: {shrunk.ratio:.3f})"
        )
        yield fault(_NAME, "fail", name, message, shrunk.ratio, 1.0, "scale over mean |w|", **details)
        return
    over = mean > limits.warn_astray
    why = ": it was quantized twice, or by a method that compensates errors" if over else ""
    message = (
        f"{100 * mean:.2g} % of the candidate's entries are where one rounding of the base cannot have put them{why}"
    )
    status: FindingStatus = "warn" if over else "pass"
    subject = worst if over else ""
    yield fault(_NAME, status, subject, message, mean, limits.warn_astray, "share of entries", **details)


def share_astray(base: torch.Tensor, candidate: torch.Tensor, grid: Grid) -> float:
    """Return the share of entries that are not at the level of their group nearest to the base's entry.

    Args:
        base: Rows of the base, ``[rows, width]``.
        candidate: The same rows of the candidate, on a grid; a group's own entries are its levels.
        grid: The grid.

    Returns:
        A share. Two levels at an equal distance (to 1 %) count as nearest both.
    """
    import torch

    from ternary_probe.gates._stored_grids import grouped

    old, new = grouped(base, grid).contiguous(), grouped(candidate, grid)
    levels = new.sort(1).values.contiguous()
    position = torch.searchsorted(levels, old)
    above = levels.gather(1, position.clamp(max=levels.shape[1] - 1))
    below = levels.gather(1, (position - 1).clamp(min=0))
    nearest = torch.minimum((old - above).abs(), (old - below).abs())
    wrong = (old - new).abs() > 1.01 * nearest + torch.finfo(torch.float32).tiny
    return float(wrong.double().mean())


def share_out_of_order(base: torch.Tensor, candidate: torch.Tensor, grid: Grid) -> float:
    """Return the share of entries whose level does not rise with the base's weight, whatever the thresholds.

    Args:
        base: Rows of the base, ``[rows, width]``.
        candidate: The same rows of the candidate, on a grid.
        grid: The grid.

    Returns:
        Share of places at which the levels, sorted by the base's weight, differ from the levels sorted by themselves.
    """
    from ternary_probe.gates._stored_grids import grouped

    old, new = grouped(base, grid), grouped(candidate, grid)
    order = new.argsort(dim=1, stable=True)
    old, levels = old.gather(1, order), new.gather(1, order)  # equal weights then come in the order of their levels
    by_weight = levels.gather(1, old.argsort(dim=1, stable=True))
    return float((by_weight != levels).double().mean())


def shrinkage(base: torch.Tensor, candidate: torch.Tensor, grid: Grid) -> Shrinkage | None:
    """Compare a ternary matrix's scale with the base's mean magnitude, by the units that share a scale.

    Args:
        base: Rows of the base, ``[rows, width]``.
        candidate: The same rows of the candidate, ternary.
        grid: Its grid.

    Returns:
        The figures (medians over units; pooled where all units have one scale), or None where the matrix is not ternary
        around 0 or its signs are not the base's.
    """
    from ternary_probe.gates._stored_grids import grouped

    old, new = grouped(base, grid).double(), grouped(candidate, grid).double()
    size = new.abs()
    scale = size.amax(1)
    alive = scale > 0
    old, new, size, scale = old[alive], new[alive], size[alive], scale[alive]
    taken = size > 0
    if not bool(taken.any()) or bool(((size - scale[:, None]).abs() > 0.02 * scale[:, None])[taken].any()):
        return None
    if float((old.sign() == new.sign())[taken].double().mean()) < _SAME_SIGN:
        return None
    mean, share = old.abs().mean(1), taken.double().mean(1)
    if float(scale.max() / scale.min()) < 1.02:
        return Shrinkage(float(scale.mean() / mean.mean()), float(share.mean()))
    return Shrinkage(float((scale / mean).median()), float(share.median()))
