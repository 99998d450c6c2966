"""The sensitivity map: predict every column from one Fisher pass, measure what matters, name the super weights.

Flip damage is heavy-tailed, so two things are kept apart. The *bulk* is what random flips see at small rates: predicted
for every column, sampled per block or matrix. *Super weights* are single entries that cost more than a bound on their own:
the second-order form can be wrong by a factor of a hundred there, so each is measured.
"""

from __future__ import annotations

import glob
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy
import torch

from ternary_probe import __version__
from ternary_probe import anatomy as anatomies
from ternary_probe.errors import ProbeError
from ternary_probe.measure.activations import measure_activations
from ternary_probe.measure.fisher import FisherScreen, Predicted, fisher_screen
from ternary_probe.measure.grid import grid_note
from ternary_probe.measure.nll import Evaluator, check_windows
from ternary_probe.measure.sweep import Sweep
from ternary_probe.perturb import Columns, EntryFlip, Magnitude, NotRestoredError, SignFlip, sha256_weights
from ternary_probe.records import Baseline, Environment, ProtocolInfo, Status, Timing
from ternary_probe.sensitivity_record import (
    Additivity,
    BulkResponse,
    ColumnSensitivity,
    MatrixSensitivity,
    ScreenAgreement,
    SensitivityRecord,
    SingleWeight,
    StoppedBy,
    Unit,
    WorstCase,
)
from ternary_probe.studies.damage_cells import Damage, DamageCells
from ternary_probe.studies.intervals import Interval, mean_interval
from ternary_probe.studies.leverage import Progress, model_info, text_digest, unhandled_notes
from ternary_probe.studies.mixed_plan import make_plan
from ternary_probe.studies.nominate import SCREENS, Nominated, column_scores, find_spikes, nominate_columns, share
from ternary_probe.studies.sensitivity_options import SensitivityOptions
from ternary_probe.studies.sequential import Looked, look_at, planned_looks
from ternary_probe.studies.store import CellStore
from ternary_probe.studies.summary import finite

if TYPE_CHECKING:
    from ternary_probe.anatomy import WeightMatrix
    from ternary_probe.loading import LoadedModel
    from ternary_probe.perturb import Perturbation
    from ternary_probe.text import Windows

_LINEAR = 0.15  # predicted against sampled
_SPIKES = 8  # entries the spike screen may add
_WORST_CANDIDATES = 8
_REMOVED = 0.1  # share of the bound that a flip must move the NLL by for the removal to be measured too


def run_sensitivity(
    loaded: LoadedModel,
    windows: Windows,
    calibration: Windows,
    options: SensitivityOptions,
    *,
    out: Path | None = None,
    progress: Progress = lambda done, total, label: None,
) -> SensitivityRecord:
    """Run the study, or what is left of it.

    Args:
        loaded: The model.
        windows: Text on which damage is predicted and measured.
        calibration: Text on which outlier columns are chosen.
        options: What to run.
        out: Folder for finished experiments; ``None`` keeps them in memory.
        progress: Called as ``(done, total, label)``, stage by stage.

    Returns:
        The record. Every parameter is bit-identical to before.

    Raises:
        ProbeError: If the options do not fit the model or text, or the folder holds another study.
        NotRestoredError: If a weight differs after the study.
    """
    started = time.perf_counter()
    weights = sha256_weights(loaded.model)
    study = _Study(loaded, windows, calibration, options, weights, progress)
    with CellStore(out, study.fingerprint()) as store:
        record = study.run(store, started)
    if sha256_weights(loaded.model) != weights:
        raise NotRestoredError("the weights differ after the study: reload the model")
    return record.model_copy(
        update={"timing": Timing(seconds=time.perf_counter() - started, evaluations=study.cells.measured)}
    )


