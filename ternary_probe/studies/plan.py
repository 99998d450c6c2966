"""What a leverage study runs: options, arms, and the recipe of every cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ternary_probe.errors import ProbeError
from ternary_probe.measure.nll import HEAD_BYTES
from ternary_probe.perturb import Columns, Magnitude, OutlierColumns, SignFlip
from ternary_probe.perturb.columns import SelectBy
from ternary_probe.perturb.draw import Matching, RandomEntries, proportional_counts

if TYPE_CHECKING:
    from ternary_probe.anatomy import WeightMatrix

POOLS = ("outlier", "other", "all")
ARMS = (*POOLS, *(f"magnitude_{pool}" for pool in POOLS))
MATCHINGS: tuple[Matching, ...] = ("count", "rate", "energy")
DEFAULT_SEEDS = 8
_NOISE_SEEDS = 4


@dataclass(frozen=True)
class LeverageOptions:
    """What to run.

    Attributes:
        rates: Flip rates, each in ``(0, 1]``.
        seeds: One cell per seed; eight or more for an interval worth the name.
        arms: Of `ARMS`; ``magnitude_*`` are the sign-preserving controls of equal Frobenius norm.
        matchings: How arms are made comparable, see `ternary_probe.perturb.draw.RandomEntries`.
        fraction: Share of input columns that are outliers.
        by: What ranks columns, ``energy`` or ``mean_abs``.
        include: Matrix name patterns; empty for every block matrix.
        exclude: Patterns taken out again.
        plant: Outlier columns planted before anything is measured.
        paper_counts: Allocate a total over matrices in proportion to the arm's own pools, as the paper does, instead of
            rounding in each matrix.
        head_bytes: Upper bound for one chunk of logits.
        batch: Windows per backbone call.
        confidence: Two-sided coverage of every interval.
    """

    rates: tuple[float, ...] = (0.001, 0.005)
    seeds: tuple[int, ...] = tuple(range(DEFAULT_SEEDS))
    arms: tuple[str, ...] = POOLS
    matchings: tuple[Matching, ...] = ("count",)
    fraction: float = 0.05
    by: SelectBy = "energy"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    plant: OutlierColumns | None = None
    paper_counts: bool = False
    head_bytes: int = HEAD_BYTES
    batch: int = 2
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Refuse options that could only give a plausible wrong number."""
        if not self.rates:
            raise ProbeError("no rate given: use --rates 0.001,0.005")
        for rate in self.rates:
            if not (math.isfinite(rate) and 0 < rate <= 1):
                raise ProbeError(f"rate {rate:g} is not in (0, 1]: --rates are shares of entries, 0.005 is 0.5 %")
        if not (math.isfinite(self.fraction) and 0 < self.fraction < 1):
            raise ProbeError(f"fraction {self.fraction:g} is not in (0, 1): --fraction is the share of outlier columns")
        if not self.seeds or min(self.seeds) < 0:
            raise ProbeError("a study needs at least one seed, none negative: use --seeds 8")
        for name, values in (
            ("rates", self.rates),
            ("seeds", self.seeds),
            ("arms", self.arms),
            ("matching", self.matchings),
        ):
            if len(set(values)) != len(values):
                raise ProbeError(f"--{name} names one twice: {', '.join(map(str, values))}")
        for arm in self.arms:
            if arm not in ARMS:
                raise ProbeError(f"unknown arm {arm!r}: --arms takes {', '.join(ARMS)}")
        for matching in self.matchings:
            if matching not in MATCHINGS:
                raise ProbeError(f"unknown matching {matching!r}: --matching takes {', '.join(MATCHINGS)}")
        if not self.arms or not self.matchings:
            raise ProbeError("a study needs at least one arm and one matching: --arms outlier,other --matching count")
        if not 0.5 < self.confidence < 1:
            raise ProbeError(f"confidence {self.confidence:g} is not in (0.5, 1)")


class Cell(NamedTuple):
    """One recipe to apply and measure."""

    rate: float
    arm: str
    matching: Matching
    seed: int
    recipe: RandomEntries
    key: str
    """Equal for cells that change the same entries in the same way, so that they are measured once."""


def plan_cells(
    options: LeverageOptions, matrices: Sequence[WeightMatrix], outlier: Mapping[str, tuple[int, ...]]
) -> list[Cell]:
    """Lay out every cell: seed by seed, so that an interrupted study has whole seeds.

    Args:
        options: What to run.
        matrices: The targeted matrices.
        outlier: Their outlier columns.

    Returns:
        Cells in the order they run.
    """
    return [
        make_cell(options, matrices, outlier, rate, arm, matching, seed)
        for seed in options.seeds
        for matching in options.matchings
        for rate in options.rates
        for arm in options.arms
    ]


def make_cell(
    options: LeverageOptions,
    matrices: Sequence[WeightMatrix],
    outlier: Mapping[str, tuple[int, ...]],
    rate: float,
    arm: str,
    matching: Matching,
    seed: int,
) -> Cell:
    """Make the resolved recipe of one cell.

    Args:
        options: What to run.
        matrices: The targeted matrices.
        outlier: Their outlier columns.
        rate: Flip rate.
        arm: Of `ARMS`.
        matching: How arms are matched.
        seed: The seed.

    Returns:
        The cell.
    """
    pool = arm.rpartition("_")[2]
    kind = Magnitude if arm.startswith("magnitude_") else SignFlip
    recipe = kind(
        rate=rate,
        columns=Columns.model_validate({"select": pool, "fraction": options.fraction, "by": options.by}),
        matching=matching,
        seed=seed,
        include=options.include,
        exclude=options.exclude,
    ).resolved_with(list(matrices), outlier)
    if options.paper_counts and matching == "count":
        recipe = recipe.model_copy(update={"counts": proportional_counts(recipe, matrices, outlier)})
    # An outlier arm flips the same entries whether matched by count or by rate, and `all` is the energy arms' yardstick.
    same = {("outlier", "count"): "rate", ("all", "energy"): "rate"}
    canonical = matching if options.paper_counts else same.get((pool, matching), matching)
    return Cell(rate, arm, matching, seed, recipe, f"{arm}|{canonical}|{rate!r}|{seed}")


def noise_cells(
    options: LeverageOptions, matrices: Sequence[WeightMatrix], outlier: Mapping[str, tuple[int, ...]]
) -> list[Cell]:
    """Lay out the flips at a tenth of the lowest rate, whose spread is part of the noise floor.

    Args:
        options: What to run.
        matrices: The targeted matrices.
        outlier: Their outlier columns.

    Returns:
        Cells over at most four seeds; none where a tenth of the rate rounds to no flip at all.
    """
    rate = min(options.rates) / 10
    arm = "other" if "other" in options.arms else "all"
    cells = [make_cell(options, matrices, outlier, rate, arm, "count", seed) for seed in options.seeds[:_NOISE_SEEDS]]
    return [cell for cell in cells if sum((cell.recipe.counts or {}).values()) > 0]
