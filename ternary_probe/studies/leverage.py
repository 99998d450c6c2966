"""The leverage study: which input columns' signs can this model not afford to lose, and by how much?"""

from __future__ import annotations

import glob
import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ternary_probe import __version__
from ternary_probe import anatomy as anatomies
from ternary_probe.errors import ProbeError
from ternary_probe.measure import Evaluator, Reference, Response, measure_activations, outlier_amplitude
from ternary_probe.measure.activations import weight_energy
from ternary_probe.measure.grid import grid_note
from ternary_probe.measure.nll import check_windows
from ternary_probe.perturb.proof import NotRestoredError, checksum, sha256_weights
from ternary_probe.records import (
    Amplitude,
    Arm,
    Baseline,
    Environment,
    LeverageRecord,
    ModelInfo,
    NoiseFloor,
    ProtocolInfo,
    Status,
    Timing,
)
from ternary_probe.studies import summary
from ternary_probe.studies.plan import Cell, LeverageOptions, noise_cells, plan_cells
from ternary_probe.studies.published import DONG2026
from ternary_probe.studies.store import CellStore

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.loading import LoadedModel
    from ternary_probe.text import Windows

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (evaluations done, evaluations in all, what runs now)."""

_ALPHA_POINTS = 64
_ODD_ROWS = 41


def run_leverage(
    loaded: LoadedModel,
    windows: Windows,
    calibration: Windows,
    options: LeverageOptions,
    *,
    out: Path | None = None,
    command: str = "leverage",
    progress: Progress = lambda done, total, label: None,
) -> LeverageRecord:
    """Run the study, or what is left of it.

    Args:
        loaded: The model.
        windows: Text to score.
        calibration: Text on which outlier columns are chosen; disjoint from the scored text unless the paper's protocol
            asks otherwise.
        options: What to run.
        out: Folder for finished cells, to continue after an interruption; ``None`` keeps them in memory.
        command: ``leverage`` or ``demo``, for the record.
        progress: Called before each evaluation.

    Returns:
        The record. Every parameter of the model is bit-identical to before.

    Raises:
        ProbeError: If the options do not fit the model or text, or the folder holds another study.
        NotRestoredError: If a weight differs after the study.
    """
    started = time.perf_counter()
    anatomy = anatomies.examine(loaded.model)
    weights = sha256_weights(loaded.model)
    planted = options.plant.applied(anatomy) if options.plant is not None else nullcontext()
    with planted:
        study = _Study(loaded, anatomy, windows, calibration, options, weights, progress)
        with CellStore(out, study.fingerprint()) as store:
            record = study.run(store, command)
    after = sha256_weights(loaded.model)
    if after != weights:
        raise NotRestoredError(
            f"the weights differ after the study (SHA-256 {weights[:12]} before, {after[:12]} after)"
        )
    seconds = time.perf_counter() - started
    return record.model_copy(update={"timing": Timing(seconds=seconds, evaluations=study.evaluations)})


class _Study:
    """One study on one model: what stays the same from cell to cell."""

    def __init__(
        self,
        loaded: LoadedModel,
        anatomy: Anatomy,
        windows: Windows,
        calibration: Windows,
        options: LeverageOptions,
        weights: str,
        progress: Progress,
    ) -> None:
        self.loaded, self.anatomy, self.options, self.weights = loaded, anatomy, options, weights
        self.windows, self.calibration, self.progress = windows, calibration, progress
        self.evaluator = Evaluator(anatomy, windows, batch=options.batch, head_bytes=options.head_bytes)
        check_windows(anatomy, calibration)
        self.matrices = self._targets()
        self.activations = measure_activations(anatomy, calibration, self.matrices)
        self.unreached = [m.name for m in self.matrices if m.name not in self.activations.moments]
        self.matrices = [m for m in self.matrices if m.name in self.activations.moments]
        self.outlier = self.activations.outlier_columns(options.fraction, options.by)
        if not any(self.outlier.values()):
            raise ProbeError(
                f"no outlier column selected: {options.fraction:g} of the input columns is less than one column in every "
                "matrix; raise --fraction"
            )
        self.others = 0
        # The clean logits are recomputed with the head as it is, so KL is out of reach once an arm edits the head.
        self.with_kl = all(m.block is not None for m in self.matrices)
        unreached = tuple(glob.escape(name) for name in self.unreached)  # "experts[3]" is no character class
        planned = replace(options, exclude=options.exclude + unreached)
        self.cells = plan_cells(planned, self.matrices, self.outlier)
        for cell in self.cells:  # all of them before the first is measured
            if not cell.recipe.total(self.matrices):
                raise ProbeError(f"rate {cell.rate:g} rounds to no flip at all in arm {cell.arm}: raise it")
        self.noise = noise_cells(planned, self.matrices, self.outlier)

    def _targets(self) -> list[WeightMatrix]:
        from ternary_probe.perturb import SignFlip

        return SignFlip(rate=1.0, seed=0, include=self.options.include, exclude=self.options.exclude).targets(
            self.anatomy
        )

    @property
    def _partial(self) -> bool:
        return bool(self.options.include or self.options.exclude or self.unreached)

    @property
    def evaluations(self) -> int:
        """Passes over the scored text so far."""
        return self.evaluator.evaluations + self.others

    def fingerprint(self) -> dict[str, Any]:
        """Everything a finished cell depends on."""
        o = self.options
        return {
            "weights": self.weights,
            "dtype": self.loaded.source.dtype,
            "device": str(self.anatomy.input_device),
            "text": text_digest(self.windows),
            "calibration": text_digest(self.calibration),
            "outlier columns": hashlib.sha256(repr(sorted(self.outlier.items())).encode()).hexdigest(),
            "rates": o.rates,
            "seeds": o.seeds,
            "arms": o.arms,
            "matchings": o.matchings,
            "columns": [o.fraction, o.by, o.include, o.exclude, o.paper_counts],
            "planted": str(o.plant),
            "versions": Environment.here().packages | {"ternary_probe": __version__},
        }

    def run(self, store: CellStore, command: str) -> LeverageRecord:
        todo = {cell.key for cell in (*self.noise, *self.cells)}
        total = 3 + len(todo)
        self.progress(0, total, "clean model")
        reference = self.evaluator.reference()
        baseline = reference.result
        clean = checksum(m.view() for m in self.matrices)
        energy = weight_energy(self.matrices)

        def measured(cell: Cell, done: int) -> Arm:
            self.progress(done, total, f"{cell.arm} at {cell.rate:g}, seed {cell.seed}")
            saved = store.get(cell.key)
            if saved is None:
                saved = self._measure(cell, reference, clean, energy).model_dump(mode="json")
                store.put(cell.key, saved)
            recipe = f"{self.options.plant}+{cell.recipe}" if self.options.plant is not None else str(cell.recipe)
            try:
                return Arm.model_validate({**saved, "arm": cell.arm, "matching": cell.matching, "recipe": recipe})
            except ValueError as error:
                raise store.damaged(cell.key) from error

        floor = self._noise_floor(store, reference, measured, total)
        arms, finished = [], {cell.key for cell in self.noise}
        for cell in self.cells:
            arms.append(measured(cell, 3 + len(finished)))
            finished.add(cell.key)
        self.progress(total, total, "done")
        amplitudes = self._amplitudes()
        confidence = self.options.confidence
        leverage = summary.summarize_leverage(arms, floor, confidence)
        status: Status = "ok" if any(item.status == "ok" for item in leverage) or not leverage else "inconclusive"
        return LeverageRecord(
            command="demo" if command == "demo" else "leverage",
            model=model_info(self.loaded, self.weights),
            protocol=ProtocolInfo.model_validate(self.windows.protocol.model_dump()),
            calibration=ProtocolInfo.model_validate(self.calibration.protocol.model_dump()),
            environment=Environment.here(torch.get_num_threads()),
            status=status,
            notes=self._notes(),
            fraction=self.options.fraction,
            selected_by=self.options.by,
            baseline=Baseline(nll=baseline.mean, perplexity=baseline.perplexity, nll_windows=tuple(baseline.windows)),
            noise_floor=floor,
            arms=tuple(arms),
            means=summary.summarize_means(arms, floor, confidence),
            leverage=leverage,
            curves=summary.summarize_curves(arms, floor, confidence),
            amplitude=amplitudes,
            prediction=summary.predict(amplitudes),
            outlier_columns=self.outlier,
            targets=tuple(m.name for m in self.matrices) if self._partial else (),
            published=DONG2026 if self.windows.protocol.name == "dong2026" else (),
        )

    def _measure(self, cell: Cell, reference: Reference, clean: str, energy: float) -> Arm:
        """Apply a cell's recipe, score the text, undo; the proof of both goes into the arm."""
        with cell.recipe.applied(self.anatomy, known_checksum=clean) as done:
            response = self._respond(reference)
        base = reference.result
        delta = response.nll.mean - base.mean
        kl = None if response.kl is None else response.kl.mean
        arm = Arm(
            rate=cell.rate,
            arm=cell.arm,
            matching=cell.matching,
            seed=cell.seed,
            flips=done.entries,
            zeros=done.zeros,
            relative_norm=math.sqrt(done.delta_energy / energy) if energy > 0 else None,
            delta_nll=summary.finite(delta),
            delta_ppl=_delta_perplexity(response, reference),
            kl=None if kl is None else summary.finite(kl),
            delta_nll_windows=_finite_windows(response.nll.windows - base.windows),
            kl_windows=_finite_windows(response.kl.windows) if response.kl is not None else (),
            checksum_before=done.checksum_before,
            checksum_during=done.checksum_during,
            checksum_after=done.checksum_after,
            recipe=str(cell.recipe),
            status="ok" if math.isfinite(delta) and (kl is None or math.isfinite(kl)) else "non_finite",
        )
        log.debug("%s: delta NLL %s", cell.recipe, arm.delta_nll)
        return arm

    def _respond(self, reference: Reference) -> Response:
        if self.with_kl:
            return self.evaluator.response(reference)
        return self.evaluator.response_without_reference()

    def _noise_floor(
        self, store: CellStore, reference: Reference, measured: Callable[[Cell, int], Arm], total: int
    ) -> NoiseFloor:
        """Measure how far figures move without any perturbation worth the name."""
        saved = store.get("noise")
        if saved is None:
            self.progress(1, total, "noise floor: repeat")
            repeat = self.evaluator.nll()
            self.progress(2, total, "noise floor: another chunk and batch")
            # An odd number of rows, no multiple of what any kernel blocks by, is the worst chunking there is.
            rows = min(_ODD_ROWS, self.windows.inputs.shape[1] // 3 | 1)
            other = Evaluator(self.anatomy, self.windows, batch=self.options.batch + 1, rows=rows)
            again = other.response(reference)
            self.others += other.evaluations
            saved = {
                "repeat_nll": abs(repeat.mean - reference.result.mean),
                "rechunk_nll": abs(again.nll.mean - reference.result.mean),
                "rechunk_kl": abs(again.kl.mean) if again.kl is not None else 0.0,
            }
            store.put("noise", saved)
        tiny = [measured(cell, 3 + index) for index, cell in enumerate(self.noise)]
        spread = {
            name: float(np.std(values, ddof=1)) if len(values := summary.values_of(tiny, name)) > 1 else 0.0
            for name in summary.RESPONSES
        }
        return NoiseFloor(
            nll=max(saved["repeat_nll"], saved["rechunk_nll"], spread["nll"]),
            kl=max(saved["rechunk_kl"], spread["kl"]),
            tiny_flip_rate=min(self.options.rates) / 10,
            tiny_flip_seeds=len(tiny),
            tiny_flip_nll_sd=spread["nll"],
            tiny_flip_kl_sd=spread["kl"],
            **saved,
        )

    def _amplitudes(self) -> tuple[Amplitude, ...]:
        found = []
        for matrix in self.matrices:
            moments = self.activations.moments[matrix.name]
            columns = self.outlier[matrix.name]
            ranked = np.sort(moments.alpha)[::-1]
            points = np.unique(np.geomspace(1, ranked.size, min(_ALPHA_POINTS, ranked.size)).astype(int)) - 1
            found.append(
                Amplitude(
                    matrix=matrix.name,
                    role=matrix.role,
                    block=matrix.block,
                    in_features=matrix.in_features,
                    n_outliers=len(columns),
                    alpha_sorted=tuple(float(a) for a in ranked[points]),
                    alpha_rank=tuple(int(p) + 1 for p in points),
                    **outlier_amplitude(moments, columns, matrix)._asdict(),
                )
            )
        return tuple(found)

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.loaded.source.notes)
        if self.unreached:
            notes.append(
                f"{len(self.unreached)} matrices met no token of the calibration text and were left out: "
                f"{', '.join(self.unreached[:3])}{'…' if len(self.unreached) > 3 else ''}"
            )
        notes += (*grid_note(self.anatomy), *unhandled_notes(self.anatomy))
        if self.windows.protocol.name == "dong2026":
            notes.append(
                "paper's protocol: outlier columns by mean |x| on the scored text itself. Its mask was reset in every "
                "layer; ours differ from layer to layer."
            )
            if self.loaded.source.dtype != "float16":
                notes.append(f"the paper's figures are in float16, these in {self.loaded.source.dtype}")
        if self.options.plant is not None:
            notes.append(f"outlier columns were planted before anything was measured: {self.options.plant}")
        if not self.with_kl:
            notes.append(
                "KL was not measured: the arms touch matrices outside the blocks, the head possibly among them"
            )
        if not self.noise:
            notes.append("a tenth of the lowest rate is no flip at all here: the noise floor lacks that part")
        if len(self.options.seeds) < 8:
            notes.append(f"{len(self.options.seeds)} seeds: intervals from fewer than 8 are rough")
        return tuple(dict.fromkeys(notes))


