"""Result of ``ternary-probe sensitivity`` as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ternary_probe.records import Baseline, Finite, Part, ProtocolInfo, Record, Status

StoppedBy = Literal["seeds", "precision", "budget"]


class BulkResponse(Part):
    """Random flips in a pool of columns, super weights spared: predicted beside sampled."""

    pool: str = Field(description="outlier, other or all columns of every matrix")
    rate: Finite
    predicted: Finite = Field(description="KL from the Fisher pass: slope times the share drawn in each matrix")
    predicted_se: Finite | None = Field(description="standard error over label draws")
    seeds: int
    kl: Finite | None = Field(description="sampled mean, nats per token")
    kl_low: Finite | None
    kl_high: Finite | None
    delta_nll: Finite | None
    nll_low: Finite | None
    nll_high: Finite | None
    ratio: Finite | None = Field(description="predicted / sampled KL")
    linear: bool | None = Field(description="prediction within 15 % of the sample or within its interval")
    status: Status = "ok"


class Unit(Part):
    """One block or matrix, flips drawn in it alone."""

    unit: str
    kind: Literal["block", "matrix"]
    block: int | None
    role: str | None
    entries: int
    rate: Finite
    drawn: Finite = Field(description="share of the entries really drawn: the rate in whole entries of each matrix")
    predicted: Finite = Field(description="KL at this share from the Fisher pass, super weights apart")
    measured: Finite | None = Field(description="mean KL over seeds, nats per token")
    ci_low: Finite | None
    ci_high: Finite | None
    confidence: Finite = Field(description="of this interval: 95 % are split over the looks")
    seeds: int
    looks: int
    stopped_by: StoppedBy
    delta_nll: Finite | None
    nll_low: Finite | None
    nll_high: Finite | None
    control: Finite | None = Field(
        None, description="mean KL of sign-preserving noise of the same norm in every matrix"
    )
    status: Status = "ok"


class MatrixSensitivity(Part):
    """One matrix: what the Fisher pass predicts, and the measurement where it was made."""

    matrix: str
    role: str
    block: int | None
    entries: int
    predicted: Finite = Field(description="bulk KL per unit flip rate (slope), nats per token")
    predicted_se: Finite | None
    tail: Finite = Field(description="the same from its super-weight candidates")
    first_order: Finite = Field(description="sum of -2 w g: first-order change of the NLL per unit flip rate")
    measured: Finite | None = Field(None, description="sampled bulk KL over the share drawn, where --per matrix ran")
    ci_low: Finite | None = None
    ci_high: Finite | None = None
    ternary: Finite | None = Field(None, description="KL with this matrix alone ternarized, where --plan ran")


class ColumnSensitivity(Part):
    """One input column, its whole sign flipped."""

    matrix: str
    column: int
    nominated_by: tuple[str, ...] = Field(description="joint, fisher, first_order, amplitude; random")
    predicted: Finite = Field(description="second-order KL of the whole-column flip, nats per token")
    fisher: Finite
    first_order: Finite
    amplitude: Finite = Field(description="alpha_j^2 ||W_:j||^2 as a share of the matrix's sum")
    measured: Finite | None = Field(description="KL(clean || flipped), nats per token")
    delta_nll: Finite | None
    nll_low: Finite | None = Field(description="95 % interval over windows, paired")
    nll_high: Finite | None
    status: Status = "ok"


class ScreenAgreement(Part):
    """Rank agreement of a screen with the measured KL of the same columns."""

    screen: str
    columns: int
    spearman: Finite | None
    p_value: Finite | None


class SingleWeight(Part):
    """One entry, flipped and removed on its own."""

    matrix: str
    row: int
    column: int
    block: int | None
    value: Finite
    nominated_by: tuple[str, ...]
    predicted: Finite | None = Field(
        description="second-order KL of its flip; null where only the spike screen named it"
    )
    flip_delta_nll: Finite | None
    flip_low: Finite | None
    flip_high: Finite | None
    flip_kl: Finite | None
    removal_delta_nll: Finite | None = Field(description="null too where the flip moves the NLL by too little to ask")
    removal_kl: Finite | None
    super_weight: bool = Field(description="its flip or removal moves the NLL beyond the bound")
    recipe: str
    status: Status = "ok"


class WorstCase(Part):
    """The k single flips that hurt most together, found greedily, beside random ones."""

    flips: int
    entries: tuple[str, ...] = Field(description="matrix@row@column in the order chosen")
    delta_nll: tuple[Finite | None, ...] = Field(description="after each choice")
    random_delta_nll: Finite | None = Field(description="mean over seeds of as many flips drawn from all entries")
    random_low: Finite | None
    random_high: Finite | None
    seeds: int


class PlanStep(Part):
    """The whole model under a mixed-precision plan."""

    kept: int = Field(description="matrices kept as they are")
    kept_entries: Finite = Field(description="share of the entries kept")
    predicted_share: Finite = Field(description="share of the summed single-matrix damage that is avoided")
    kl: Finite | None
    delta_nll: Finite | None
    nll_low: Finite | None
    nll_high: Finite | None


class Plan(Part):
    """Which matrices to keep in higher precision under a ternary scheme, and what that achieves."""

    scheme: str
    share: Finite = Field(description="of the summed damage, asked for")
    exclude: tuple[str, ...] = Field(description="patterns for `quantize --exclude`")
    everything: PlanStep = Field(description="nothing kept")
    plan: PlanStep


class Additivity(Part):
    """The sum of the units' damage against all of them at once, at one rate."""

    rate: Finite
    sum_of_parts: Finite
    all_at_once: Finite
    ratio: Finite | None
    seeds: int


class SensitivityRecord(Record):
    """Result of ``ternary-probe sensitivity``."""

    command: Literal["sensitivity"] = "sensitivity"
    calibration: ProtocolInfo | None = None
    baseline: Baseline
    draws: int = Field(description="label draws of the Fisher pass")
    bound: Finite = Field(description="predicted nats of one flip from which an entry is measured, not predicted")
    super_bound: Finite = Field(description="measured nats from which an entry is called a super weight")
    fraction: Finite
    prediction_se: Finite | None = Field(description="relative standard error of the bulk prediction over all columns")
    leverage_predicted: Finite | None = Field(description="bulk, per entry: outlier over other columns")
    null_control: Finite | None = Field(
        description="largest change of a final hidden state in a re-run with nothing changed: exactly 0"
    )
    bulk: tuple[BulkResponse, ...]
    units: tuple[Unit, ...]
    matrices: tuple[MatrixSensitivity, ...]
    columns: tuple[ColumnSensitivity, ...]
    agreement: tuple[ScreenAgreement, ...]
    super_weights: tuple[SingleWeight, ...] = Field(description="every entry measured alone, worst first")
    worst_case: WorstCase | None = None
    additivity: Additivity | None = None
    plan: Plan | None = None
    outlier_columns: dict[str, tuple[int, ...]] = Field(default_factory=dict)