class _Study:
    """One study on one model."""

    cells: DamageCells
    screen: FisherScreen

    def __init__(
        self,
        loaded: LoadedModel,
        windows: Windows,
        calibration: Windows,
        options: SensitivityOptions,
        weights: str,
        progress: Progress,
    ) -> None:
        self.loaded, self.windows, self.calibration = loaded, windows, calibration
        self.options, self.weights, self.progress = options, weights, progress
        self.anatomy = anatomies.examine(loaded.model)
        self.evaluator = Evaluator(self.anatomy, windows, head_bytes=options.head_bytes)
        check_windows(self.anatomy, calibration)
        wanted = SignFlip(rate=1.0, include=options.include, exclude=options.exclude).targets(self.anatomy)
        outside = next((m.name for m in wanted if m.block is None), None)
        if outside is not None:
            raise ProbeError(f"{outside} lies outside every block, where sensitivity is not predicted: --exclude it")
        progress(0, 1, "input activations")
        self.activations = measure_activations(self.anatomy, calibration, wanted)
        self.matrices = [m for m in wanted if m.name in self.activations.moments]
        self.unreached = [m.name for m in wanted if m.name not in self.activations.moments]
        if not self.matrices:
            raise ProbeError("no matrix met a token of the calibration text: use more text")
        self.by_name = {m.name: m for m in self.matrices}
        self.outlier = self.activations.outlier_columns(options.fraction, options.by)
        self.deadline = math.inf
        self.too_small = 0
        self.alone: set[tuple[str, int, int]] = set()
        self._check_rates()
        self.notes: list[str] = []

    def _check_rates(self) -> None:
        """Refuse rates that flip nothing, before anything is measured.

        Raises:
            ProbeError: If a rate rounds to no entry in every matrix.
        """
        o = self.options
        for pool in o.pools:
            for rate in o.rates:
                columns = Columns() if pool == "all" else self._columns_of(pool)
                if not SignFlip(rate=rate, columns=columns).total(self.matrices):
                    raise ProbeError(
                        f"rate {rate:g} rounds to no flip at all in {pool} columns: raise --rates or --fraction"
                    )
        if o.per != "none" and not self._drawn(self.matrices):
            raise ProbeError(f"--unit-rate {o.unit_rate:g} rounds to no flip at all in every matrix: raise it")

    def _columns_of(self, pool: str) -> Columns:
        return Columns(select=pool, outlier=self.outlier, fraction=self.options.fraction)

    def fingerprint(self) -> dict[str, object]:
        """Everything a finished experiment depends on; what merely chooses experiments is not part of it."""
        o = self.options
        return {
            "study": "sensitivity",
            "weights": self.weights,
            "dtype": self.loaded.source.dtype,
            "device": str(self.anatomy.input_device),
            "text": text_digest(self.windows),
            "calibration": text_digest(self.calibration),
            "columns": [o.fraction, o.by, o.include, o.exclude],
            "fisher": [o.draws, o.bound, o.seed],
            "versions": Environment.here().packages | {"ternary_probe": __version__},
        }

    def run(self, store: CellStore, started: float) -> SensitivityRecord:
        o = self.options
        if o.budget is not None:
            self.deadline = started + 60 * o.budget
        self.progress(0, 1, "clean model")
        reference = self.evaluator.reference()
        sweep = Sweep(self.evaluator, reference)
        self.notes += [sweep.note] if sweep.note else []
        self.cells = DamageCells(sweep, reference, store, self.progress)
        self.progress(0, 1, f"Fisher pass, {o.draws} label draws")
        self.screen = fisher_screen(
            self.anatomy,
            self.windows,
            self.matrices,
            draws=o.draws,
            seed=o.seed,
            tail=o.bound,
            head_bytes=o.head_bytes,
        )
        self.spared = self.screen.tail_by_matrix()
        self.progress(0, 1, "null control")
        null = sweep.null()
        singles = self._singles()
        bulk = self._bulk()
        units = self._units()
        columns, agreement = self._columns()
        every = {m.name: range(m.in_features) for m in self.matrices}
        slope = self.screen.slope(every, bulk=True)
        plan = None
        if o.plan is not None:
            plan = make_plan(self.cells, self.anatomy, self.matrices, o.scheme, o.plan)
        self.progress(1, 1, "done")
        base = reference.result
        statuses = [*(b.status for b in bulk), *(u.status for u in units), *(c.status for c in columns)]
        return SensitivityRecord(
            model=model_info(self.loaded, self.weights),
            protocol=ProtocolInfo.model_validate(self.windows.protocol.model_dump(mode="json")),
            calibration=ProtocolInfo.model_validate(self.calibration.protocol.model_dump(mode="json")),
            environment=Environment.here(torch.get_num_threads()),
            status="non_finite" if "non_finite" in statuses else "ok",
            notes=self._notes(units),
            baseline=Baseline(
                nll=base.mean, perplexity=base.perplexity, nll_windows=tuple(float(v) for v in base.windows)
            ),
            draws=o.draws,
            bound=o.bound,
            super_bound=o.super_bound,
            fraction=o.fraction,
            prediction_se=None
            if slope.standard_error is None or slope.value <= 0
            else slope.standard_error / slope.value,
            leverage_predicted=self._predicted_leverage(),
            null_control=null,
            bulk=tuple(bulk),
            units=tuple(units),
            matrices=tuple(self._matrix_rows(units, {} if plan is None else plan.damage)),
            columns=tuple(columns),
            agreement=tuple(agreement),
            super_weights=tuple(singles),
            worst_case=self._worst(singles),
            additivity=self._additivity(units),
            plan=None if plan is None else plan.record,
            outlier_columns=self.outlier,
        )

    # ---- bulk --------------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> dict[str, np.ndarray]:
        columns = self._columns_of(name)
        return {m.name: columns.of(m.name, m.in_features) for m in self.matrices}

    def _flip(self, rate: float, seed: int, names: Sequence[str], pool: str = "all") -> SignFlip:
        columns = Columns() if pool == "all" else self._columns_of(pool)
        spared = {name: entries for name, entries in self.spared.items() if name in set(names)}
        return SignFlip(rate=rate, seed=seed, columns=columns, include=_named(names), spared=spared or None)

    def _predicted(self, flip: SignFlip, columns: Mapping[str, np.ndarray | range]) -> Predicted:
        """Return the KL that a bulk flip is predicted to cost, from the whole entries it really draws in each matrix."""
        rates = {name: flip.share(self.by_name[name]) for name in columns}
        return self.screen.slope(columns, bulk=True, rates=rates)

    def _bulk(self) -> list[BulkResponse]:
        o, names = self.options, list(self.by_name)
        seeds = range(o.seed, o.seed + o.seeds)
        recipes: dict[str, Perturbation] = {
            f"bulk|{pool}|{rate!r}|{seed}": self._flip(rate, seed, names, pool)
            for pool in o.pools
            for rate in o.rates
            for seed in seeds
        }
        damage = self.cells.of(recipes, "bulk: random flips in a pool of columns")
        rows = []
        for pool in o.pools:
            for rate in sorted(o.rates):
                cells = [damage[f"bulk|{pool}|{rate!r}|{seed}"] for seed in seeds]
                kl, nll = _over_seeds(cells)
                predicted = self._predicted(self._flip(rate, o.seed, names, pool), self._pool(pool))
                linear = None if kl is None else _agrees(predicted.value, kl)
                rows.append(
                    BulkResponse(
                        pool=pool,
                        rate=rate,
                        predicted=predicted.value,
                        predicted_se=predicted.standard_error,
                        seeds=len(cells),
                        **_figures("kl", kl),
                        delta_nll=None if nll is None else nll.value,
                        nll_low=_low(nll),
                        nll_high=_high(nll),
                        ratio=predicted.value / kl.value if kl is not None and kl.value > 0 else None,
                        linear=linear,
                        status=_status(cells),
                    )
                )
        return rows

    def _predicted_leverage(self) -> float | None:
        outlier, other = (self._pool(name) for name in ("outlier", "other"))
        above, below = (self.screen.slope(pool, bulk=True).value for pool in (outlier, other))
        entries = [sum(self.by_name[n].out_features * len(c) for n, c in pool.items()) for pool in (outlier, other)]
        if not all(entries) or below <= 0:
            return None
        return (above / entries[0]) / (below / entries[1])

    # ---- blocks and matrices -------------------------------------------------------------------------------------------

    def _unit_members(self) -> dict[str, list[WeightMatrix]]:
        if self.options.per == "none":
            return {}
        members: dict[str, list[WeightMatrix]] = defaultdict(list)
        for matrix in self.matrices:
            members[matrix.name if self.options.per == "matrix" else f"block {matrix.block}"].append(matrix)
        large = {name: group for name, group in members.items() if self._drawn(group)}
        self.too_small = len(members) - len(large)
        return large

    def _drawn(self, group: Sequence[WeightMatrix]) -> int:
        return sum(round(self.options.unit_rate * m.numel) for m in group)

    def _units(self) -> list[Unit]:
        """Measure every unit, look after look, until its interval is tight enough or the budget ends."""
        o, members = self.options, self._unit_members()
        looks = planned_looks(o.seeds, o.precision)
        cells: dict[str, list[Damage]] = {name: [] for name in members}
        verdicts: dict[str, tuple[Looked | None, StoppedBy]] = {}
        active = list(members)
        for number, upto in enumerate(looks, start=1):
            late = number > 1
            recipes = {
                f"unit|{name}|{o.unit_rate!r}|{seed}": self._flip(o.unit_rate, seed, [m.name for m in members[name]])
                for name in active
                for seed in range(o.seed + len(cells[name]), o.seed + upto)
            }
            label = f"flips {_per(o.per)}, {upto} seeds"
            damage = self.cells.of(recipes, label, until=self._late if late else lambda: False)
            for name in list(active):
                fresh = [
                    damage.get(f"unit|{name}|{o.unit_rate!r}|{seed}")
                    for seed in range(o.seed + len(cells[name]), o.seed + upto)
                ]
                if any(cell is None for cell in fresh):  # a look counts only when it is whole
                    verdicts[name] = (verdicts[name][0], "budget")
                    active.remove(name)
                    continue
                cells[name] += [cell for cell in fresh if cell is not None]
                values = [c.kl for c in cells[name] if c.kl is not None]
                looked = look_at(values, number, len(looks), o.precision) if len(values) == len(cells[name]) else None
                stopped: StoppedBy = "precision" if looked is not None and looked.precise else "seeds"
                verdicts[name] = (looked, stopped)
                if looked is None or looked.precise:
                    active.remove(name)
            if not active:
                break
        controls = self._controls(members)
        return [self._unit(n, group, cells[n], *verdicts[n], controls.get(n)) for n, group in members.items()]

    def _late(self) -> bool:
        return time.perf_counter() > self.deadline

    def _controls(self, members: Mapping[str, Sequence[WeightMatrix]]) -> dict[str, float]:
        o = self.options
        recipes: dict[str, Perturbation] = {
            f"control|{name}|{o.unit_rate!r}|{seed}": Magnitude(
                **self._flip(o.unit_rate, seed, [m.name for m in group]).model_dump(exclude={"kind"})
            )
            for name, group in members.items()
            for seed in range(o.seed, o.seed + o.controls)
        }
        damage = self.cells.of(recipes, "sign-preserving noise of equal norm")
        values: dict[str, list[float]] = defaultdict(list)
        for key, cell in damage.items():
            if cell.kl is not None:
                values[key.split("|")[1]].append(cell.kl)
        return {name: float(np.mean(found)) for name, found in values.items()}

    def _unit(
        self,
        name: str,
        group: Sequence[WeightMatrix],
        cells: Sequence[Damage],
        looked: Looked | None,
        stopped: StoppedBy,
        control: float | None,
    ) -> Unit:
        o = self.options
        _, nll = _over_seeds(cells)
        flip = self._flip(o.unit_rate, o.seed, [m.name for m in group])
        predicted = self._predicted(flip, {m.name: range(m.in_features) for m in group})
        status = _status(cells)
        kl = None if looked is None or status == "not_applicable" else looked.interval
        return Unit(
            unit=name,
            kind="matrix" if o.per == "matrix" else "block",
            block=group[0].block,
            role=group[0].role if o.per == "matrix" else None,
            entries=sum(m.numel for m in group),
            rate=o.unit_rate,
            drawn=sum(flip.share(m) * m.numel for m in group) / sum(m.numel for m in group),
            predicted=predicted.value,
            measured=None if kl is None else kl.value,
            ci_low=_low(kl),
            ci_high=_high(kl),
            confidence=0.95 if looked is None else looked.confidence,
            seeds=len(cells),
            looks=0 if looked is None else looked.looks,
            stopped_by=stopped,
            delta_nll=None if nll is None else nll.value,
            nll_low=_low(nll),
            nll_high=_high(nll),
            control=control,
            status=status,
        )

    def _additivity(self, units: Sequence[Unit]) -> Additivity | None:
        """Compare the sum of the units' damage with all of them at once, on the seeds every unit has."""
        o = self.options
        if not units or any(unit.status == "non_finite" for unit in units):
            return None
        seeds = range(o.seed, o.seed + o.seeds)
        names = list(self.by_name)
        recipes = {f"together|{o.unit_rate!r}|{seed}": self._flip(o.unit_rate, seed, names) for seed in seeds}
        together, _ = _over_seeds(list(self.cells.of(recipes, "all units at once").values()))
        if together is None:
            return None
        parts = sum(unit.measured for unit in units if unit.measured is not None)
        return Additivity(
            rate=o.unit_rate,
            sum_of_parts=parts,
            all_at_once=together.value,
            ratio=parts / together.value if together.value > 0 else None,
            seeds=len(seeds),
        )

    def _matrix_rows(self, units: Sequence[Unit], ternary: Mapping[str, float | None]) -> list[MatrixSensitivity]:
        measured = {unit.unit: unit for unit in units if unit.kind == "matrix"}
        rows = []
        for matrix in self.matrices:
            every = {matrix.name: range(matrix.in_features)}
            whole, bulk = self.screen.slope(every), self.screen.slope(every, bulk=True)
            unit = measured.get(matrix.name)
            low, high = (None, None) if unit is None else (unit.ci_low, unit.ci_high)
            rows.append(
                MatrixSensitivity(
                    matrix=matrix.name,
                    role=matrix.role,
                    block=matrix.block,
                    entries=matrix.numel,
                    predicted=bulk.value,
                    predicted_se=bulk.standard_error,
                    tail=whole.value - bulk.value,
                    first_order=float(self.screen.columns[matrix.name].first.sum()),
                    measured=None if unit is None or unit.measured is None else unit.measured / unit.drawn,
                    ci_low=None if unit is None or low is None else low / unit.drawn,
                    ci_high=None if unit is None or high is None else high / unit.drawn,
                    ternary=ternary.get(matrix.name),
                )
            )
        return rows

    # ---- columns -----------------------------------------------------------------------------------------------------

    def _columns(self) -> tuple[list[ColumnSensitivity], list[ScreenAgreement]]:
        o = self.options
        watched = [m for m in self.matrices if m.input_of is not None and not m.also_lookup]
        if len(watched) < len(self.matrices):
            self.notes.append(
                f"columns of {len(self.matrices) - len(watched)} matrices were not measured: their input is only seen at "
                "the product (fused experts, weights used in several places), where batch entries are not apart"
            )
        if not (o.columns or o.random_columns) or not watched:
            return [], []
        scores = column_scores(self.screen, self.activations, watched)
        chosen = nominate_columns(scores, o.columns, o.random_columns, o.seed)
        picked: dict[str, list[int]] = defaultdict(list)
        for item in chosen:
            picked[item.matrix].append(item.column)
        damage = self.cells.columns(picked, "whole columns, by input negation", together=o.together)
        rows = [self._column_row(item, damage[item.matrix, item.column][0], scores) for item in chosen]
        return sorted(rows, key=lambda row: -math.inf if row.measured is None else -row.measured), _agreement(rows)

    def _column_row(
        self, item: Nominated, damage: Damage, scores: Mapping[str, Mapping[str, np.ndarray]]
    ) -> ColumnSensitivity:
        found = self.screen.columns[item.matrix]
        over = damage.over_windows
        return ColumnSensitivity(
            matrix=item.matrix,
            column=item.column,
            nominated_by=item.by,
            predicted=float(found.whole_column[item.column]),
            fisher=float(found.second[item.column]),
            first_order=float(found.first[item.column]),
            amplitude=float(share(scores["amplitude"][item.matrix])[item.column]),
            measured=damage.kl,
            delta_nll=damage.delta_nll,
            nll_low=_low(over),
            nll_high=_high(over),
            status="ok" if damage.ok else "non_finite",
        )

    # ---- single weights --------------------------------------------------------------------------------------------------

    def _candidates(self) -> dict[tuple[str, int, int], list[str]]:
        found: dict[tuple[str, int, int], list[str]] = {}
        spikes = find_spikes(self.anatomy, self.windows, self.matrices, min(_SPIKES, self.options.singles // 3))
        for entry in self.screen.tail[: self.options.singles - len(spikes)]:
            found.setdefault((entry.matrix, entry.row, entry.column), []).append("fisher")
        for spike in spikes:
            found.setdefault((spike.matrix, spike.row, spike.column), []).append("spike")
        return found

    def _singles(self) -> list[SingleWeight]:
        if not self.options.singles:
            return []
        self.progress(0, 1, "spikes")
        candidates = {
            place: by for place, by in self._candidates().items() if self._value(*place) != 0
        }  # a zero has no sign to lose
        self.alone = set(candidates)
        flips = self._entries_measured("negative", list(candidates), "single weights: flipped")
        moved = [
            p
            for p, d in flips.items()
            if d.delta_nll is None or abs(d.delta_nll) >= _REMOVED * self.options.super_bound
        ]
        removals = self._entries_measured("zero", moved, "single weights: removed")
        predicted = {(e.matrix, e.row, e.column): e.predicted for e in self.screen.tail}
        rows = []
        for place, by in candidates.items():
            name, row, column = place
            flip, removal = flips[place], removals.get(place)
            over = flip.over_windows
            measured = [flip] if removal is None else [flip, removal]
            moves = [abs(d.delta_nll) for d in measured if d.delta_nll is not None]
            rows.append(
                SingleWeight(
                    matrix=name,
                    row=row,
                    column=column,
                    block=self.by_name[name].block,
                    value=self._value(*place),
                    nominated_by=tuple(by),
                    predicted=predicted.get(place),
                    flip_delta_nll=flip.delta_nll,
                    flip_low=_low(over),
                    flip_high=_high(over),
                    flip_kl=flip.kl,
                    removal_delta_nll=None if removal is None else removal.delta_nll,
                    removal_kl=None if removal is None else removal.kl,
                    super_weight=len(moves) < len(measured) or max(moves) >= self.options.super_bound,
                    recipe=str(EntryFlip(entries={name: ((row, column),)})),
                    status="ok" if all(d.ok for d in measured) else "non_finite",
                )
            )
        return sorted(rows, key=lambda r: -_severity(r))

    def _entries_measured(
        self, to: Literal["negative", "zero"], places: Sequence[tuple[str, int, int]], label: str
    ) -> dict[tuple[str, int, int], Damage]:
        keys = {place: f"entry|{to}|{place[0]}|{place[1]}|{place[2]}" for place in places}
        recipes: dict[str, Perturbation] = {
            key: EntryFlip(entries={name: ((row, column),)}, to=to) for (name, row, column), key in keys.items()
        }
        damage = self.cells.of(recipes, label)
        return {place: damage[key] for place, key in keys.items()}

    def _value(self, name: str, row: int, column: int) -> float:
        return float(self.by_name[name].view()[row, column])

    def _worst(self, singles: Sequence[SingleWeight]) -> WorstCase | None:
        """Add, one after the other, the flip that hurts most together with those already chosen."""
        o = self.options
        ranked = sorted((s for s in singles if s.flip_delta_nll is not None), key=lambda s: -(s.flip_delta_nll or 0.0))
        pool = [(s.matrix, s.row, s.column) for s in ranked[:_WORST_CANDIDATES] if (s.flip_delta_nll or 0.0) > 0]
        if not o.worst or not pool:
            return None
        chosen: list[tuple[str, int, int]] = []
        reached: list[float | None] = []
        while pool and len(chosen) < o.worst:
            recipes: dict[str, Perturbation] = {
                "|".join(["worst", *map(_place, sorted([*chosen, place]))]): _entries([*chosen, place])
                for place in pool
            }
            damage = list(self.cells.of(recipes, f"worst case: flip {len(chosen) + 1}").values())
            best = max(range(len(pool)), key=lambda i: math.inf if not damage[i].ok else damage[i].delta_nll or 0.0)
            chosen.append(pool.pop(best))
            reached.append(damage[best].delta_nll)
            if not damage[best].ok:
                break
        random = {f"random|{len(chosen)}|{seed}": self._random_entries(len(chosen), seed) for seed in range(o.seeds)}
        _, nll = _over_seeds(list(self.cells.of(random, "as many random flips").values()))
        return WorstCase(
            flips=len(chosen),
            entries=tuple(map(_place, chosen)),
            delta_nll=tuple(reached),
            random_delta_nll=None if nll is None else nll.value,
            random_low=_low(nll),
            random_high=_high(nll),
            seeds=o.seeds,
        )

    def _random_entries(self, count: int, seed: int) -> EntryFlip:
        sizes = np.array([m.numel for m in self.matrices])
        ends = np.cumsum(sizes)
        generator = np.random.Generator(np.random.Philox(key=self.options.seed + seed))
        places: set[tuple[str, int, int]] = set()
        while len(places) < count:
            position = int(generator.integers(0, int(ends[-1])))
            which = int(np.searchsorted(ends, position, side="right"))
            matrix = self.matrices[which]
            row, column = divmod(position - int(ends[which] - sizes[which]), matrix.in_features)
            if self._value(matrix.name, row, column) != 0:
                places.add((matrix.name, row, column))
        return _entries(sorted(places))

    def _notes(self, units: Sequence[Unit]) -> tuple[str, ...]:
        o = self.options
        notes = [*self.loaded.source.notes, *grid_note(self.anatomy), *unhandled_notes(self.anatomy), *self.notes]
        if self.unreached:
            notes.append(
                f"{len(self.unreached)} matrices met no token of the calibration text and are not ranked: "
                f"{', '.join(self.unreached[:3])}{'…' if len(self.unreached) > 3 else ''}"
            )
        beyond = len({(e.matrix, e.row, e.column) for e in self.screen.tail} - self.alone)
        if beyond:
            notes.append(f"{beyond} entries predicted above {o.bound:g} nats were not measured: raise --singles")
        idle = sum(unit.status == "not_applicable" for unit in units)
        if idle:
            notes.append(f"{idle} parts hold nothing but zeros where flips fell: flipping a zero does nothing")
        if self.too_small:
            notes.append(
                f"{self.too_small} parts are too small for a flip at {o.unit_rate:g} and were not measured: raise --unit-rate"
            )
        if any(unit.stopped_by == "budget" for unit in units):
            notes.append(f"the budget of {o.budget:g} minutes ended before every interval was as tight as asked")
        if o.seeds < 8 and o.precision is None:
            notes.append(f"{o.seeds} seeds: intervals from fewer than 8 are rough")
        return tuple(dict.fromkeys(notes))


def _per(per: str) -> str:
    return "in each block" if per == "block" else "in each matrix"


def _named(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(glob.escape(name) for name in names)  # "experts[3]" is no character class


def _place(place: tuple[str, int, int]) -> str:
    return "@".join(map(str, place))


def _entries(places: Sequence[tuple[str, int, int]]) -> EntryFlip:
    entries: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, row, column in places:
        entries[name].append((row, column))
    return EntryFlip(entries={name: tuple(where) for name, where in entries.items()})


def _over_seeds(cells: Sequence[Damage]) -> tuple[Interval | None, Interval | None]:
    """Return the intervals of KL and of the change in NLL over seeds; ``None`` where a seed broke the model."""
    if not cells or not all(cell.ok for cell in cells):
        return None, None
    kl = mean_interval([cell.kl for cell in cells if cell.kl is not None])
    return kl, mean_interval([cell.delta_nll for cell in cells if cell.delta_nll is not None])


def _agrees(predicted: float, kl: Interval) -> bool:
    return kl.low <= predicted <= kl.high or abs(predicted - kl.value) <= _LINEAR * kl.value


def _figures(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {
        name: None if interval is None else interval.value,
        f"{name}_low": _low(interval),
        f"{name}_high": _high(interval),
    }


def _low(interval: Interval | None) -> float | None:
    return None if interval is None else finite(interval.low)


def _high(interval: Interval | None) -> float | None:
    return None if interval is None else finite(interval.high)


def _status(cells: Sequence[Damage]) -> Status:
    if not all(cell.ok for cell in cells):
        return "non_finite"
    return "ok" if any(cell.effect for cell in cells) else "not_applicable"


def _severity(row: SingleWeight) -> float:
    if row.status != "ok":
        return math.inf
    return max(abs(row.flip_delta_nll or 0.0), abs(row.removal_delta_nll or 0.0))


def _agreement(rows: Sequence[ColumnSensitivity]) -> list[ScreenAgreement]:
    """Return Spearman's rank correlation of each screen with the measured KL."""
    usable = [row for row in rows if row.measured is not None]
    picks = {
        "joint": [row.predicted for row in usable],
        "fisher": [row.fisher for row in usable],
        "first_order": [abs(row.first_order) for row in usable],
        "amplitude": [row.amplitude for row in usable],
    }
    measured = [row.measured for row in usable]
    found = []
    for screen in SCREENS:
        varied = len(usable) > 2 and len(set(picks[screen])) > 1 and len(set(measured)) > 1
        result = scipy.stats.spearmanr(picks[screen], measured) if varied else None
        found.append(
            ScreenAgreement(
                screen=screen,
                columns=len(usable),
                spearman=None if result is None else finite(float(result.statistic)),
                p_value=None if result is None else finite(float(result.pvalue)),
            )
        )
    return found
