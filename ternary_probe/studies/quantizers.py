"""The quantizer study: what ternary weights do to a model, beside harmless and harmful noise of equal norm."""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ternary_probe import anatomy as anatomies
from ternary_probe import schemes, theory
from ternary_probe.errors import ProbeError
from ternary_probe.measure import Evaluator, Reference, perplexity
from ternary_probe.measure.activations import weight_energy
from ternary_probe.measure.divergence import compare, quantiles
from ternary_probe.measure.grid import Grid, find_grid
from ternary_probe.measure.nll import HEAD_BYTES
from ternary_probe.measure.stream_energy import StreamEnergy
from ternary_probe.perturb import Magnitude, OutlierColumns, Perturbation, SignFlip, Ternarize
from ternary_probe.perturb.proof import NotRestoredError, sha256_weights
from ternary_probe.records import (
    Baseline,
    Environment,
    Kinship,
    MatrixQuantization,
    NormEnergy,
    PlantedOutliers,
    ProtocolInfo,
    QuantizedArm,
    QuantizeRecord,
    Response,
    Timing,
)
from ternary_probe.studies.intervals import mean_interval
from ternary_probe.studies.leverage import Progress, model_info, unhandled_notes
from ternary_probe.studies.radial import find_writers, radial_fraction
from ternary_probe.studies.summary import RESPONSES, finite
from ternary_probe.ternary import quantization_error
from ternary_probe.text import Windows

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.loading import LoadedModel

Arm = Literal["ternary", "sign_flip", "magnitude"]

_ENERGY_WINDOWS = 1
_ARMS: tuple[Arm, ...] = ("sign_flip", "magnitude")


@dataclass(frozen=True)
class QuantizeOptions:
    """What to run.

    Attributes:
        schemes: Ternary schemes, ``absmean``, ``optimal@g128`` and so on.
        seeds: Seeds of the controls of equal norm; none leaves them out.
        include: Matrix name patterns; empty for every block matrix.
        exclude: Patterns taken out again.
        blocks: Blocks to ternarize, ``0-3;7``; all if absent.
        roles: Roles to ternarize; all if empty.
        plant: Strengths k of function-preserving outlier columns planted before quantizing.
        head_bytes: Upper bound for one chunk of logits.
    """

    schemes: tuple[str, ...] = ("absmean",)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    blocks: str | None = None
    roles: tuple[str, ...] = ()
    plant: tuple[float, ...] = ()
    head_bytes: int = HEAD_BYTES

    def __post_init__(self) -> None:
        """Refuse what names no scheme or no strength.

        Raises:
            ProbeError: If a scheme is unknown, a scheme or a strength is given twice, or a strength is not positive.
        """
        if not self.schemes:
            raise ProbeError("no scheme given: use --scheme absmean")
        names = [schemes.parse(name).describe() for name in self.schemes]
        if len(set(names)) != len(names):
            raise ProbeError(f"--scheme names one scheme twice: {', '.join(names)}")
        for k in self.plant:
            if not (math.isfinite(k) and k > 0):
                raise ProbeError(f"--plant-outliers {k:g}: a strength is a positive factor, such as 8")
        if len(set(self.plant)) != len(self.plant):
            raise ProbeError(f"--plant-outliers names one strength twice: {', '.join(f'{k:g}' for k in self.plant)}")

    def recipe(self, scheme: str) -> Ternarize:
        """Return the recipe of one scheme.

        Args:
            scheme: Its name.

        Returns:
            The recipe.
        """
        return Ternarize(
            scheme=scheme, include=self.include, exclude=self.exclude, blocks=self.blocks, roles=self.roles, seed=0
        )


def run_quantizers(
    loaded: LoadedModel,
    windows: Windows,
    options: QuantizeOptions,
    *,
    progress: Progress = lambda done, total, label: None,
) -> QuantizeRecord:
    """Ternarize the model in place, scheme by scheme, measure, and undo.

    Args:
        loaded: The model.
        windows: Text to score.
        options: What to run.
        progress: Called before each evaluation.

    Returns:
        The record. Every parameter is bit-identical to before.

    Raises:
        NotRestoredError: If a weight differs afterwards.
    """
    started = time.perf_counter()
    weights = sha256_weights(loaded.model)
    study = _Study(anatomies.examine(loaded.model), windows, options, progress)
    record = study.run(loaded, weights)
    if sha256_weights(loaded.model) != weights:
        raise NotRestoredError("the weights differ after the study: reload the model")
    return record.model_copy(
        update={
            "timing": Timing(seconds=time.perf_counter() - started, evaluations=study.evaluator.evaluations),
        }
    )


