"""What a sensitivity study runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ternary_probe import schemes
from ternary_probe.errors import ProbeError
from ternary_probe.measure.fisher import TAIL_NATS
from ternary_probe.measure.nll import HEAD_BYTES
from ternary_probe.perturb.columns import SelectBy

Per = Literal["block", "matrix", "none"]


@dataclass(frozen=True)
class SensitivityOptions:
    """What to run. Every count may be 0, which leaves that part out; the Fisher pass always runs.

    Attributes:
        draws: Label draws of the Fisher pass.
        rates: Flip rates at which the bulk is sampled beside its prediction.
        pools: Pools of the bulk samples: ``outlier``, ``other``, ``all``.
        seeds: Seeds of every sampled response; of the first look where a precision is asked for.
        seed: First seed.
        per: What is flipped on its own: each ``block``, each ``matrix``, or ``none``.
        unit_rate: Flip rate within a unit.
        controls: Seeds of sign-preserving noise of equal norm per unit.
        precision: Relative half-width at which a unit's interval is tight enough; ``None`` takes the first look.
        budget: Minutes after which no further look is begun; ``None`` sets no end.
        singles: Entries that are flipped and removed one by one, at most.
        bound: Predicted nats of one flip from which an entry is kept apart from the bulk.
        super_bound: Measured nats from which an entry is called a super weight.
        columns: Columns each screen nominates.
        random_columns: Columns drawn at random beside them.
        together: Columns of a matrix in one run.
        worst: Flips of the greedy worst case.
        plan: Share of the summed ternary damage to avoid by keeping matrices as they are; ``None`` makes no plan.
        scheme: Ternary scheme of the plan.
        fraction: Share of input columns that are outliers.
        by: What ranks columns.
        include: Matrix name patterns; empty for every block matrix.
        exclude: Patterns taken out again.
        head_bytes: Upper bound for one chunk of logits.
    """

    draws: int = 8
    rates: tuple[float, ...] = (0.0003, 0.001)
    pools: tuple[str, ...] = ("outlier", "other")
    seeds: int = 8
    seed: int = 0
    per: Per = "block"
    unit_rate: float = 0.003
    controls: int = 2
    precision: float | None = None
    budget: float | None = None
    singles: int = 24
    bound: float = TAIL_NATS
    super_bound: float = 0.1
    columns: int = 8
    random_columns: int = 16
    together: int = 4
    worst: int = 3
    plan: float | None = None
    scheme: str = "absmean@g128"
    fraction: float = 0.05
    by: SelectBy = "energy"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    head_bytes: int = HEAD_BYTES

    def __post_init__(self) -> None:
        """Refuse options that could only give a plausible wrong number.

        Raises:
            ProbeError: If a rate, count or bound is out of its range, or a name is not known.
        """
        if self.draws < 1:
            raise ProbeError(f"--draws {self.draws}: the Fisher pass needs at least one draw of labels")
        for rate in (*self.rates, self.unit_rate):
            if not (math.isfinite(rate) and 0 < rate <= 1):
                raise ProbeError(f"rate {rate:g} is not in (0, 1]: rates are shares of entries, 0.001 is 0.1 %")
        if len(set(self.rates)) != len(self.rates):
            raise ProbeError("--rates names one rate twice")
        for pool in self.pools:
            if pool not in {"outlier", "other", "all"}:
                raise ProbeError(f"unknown pool {pool!r}: --pools takes outlier, other and all")
        if self.per not in {"block", "matrix", "none"}:
            raise ProbeError(f"--per {self.per}: choose block, matrix or none")
        counts = {
            "--controls": self.controls,
            "--singles": self.singles,
            "--columns": self.columns,
            "--random-columns": self.random_columns,
            "--worst": self.worst,
            "--seed": self.seed,
        }
        for name, value in counts.items():
            if value < 0:
                raise ProbeError(f"{name} {value}: a count is not negative")
        if self.seeds < 2:
            raise ProbeError(f"--seeds {self.seeds}: an interval needs two seeds or more")
        if self.together < 1:
            raise ProbeError(f"{self.together} columns in a run: at least one")
        for name, bound in (("--precision", self.precision), ("--budget", self.budget)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise ProbeError(f"{name} {bound:g}: give a positive number")
        for name, nats in (("--bound", self.bound), ("--super-bound", self.super_bound)):
            if not (math.isfinite(nats) and nats > 0):
                raise ProbeError(f"{name} {nats:g}: give a positive number of nats per token")
        if not (math.isfinite(self.fraction) and 0 < self.fraction < 1):
            raise ProbeError(f"fraction {self.fraction:g} is not in (0, 1): --fraction is the share of outlier columns")
        if self.plan is not None and not (math.isfinite(self.plan) and 0 < self.plan <= 1):
            raise ProbeError(
                f"--plan {self.plan:g} is not in (0, 1]: it is the share of the damage to avoid, such as 0.8"
            )
        schemes.parse(self.scheme)
