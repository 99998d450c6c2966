"""Every result as data: pydantic models, the JSON schema, and what happens to a number that could not be measured.

NaN policy: a record never holds NaN or infinity. A figure that could not be measured is ``null`` and the ``status``
beside it says why; bad input never becomes a plausible number.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ternary_probe.errors import ProbeError

SCHEMA_VERSION = "1.0"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Status = Literal["ok", "inconclusive", "non_finite", "not_applicable", "failed"]
Response = Literal["nll", "kl"]


class Part(BaseModel):
    """Base of everything inside a record: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelInfo(Part):
    """Which weights were measured."""

    name: str
    kind: str
    path: str | None = None
    revision: str | None = None
    dtype: str
    device: str
    parameters: int
    config_sha256: str | None = None
    weights_sha256: str | None = Field(None, description="SHA-256 over every parameter's bytes, in name order")
    notes: tuple[str, ...] = ()


class Environment(Part):
    """Where it ran. Two equal studies may differ here and in ``timing``, nowhere else."""

    ternary_probe: str
    python: str
    platform: str
    packages: dict[str, str]
    threads: int | None = None

    @classmethod
    def here(cls, threads: int | None = None) -> Environment:
        """Describe the running interpreter and the installed packages that can move a figure.

        Args:
            threads: CPU threads torch uses, where known.

        Returns:
            The description.
        """
        from ternary_probe import __version__

        packages = {}
        for name in ("torch", "transformers", "accelerate", "safetensors", "numpy", "scipy", "bitsandbytes", "lm_eval"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[name] = importlib.metadata.version(name)
        return cls(
            ternary_probe=__version__,
            python=sys.version.split()[0],
            platform=platform.platform(),
            packages=packages,
            threads=threads,
        )


class Timing(Part):
    """Seconds spent and the number of model evaluations they paid for."""

    seconds: Finite
    evaluations: int


class ProtocolInfo(BaseModel):
    """How text became scored tokens; the fields are those of `ternary_probe.text.Protocol`."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str
    tokens_scored: int
    notes: tuple[str, ...] = ()


class Baseline(Part):
    """The clean model on the scored text."""

    nll: Finite = Field(description="mean negative log-likelihood, nats per scored token")
    perplexity: Finite | None = Field(description="exp(nll); null where it overflows")
    nll_windows: tuple[Finite, ...] = Field((), description="mean NLL of each window")


class NoiseFloor(Part):
    """The smallest difference that means anything here (nats per token): the largest of its parts, per response."""

    nll: Finite
    kl: Finite
    repeat_nll: Finite = Field(description="|difference| of a repeated baseline")
    rechunk_nll: Finite = Field(description="|difference| under another head chunk and batch")
    rechunk_kl: Finite
    tiny_flip_rate: Finite = Field(description="a tenth of the lowest rate")
    tiny_flip_seeds: int
    tiny_flip_nll_sd: Finite = Field(description="spread (standard deviation) over seeds of a flip at that rate")
    tiny_flip_kl_sd: Finite


class Arm(Part):
    """One cell of the study: one recipe, one seed."""

    rate: Finite
    arm: str = Field(description="outlier, other, all; or magnitude_<pool> for the sign-preserving control")
    matching: Literal["count", "rate", "energy"]
    seed: int
    flips: int = Field(description="entries perturbed")
    zeros: int = Field(0, description="of these, entries that are exactly zero, where a flip does nothing")
    relative_norm: Finite | None = Field(None, description="||dW||_F / ||W||_F over the touched matrices")
    delta_nll: Finite | None
    delta_ppl: Finite | None
    kl: Finite | None = Field(description="KL(clean || perturbed), nats per token")
    delta_nll_windows: tuple[Finite, ...] = ()
    kl_windows: tuple[Finite, ...] = ()
    checksum_before: str
    checksum_during: str
    checksum_after: str
    recipe: str = Field(description="recipe string; with `outlier_columns` of the record it replays exactly")
    status: Status = "ok"


class Mean(Part):
    """Mean response of one arm over seeds, with Student's t interval."""

    rate: Finite
    arm: str
    matching: str
    response: Response
    seeds: int
    mean: Finite | None
    sd: Finite | None
    ci_low: Finite | None
    ci_high: Finite | None
    above_floor: bool
    status: Status = "ok"


class Leverage(Part):
    """Ratio of two mean responses, with an interval over seeds."""

    rate: Finite
    matching: str
    response: Response
    numerator: str = "outlier"
    denominator: str = Field("other", description="other, all, or magnitude_*")
    ratio: Finite | None
    ci_low: Finite | None
    ci_high: Finite | None
    bootstrap_low: Finite | None = None
    bootstrap_high: Finite | None = None
    confidence: Finite = 0.95
    status: Status
    reason: str = ""


class Curve(Part):
    """Response against rate: slope of the log-log line and how far it stays linear."""

    arm: str
    matching: str
    response: Response
    slope: Finite | None = Field(description="1 where the response is proportional to the number of flips")
    slope_se: Finite | None
    linear_up_to: Finite | None = Field(description="largest rate not distinguishable from linear")
    note: str = ""


class Amplitude(Part):
    """Input-activation amplitude of one matrix (THEORY 1.5)."""

    matrix: str
    role: str
    block: int | None = None
    in_features: int
    n_outliers: int
    n_alpha2_outlier: Finite = Field(description="n * mean of alpha_j^2 over outlier columns; 1 is no outlier at all")
    n_alpha2_other: Finite
    energy_share: Finite = Field(description="share of E||x||^2 the outlier columns carry")
    weighted_outlier: Finite = Field(description="the same with alpha_j^2 weighted by the column energy ||W_:j||^2")
    weighted_other: Finite
    alpha_sorted: tuple[Finite, ...] = Field((), description="alpha_j sorted, largest first, thinned to <= 64 points")
    alpha_rank: tuple[int, ...] = Field((), description="rank (1 = largest) of each point of alpha_sorted")


class Prediction(Part):
    """What amplitudes alone predict, averaged over matrices (THEORY 1.5)."""

    n_alpha2_outlier: Finite = Field(description="predicted leverage of outlier over all columns")
    ratio_outlier_other: Finite | None = Field(description="predicted leverage of outlier over other columns")
    weighted_outlier_all: Finite
    weighted_outlier_other: Finite | None


class Published(Part):
    """A published figure, printed beside ours, never mixed with it."""

    rate: Finite
    flips: int | None
    delta_nll_outlier: Finite | None
    delta_nll_other: Finite | None
    ratio: Finite | None
    source: str


class Record(BaseModel):
    """Keys every command's record has (DESIGN 4)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: str = SCHEMA_VERSION
    command: str
    model: ModelInfo
    protocol: ProtocolInfo | None
    environment: Environment
    timing: Timing | None = None
    status: Status
    notes: tuple[str, ...] = Field((), description="everything a reader must know before quoting a figure")

    def save(self, path: Path) -> Path:
        """Write the record as JSON, atomically.

        Args:
            path: Target file; its folder is created.

        Returns:
            The path written.
        """
        return write_atomically(path, self.model_dump_json(indent=2) + "\n")


class LeverageRecord(Record):
    """Result of the leverage study."""

    command: Literal["leverage", "demo"] = "leverage"
    calibration: ProtocolInfo | None = None
    fraction: Finite
    selected_by: Literal["energy", "mean_abs"]
    baseline: Baseline
    noise_floor: NoiseFloor
    arms: tuple[Arm, ...]
    means: tuple[Mean, ...]
    leverage: tuple[Leverage, ...]
    curves: tuple[Curve, ...] = ()
    amplitude: tuple[Amplitude, ...]
    prediction: Prediction
    outlier_columns: dict[str, tuple[int, ...]] = Field(description="frozen selection; makes every recipe replayable")
    targets: tuple[str, ...] = Field((), description="matrices the arms may touch, when fewer than all block matrices")
    published: tuple[Published, ...] = ()


class Difference(Part):
    """A figure with its 95 % interval."""

    value: Finite | None
    ci_low: Finite | None
    ci_high: Finite | None


class PerplexityRecord(Record):
    """Result of ``ternary-probe perplexity``."""

    command: Literal["perplexity"] = "perplexity"
    nll: Finite = Field(description="nats per scored token")
    token_perplexity: Finite | None
    word_perplexity: Finite | None
    byte_perplexity: Finite | None
    ci_low: Finite | None = Field(description="95 % interval of the token perplexity over windows (a claim about text)")
    ci_high: Finite | None
    tokens_scored: int
    nll_windows: tuple[Finite, ...] = ()


class MatrixInfo(Part):
    """One row of ``inspect``: a weight matrix the perturbations can touch."""

    matrix: str
    role: str
    block: int | None
    out_features: int
    in_features: int
    dtype: str
    aliases: tuple[str, ...] = ()


class NormInfo(Part):
    """One row of ``inspect``: a norm, classified by probing it."""

    norm: str
    kind: str
    position: str
    block: int | None
    readers: int
    plantable: bool


class CheckInfo(Part):
    """A capability and whether it reproduced the plain way of computing on this model."""

    check: str
    passed: bool | None
    difference: Finite | None
    note: str = ""


class InspectRecord(Record):
    """Result of ``ternary-probe inspect``: what would be touched, and what would not."""

    command: Literal["inspect"] = "inspect"
    blocks: tuple[str, ...]
    skip: str
    backbone: str | None
    head: str | None
    final_norm: str | None
    matrices: tuple[MatrixInfo, ...]
    norms: tuple[NormInfo, ...]
    unhandled: dict[str, str] = Field(description="name to reason")
    accounted: Finite = Field(description="share of parameters accounted for")
    checks: tuple[CheckInfo, ...]


class MatrixQuantization(Part):
    """One matrix under one ternary scheme."""

    matrix: str
    role: str
    block: int | None
    scheme: str
    cos2: Finite | None = Field(description="squared cosine between weight and quantized weight")
    cos2_gaussian: Finite | None = Field(description="the same for a Gaussian weight (closed form)")
    relative_error: Finite | None = Field(description="||q - w||^2 / ||w||^2")
    relative_error_gaussian: Finite | None
    sparsity: Finite | None = Field(description="share of entries that became 0")
    radial_fraction: Finite | None = Field(
        description="share of the output error along the stream at the next norm's input; null where not applicable"
    )
    radial_note: str = ""
    bits_per_weight: Finite | None = Field(description="2-bit packing, scales included")
    zero_units: int = Field(0, description="rows, groups or tensors that hold nothing but zeros")
    grid: str | None = Field(None, description="a k-bit grid the original matrix lies on already")


class QuantizedArm(Part):
    """The whole model under one perturbation of the norm of a scheme's error, against the clean model."""

    scheme: str
    arm: Literal["ternary", "sign_flip", "magnitude"]
    seed: int | None = Field(description="null for the quantizer, which draws nothing")
    relative_norm: Finite | None = Field(description="||dW||_F / ||W||_F over the touched matrices")
    delta_nll: Finite | None
    ci_low: Finite | None = Field(description="95 % interval of delta_nll over windows, paired")
    ci_high: Finite | None
    delta_ppl: Finite | None
    kl: Finite | None = Field(description="KL(clean || perturbed), mean, nats per token")
    kl_reverse: Finite | None = Field(description="KL(perturbed || clean), mean")
    kl_quantiles: tuple[Finite, ...] = Field((), description="50, 90, 99, 99.9 % and maximum of KL(clean || perturbed)")
    kl_reverse_quantiles: tuple[Finite, ...] = ()
    top1_agreement: Finite | None = Field(description="share of tokens with the same most likely next token")
    checksum_before: str
    checksum_during: str
    checksum_after: str
    recipe: str
    status: Status = "ok"


class NormEnergy(Part):
    """What a perturbation of the whole model does to the input of one norm."""

    scheme: str
    arm: Literal["ternary", "sign_flip", "magnitude"]
    norm: str
    block: int | None
    position: str
    total: Finite = Field(description="energy of the change over energy of the clean input")
    transverse: Finite
    radial_fraction: Finite | None


class PlantedOutliers(Part):
    """How a scheme takes function-preserving outlier columns of a given strength."""

    k: Finite
    scheme: str
    baseline_shift: Finite = Field(description="change of the clean NLL by planting alone: should be rounding")
    relative_error: Finite = Field(description="||q - w||^2 / ||w||^2 over all matrices")
    delta_nll: Finite | None
    kl: Finite | None
    status: Status = "ok"


class Kinship(Part):
    """Does ternary error act like the harmless or the harmful kind of noise of its norm, here?"""

    scheme: str
    response: Response
    ternary: Finite | None
    sign_flip: Finite | None = Field(description="mean over seeds")
    magnitude: Finite | None
    acts_like: Literal["sign_flip", "magnitude", "between", "beyond", "undecided"]
    reason: str = ""


class QuantizeRecord(Record):
    """Result of ``ternary-probe quantize``."""

    command: Literal["quantize"] = "quantize"
    baseline: Baseline
    quantized: tuple[QuantizedArm, ...]
    kinship: tuple[Kinship, ...]
    matrices: tuple[MatrixQuantization, ...]
    energies: tuple[NormEnergy, ...] = ()
    planted: tuple[PlantedOutliers, ...] = ()
    saved: str | None = Field(None, description="folder of the saved checkpoint")


class Simulated(Part):
    """A figure measured in simulation beside its closed form."""

    simulated: Finite | None = Field(description="mean over seeds")
    standard_error: Finite | None = Field(description="of that mean; null with one seed")
    ci_low: Finite | None = Field(description="Student's t interval over seeds at the record's confidence")
    ci_high: Finite | None
    exact: Finite | None = Field(description="closed form, exact for infinite width; null where there is none")
    exact_width: Finite | None = Field(description="the form compared with: at the simulated width")
    allowance: Finite = Field(0.0, description="bound of what the form at that width leaves out")
    z: Finite | None = Field(None, description="(simulated - exact_width) / standard_error")
    agrees: bool | None = Field(None, description="within the family-wise interval plus allowance; null: not compared")


class TwoLayerRatio(Part):
    """Sign-to-magnitude ratio of transverse energies in the two-layer model, at one rate."""

    rate: Finite
    ratio_simulated: Finite
    standard_error: Finite | None
    ci_low: Finite | None
    ci_high: Finite | None
    ratio_exact: Finite = Field(description="exact for infinite width")
    ratio_exact_width: Finite = Field(description="the form compared with: at the simulated width")
    ratio_authors: Finite = Field(description="the paper's finite-rate form")
    ratio_paper: Finite | None = Field(description="measured and published, width 2048; null at other rates")
    ratio_paper_spread: Finite | None = None
    allowance: Finite
    z: Finite | None
    agrees: bool | None
    radial_sign: Simulated
    radial_magnitude: Simulated


class NoiseShape(Simulated):
    """The ratio of sign flips to sign-preserving noise of another shape but equal norm."""

    rate: Finite
    noise: Literal["half_normal", "multiplicative"]


class GaussianQuantizer(Part):
    """What a quantizer does to a Gaussian weight: closed forms, and the same figures simulated."""

    scheme: str
    cos2: Finite = Field(description="squared cosine of weight and quantized weight")
    error_energy: Finite = Field(description="||q - w||^2 / ||w||^2")
    radial_pre: Finite = Field(description="radial fraction of the error before the ReLU")
    radial_post: Finite = Field(description="radial fraction after ReLU and second layer: what an RMSNorm removes")
    output_cos2: Finite = Field(description="squared cosine of clean and quantized output")
    nonzero: Finite = Field(description="share of entries with a nonzero code")
    simulated: dict[str, Simulated] = Field(description="by name of the figure")
    published: dict[str, Finite] = Field(
        default_factory=dict, description="printed by the paper, by name of the figure"
    )


class DepthRatio(Simulated):
    """Sign-to-magnitude ratio after a number of layers, every one of them perturbed."""

    weights: str = Field(description="random, or the role of a real model's matrices")
    residual: bool
    layers: int
    rate: Finite
    published: Finite | None = None
    published_source: str | None = Field(None, description="which published series, when one exists")


class TheoryRecord(Record):
    """Result of ``ternary-probe theory``: closed forms against simulation, beside the published figures."""

    command: Literal["theory"] = "theory"
    width: int
    inputs: int = Field(description="input vectors per seed")
    seeds: tuple[int, ...]
    confidence: Finite = Field(description="of the intervals shown")
    family_alpha: Finite = Field(description="chance that a correct program misses any form, all comparisons together")
    comparisons: int
    verdict: Literal["pass", "fail", "inconclusive"]
    reason: str = ""
    two_layer: tuple[TwoLayerRatio, ...]
    noise_shapes: tuple[NoiseShape, ...]
    quantizers: tuple[GaussianQuantizer, ...]
    depth: tuple[DepthRatio, ...] = ()
    stack: tuple[str, ...] = Field((), description="the real model's matrices that were stacked, by layer")


FindingStatus = Literal["pass", "warn", "fail", "inconclusive", "not_applicable"]


class Finding(Part):
    """What one check found: measured against a threshold, unrounded, and explained in a sentence."""

    check: str
    status: FindingStatus
    subject: str = Field("", description="tensor, module, block or task it speaks of; empty for the whole model")
    measured: Finite | None = None
    threshold: Finite | None = None
    unit: str = ""
    message: str
    details: dict[str, JsonValue] = Field(default_factory=dict, description="the evidence, by name")


class GateRecord(Record):
    """Result of ``ternary-probe gate``."""

    command: Literal["gate"] = "gate"
    base: ModelInfo | None = Field(
        None, description="what the candidate was compared with; null for a gate of one model"
    )
    policy: str = Field(description="file, or 'default'")
    policy_sha256: str
    tiers: tuple[str, ...] = Field(description="parameters, scan, forward, response: what was asked for")
    findings: tuple[Finding, ...]
    verdict: Literal["pass", "fail", "inconclusive"]
    reason: str
    bytes_read: int | None = Field(None, description="of checkpoint files, by the checks that build no model")


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file so that a reader sees the old content or the whole new one, never a part.

    What is no regular file (``/dev/stdout``, a pipe) is written to, not replaced.

    Args:
        path: Target; missing parent folders are made.
        content: Text (UTF-8) or bytes.

    Returns:
        ``path``.

    Raises:
        ProbeError: If the folder cannot be written to or the disk is full; the old file is left as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101 - mkstemp made it private
        os.replace(temporary, path)  # noqa: PTH105
        temporary = None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProbeError(
            f"cannot write {path}: {reason.lower()}; free space or choose another folder with --out"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
    return path


def load_record(path: Path) -> Record:
    """Read a record back, as the class its ``command`` names.

    Args:
        path: A JSON file written by `Record.save`.

    Returns:
        The record.

    Raises:
        ProbeError: If the file is missing, not JSON, or not a record of this schema.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProbeError(f"cannot read record {path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise ProbeError(f"{path} is not a JSON record: {error}") from error
    from ternary_probe.sensitivity_record import SensitivityRecord  # which is built on this module

    kinds: dict[str, type[Record]] = {
        "leverage": LeverageRecord,
        "demo": LeverageRecord,
        "perplexity": PerplexityRecord,
        "inspect": InspectRecord,
        "quantize": QuantizeRecord,
        "theory": TheoryRecord,
        "gate": GateRecord,
        "sensitivity": SensitivityRecord,
    }
    kind = kinds.get(str(data.get("command")) if isinstance(data, dict) else "")
    if kind is None:
        raise ProbeError(f"{path} is not a ternary-probe record: it has no known 'command'")
    try:
        return kind.model_validate(data)
    except ValueError as error:
        raise ProbeError(f"{path} does not match schema {SCHEMA_VERSION}: {error}") from error