def require_measurable(anatomy: Anatomy, options: QuantizeOptions) -> list[WeightMatrix]:
    """Refuse what could be quantized and saved but not measured, before any of it is done.

    Args:
        anatomy: The model's anatomy.
        options: What is to run.

    Returns:
        The matrices that will be ternarized.

    Raises:
        ProbeError: If one lies outside the blocks, or columns cannot be planted.
    """
    matrices = options.recipe(options.schemes[0]).targets(anatomy)
    outside = next((matrix.name for matrix in matrices if matrix.block is None), None)
    if outside is not None:
        raise ProbeError(
            f"{outside} lies outside the blocks, and a perturbed head leaves no clean logits to compare with: --exclude it"
        )
    for k in options.plant:
        if k != 1:
            OutlierColumns(k=k, seed=0).sites(anatomy)
    return matrices


class _Study:
    """One study on one model."""

    def __init__(self, anatomy: Anatomy, windows: Windows, options: QuantizeOptions, progress: Progress) -> None:
        self.anatomy, self.windows, self.options, self.progress = anatomy, windows, options, progress
        self.evaluator = Evaluator(anatomy, windows, head_bytes=options.head_bytes)
        self.matrices = require_measurable(anatomy, options)
        self.done = 0
        self.clean = 0.0
        self.energy = weight_energy(self.matrices)
        self.writers = find_writers(anatomy, windows, self.matrices)
        per_scheme = 1 + len(_ARMS) * len(options.seeds) + len(options.plant)
        self.total = 1 + len(options.schemes) * per_scheme + len(options.plant)

    def _unreached(self) -> tuple[str, ...]:
        idle = [m.name for m in self.matrices if m.rows_seen == 0]
        if not idle:
            return ()
        return (f"{len(idle)} matrices met no token when the model was examined (experts not routed to): {idle[0]} …",)

    def step(self, label: str) -> None:
        self.progress(self.done, self.total, label)
        self.done += 1

    def run(self, loaded: LoadedModel, weights: str) -> QuantizeRecord:
        self.step("clean model")
        reference = self.evaluator.reference()
        self.clean = reference.result.mean
        energy = StreamEnergy.of(self.anatomy, _first_windows(self.windows, _ENERGY_WINDOWS))
        grids = {m.name: find_grid(m.view()) for m in self.matrices}
        arms: list[QuantizedArm] = []
        matrices: list[MatrixQuantization] = []
        energies: list[NormEnergy] = []
        for name in self.options.schemes:
            scheme = schemes.parse(name).describe()
            recipe = self.options.recipe(name)
            rows, errors = self._matrices(recipe, scheme, grids)
            matrices += rows
            for arm, perturbation in self._perturbations(recipe, errors):
                self.step(f"{scheme}: {arm}")
                measured, changes = self._measure(scheme, arm, perturbation, reference, energy)
                arms.append(measured)
                energies += changes
        planted = [row for k in self.options.plant for row in self._planted(k)]
        self.progress(self.total, self.total, "done")
        base = reference.result
        return QuantizeRecord(
            model=model_info(loaded, weights),
            protocol=ProtocolInfo.model_validate(self.windows.protocol.model_dump(mode="json")),
            environment=Environment.here(torch.get_num_threads()),
            status="ok" if all(arm.status == "ok" for arm in arms) else "non_finite",
            notes=(*loaded.source.notes, *_grid_notes(matrices), *unhandled_notes(self.anatomy), *self._unreached()),
            baseline=Baseline(
                nll=base.mean, perplexity=base.perplexity, nll_windows=tuple(float(v) for v in base.windows)
            ),
            quantized=tuple(arms),
            kinship=tuple(kinship(arms)),
            matrices=tuple(matrices),
            energies=tuple(energies),
            planted=tuple(planted),
        )

    def _matrices(
        self, recipe: Ternarize, scheme: str, grids: dict[str, Grid | None]
    ) -> tuple[list[MatrixQuantization], dict[str, float]]:
        """Quantize every matrix once: its error figures, and its relative error for the controls."""
        gaussian = theory.gaussian_quantizer(scheme.partition("@")[0])
        rows: list[MatrixQuantization] = []
        errors: dict[str, float] = {}
        for matrix in self.matrices:
            found = recipe.quantized(matrix)
            error = quantization_error(matrix.view(), found)
            radial = radial_fraction(self.writers[matrix.name], matrix, found)
            errors[matrix.name] = error.relative_error if math.isfinite(error.relative_error) else 0.0
            grid = grids[matrix.name]
            rows.append(
                MatrixQuantization(
                    matrix=matrix.name,
                    role=matrix.role,
                    block=matrix.block,
                    scheme=scheme,
                    cos2=finite(error.cos2),
                    cos2_gaussian=finite(gaussian.cos2),
                    relative_error=finite(error.relative_error),
                    relative_error_gaussian=finite(gaussian.error_energy),
                    sparsity=finite(error.sparsity),
                    radial_fraction=radial.value,
                    radial_note=radial.note,
                    bits_per_weight=finite(found.bits_per_weight().two_bit),
                    zero_units=found.zero_unit_count,
                    grid=None if grid is None else grid.describe(),
                )
            )
        return rows, errors

    def _perturbations(self, recipe: Ternarize, errors: dict[str, float]) -> Iterator[tuple[Arm, Perturbation]]:
        """Yield the quantizer, then sign flips and sign-preserving noise of the same norm in every matrix.

        A flip of a share p of the entries has the expected energy ``4 p ||W||^2``, so ``p = ||q - w||^2 / (4 ||w||^2)``.

        Yields:
            Arm and recipe.
        """
        yield "ternary", recipe
        counts = {m.name: round(min(1.0, errors[m.name] / 4) * m.numel) for m in self.matrices}
        rate = sum(counts.values()) / sum(m.numel for m in self.matrices)
        if not rate:
            return
        for seed in self.options.seeds:
            include = tuple(glob.escape(m.name) for m in self.matrices)
            flip = SignFlip(rate=rate, matching="count", counts=counts, seed=seed, include=include)
            yield "sign_flip", flip
            yield "magnitude", Magnitude(**flip.model_dump(exclude={"kind"}))

    def _measure(
        self, scheme: str, arm: Arm, recipe: Perturbation, reference: Reference, energy: StreamEnergy
    ) -> tuple[QuantizedArm, list[NormEnergy]]:
        with recipe.applied(self.anatomy) as applied:
            found = compare(self.evaluator, reference)
            changes = energy.measure()
        ok = all(np.isfinite(v).all() for v in (found.nll, found.kl_forward, found.kl_reverse))
        interval = mean_interval(found.window_means(found.nll)) if ok else None
        before = reference.result.perplexity
        after = perplexity(reference.result.mean + float(found.nll.mean())) if ok else None
        forward, reverse = (quantiles(v) if ok else None for v in (found.kl_forward, found.kl_reverse))
        measured = QuantizedArm(
            scheme=scheme,
            arm=arm,
            seed=None if arm == "ternary" else recipe.seed,
            relative_norm=math.sqrt(applied.delta_energy / self.energy) if self.energy else None,
            delta_nll=interval.value if interval else None,
            ci_low=finite(interval.low) if interval else None,
            ci_high=finite(interval.high) if interval else None,
            delta_ppl=None if before is None or after is None else after - before,
            kl=float(found.kl_forward.mean()) if ok else None,
            kl_reverse=float(found.kl_reverse.mean()) if ok else None,
            kl_quantiles=(*forward.values, forward.maximum) if forward else (),
            kl_reverse_quantiles=(*reverse.values, reverse.maximum) if reverse else (),
            top1_agreement=found.top1_agreement if ok else None,
            checksum_before=applied.checksum_before,
            checksum_during=applied.checksum_during,
            checksum_after=applied.checksum_after,
            recipe=_short(arm, recipe),
            status="ok" if ok else "non_finite",
        )
        if not ok:
            return measured, []
        places = {site.name: site for site in energy.sites}
        return measured, [
            NormEnergy(
                scheme=scheme,
                arm=arm,
                norm=name,
                block=places[name].block,
                position=places[name].position,
                total=change.total,
                transverse=change.transverse,
                radial_fraction=change.radial_fraction,
            )
            for name, change in changes.items()
        ]

    def _planted(self, k: float) -> Iterator[PlantedOutliers]:
        """Plant function-preserving outliers of one strength, then quantize with every scheme.

        Yields:
            One row per scheme.
        """
        with OutlierColumns(k=k, seed=0).applied(self.anatomy) if k != 1 else nullcontext():
            self.step(f"outliers of strength {k:g}")
            reference = self.evaluator.reference()
            shift = reference.result.mean - self.clean
            energy = weight_energy(self.matrices)
            for name in self.options.schemes:
                recipe = self.options.recipe(name)
                with recipe.applied(self.anatomy) as applied:
                    self.step(f"outliers of strength {k:g}: {name}")
                    response = self.evaluator.response(reference)
                delta = response.nll.mean - reference.result.mean
                yield PlantedOutliers(
                    k=k,
                    scheme=schemes.parse(name).describe(),
                    baseline_shift=shift,
                    relative_error=applied.delta_energy / energy,
                    delta_nll=finite(delta),
                    kl=finite(response.kl.mean) if response.kl is not None else None,
                    status="ok" if math.isfinite(delta) else "non_finite",
                )