def model_info(loaded: LoadedModel, weights: str | None) -> ModelInfo:
    """Describe a loaded model for a record.

    Args:
        loaded: The model.
        weights: SHA-256 of its weights, where it was computed.

    Returns:
        The description.
    """
    source = loaded.source
    return ModelInfo(
        name=source.name,
        kind=source.kind,
        path=source.path,
        revision=source.revision,
        dtype=source.dtype,
        device=source.device,
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        config_sha256=source.config_sha256,
        weights_sha256=weights,
        notes=source.notes,
    )


def unhandled_notes(anatomy: Anatomy) -> tuple[str, ...]:
    """Say what of a model was not examined, one note a reason.

    Args:
        anatomy: The model's anatomy.

    Returns:
        Notes for a record.
    """
    reasons: dict[str, list[str]] = {}
    for item in anatomy.unhandled:
        reasons.setdefault(item.reason, []).append(item.name)
    return tuple(
        f"not examined: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in reasons.items()
    )


def text_digest(windows: Windows) -> str:
    """Identify what is scored.

    Args:
        windows: Token windows.

    Returns:
        SHA-256 over inputs, targets and which of them count.
    """
    parts = (windows.inputs, windows.targets, windows.scored.to(torch.int64))
    return hashlib.sha256(b"".join(p.cpu().contiguous().numpy().tobytes() for p in parts)).hexdigest()


def _delta_perplexity(response: Response, reference: Reference) -> float | None:
    after, before = response.nll.perplexity, reference.result.perplexity
    return None if after is None or before is None else summary.finite(after - before)


def _finite_windows(values: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in values) if np.isfinite(values).all() else ()