def kinship(arms: Sequence[QuantizedArm]) -> Iterator[Kinship]:
    """Say which control of equal norm a scheme's damage resembles.

    Args:
        arms: All arms.

    Yields:
        One verdict per scheme and response. ``between`` and ``beyond`` are meant against the intervals of both controls
        over seeds; without two seeds of each it is ``undecided``.
    """
    for scheme in dict.fromkeys(arm.scheme for arm in arms):
        for response in RESPONSES:
            values: dict[str, list[float]] = {"ternary": [], "sign_flip": [], "magnitude": []}
            for arm in arms:
                value = arm.delta_nll if response == "nll" else arm.kl
                if arm.scheme == scheme and value is not None:
                    values[arm.arm].append(value)
            yield _kinship(scheme, response, values)


def _kinship(scheme: str, response: Response, values: dict[str, list[float]]) -> Kinship:
    means = {arm: float(np.mean(v)) if v else None for arm, v in values.items()}
    ternary, flip, magnitude = means["ternary"], means["sign_flip"], means["magnitude"]
    verdict: Literal["sign_flip", "magnitude", "between", "beyond", "undecided"] = "undecided"
    reason = "a verdict needs two seeds of both controls, all finite"
    enough = min(len(values[arm]) for arm in _ARMS) > 1
    if enough and ternary is not None and flip is not None and magnitude is not None:
        kinds = {arm: mean_interval(values[arm]) for arm in _ARMS}
        inside = [arm for arm in _ARMS if kinds[arm].low <= ternary <= kinds[arm].high]
        low, high = min(flip, magnitude), max(flip, magnitude)
        if len(inside) == 2:
            reason = "the controls' intervals both hold the ternary figure"
        elif inside:
            verdict, reason = (
                ("sign_flip" if inside[0] == "sign_flip" else "magnitude"),
                "within that control's interval",
            )
        elif low < ternary < high:
            way = (ternary - magnitude) / (flip - magnitude)
            verdict, reason = "between", f"{way:.0%} of the way from magnitude to sign flip"
        else:
            verdict, reason = "beyond", f"{'above' if ternary >= high else 'below'} both controls"
    return Kinship(
        scheme=scheme,
        response=response,
        ternary=ternary,
        sign_flip=flip,
        magnitude=magnitude,
        acts_like=verdict,
        reason=reason,
    )


def _short(arm: Arm, recipe: Perturbation) -> str:
    """Name a recipe without its frozen counts and its list of matrices."""
    if arm == "ternary":
        return str(recipe)
    return f"{arm} of equal norm in every matrix, seed {recipe.seed}"


def _first_windows(windows: Windows, count: int) -> Windows:
    return replace(
        windows, inputs=windows.inputs[:count], targets=windows.targets[:count], scored=windows.scored[:count]
    )


def _grid_notes(matrices: Sequence[MatrixQuantization]) -> tuple[str, ...]:
    on_grid = {m.matrix: m.grid for m in matrices if m.grid}
    if not on_grid:
        return ()
    kinds = ", ".join(sorted(set(on_grid.values())))
    every = len({m.matrix for m in matrices})
    note = f"{len(on_grid)} of {every} matrices lie on a grid already ({kinds}): the model was quantized before, "
    return (note + "and looks falsely robust to that same grid",)
