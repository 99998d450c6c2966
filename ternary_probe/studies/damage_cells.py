"""Experiments of a study as cells: measured in batches, stored as each batch ends, never measured twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ternary_probe.studies.intervals import Interval, mean_interval

if TYPE_CHECKING:
    from ternary_probe.measure.nll import Reference, Response
    from ternary_probe.measure.sweep import Sweep
    from ternary_probe.perturb import Perturbation
    from ternary_probe.studies.leverage import Progress
    from ternary_probe.studies.store import CellStore

_BATCH = 60  # experiments between two commits; each batch records the clean model's blocks once


@dataclass(frozen=True)
class Damage:
    """What one experiment did, nats per token; ``None`` where the model broke."""

    delta_nll: float | None
    kl: float | None
    delta_nll_windows: tuple[float, ...]
    effect: bool = True
    """False where the experiment changed no weight: all it hit is zero."""

    @property
    def ok(self) -> bool:
        """Whether every figure is finite."""
        return self.delta_nll is not None and self.kl is not None

    @property
    def over_windows(self) -> Interval | None:
        """Paired 95 % interval of the change in NLL over windows, or ``None`` where there is none."""
        if not self.ok or len(self.delta_nll_windows) < 2:
            return None
        return mean_interval(self.delta_nll_windows)


class DamageCells:
    """Measures experiments once and keeps them.

    Args:
        sweep: Runs them.
        reference: The clean model on the text.
        store: Where finished cells go.
        progress: Called as ``(done, total, label)``.
    """

    def __init__(self, sweep: Sweep, reference: Reference, store: CellStore, progress: Progress) -> None:
        self.sweep, self.reference, self.store, self.progress = sweep, reference, store, progress
        self.measured = 0

    def of(
        self, recipes: Mapping[str, Perturbation], label: str, *, until: Callable[[], bool] = lambda: False
    ) -> dict[str, Damage]:
        """Return the damage of every recipe, measured now or before.

        Args:
            recipes: Key to resolved recipe.
            label: What is measured, for the progress bar.
            until: Asked between batches; what is not measured when it says True is left out.

        Returns:
            Key to damage.
        """
        found = {key: damage for key in recipes if (damage := self._saved(key)) is not None}
        todo = [key for key in recipes if key not in found]
        for start in range(0, len(todo), _BATCH):
            if until():
                break
            batch = todo[start : start + _BATCH]
            self._show(label, start, batch, len(todo))
            for key, response in self.sweep.perturbed({key: recipes[key] for key in batch}).items():
                found[key] = self._keep(key, response)
        return {key: found[key] for key in recipes if key in found}

    def columns(
        self, columns: Mapping[str, Sequence[int]], label: str, *, together: int
    ) -> dict[tuple[str, int], tuple[Damage, float]]:
        """Return the damage of whole-column flips by input negation, each against its own null control.

        Args:
            columns: Matrix name to columns.
            label: For the progress bar.
            together: Columns in one run.

        Returns:
            ``(matrix, column)`` to damage, and how far the null control's NLL lies from the clean one.
        """
        found: dict[tuple[str, int], tuple[Damage, float]] = {}
        todo: dict[str, list[int]] = {}
        for name, picked in columns.items():
            for column in picked:
                saved = self.store.get(f"column|{name}|{column}")
                if saved is None:
                    todo.setdefault(name, []).append(column)
                else:
                    found[name, column] = self._read(f"column|{name}|{column}", saved), float(saved.get("null", 0.0))
        total = sum(map(len, todo.values()))
        done = 0
        for name, picked in todo.items():
            self.progress(done, total, label)
            for place, (response, null) in self.sweep.negated({name: picked}, together=together).items():
                cell = self._cell(response, against=null) | {
                    "null": float(null.nll.mean - self.reference.result.mean),
                }
                self.store.put(f"column|{name}|{place[1]}", cell)
                found[place] = _damage(cell), cell["null"]
                self.measured += 1
            done += len(picked)
        return found

    def _saved(self, key: str) -> Damage | None:
        cell = self.store.get(key)
        return None if cell is None else self._read(key, cell)

    def _read(self, key: str, cell: Mapping[str, Any]) -> Damage:
        try:
            return _damage(cell)
        except (KeyError, TypeError, ValueError) as error:
            raise self.store.damaged(key) from error

    def _keep(self, key: str, response: Response) -> Damage:
        cell = self._cell(response) | {"effect": key not in self.sweep.idle}
        self.store.put(key, cell)
        self.measured += 1
        return _damage(cell)

    def _cell(self, response: Response, *, against: Response | None = None) -> dict[str, Any]:
        base = self.reference.result if against is None else against.nll
        windows = response.nll.windows - base.windows
        delta = float((response.nll.sums - base.sums).sum() / base.counts.sum())
        kl = math.nan if response.kl is None else response.kl.mean
        fine = math.isfinite(delta) and math.isfinite(kl) and bool(np.isfinite(windows).all())
        return {
            "delta_nll": delta if fine else None,
            "kl": kl if fine else None,
            "windows": [float(v) for v in windows] if fine else [],
        }

    def _show(self, label: str, start: int, batch: Sequence[str], total: int) -> None:
        experiments = len(batch)

        def shown(done: int, of_all: int) -> None:
            self.progress(start + done * experiments // max(1, of_all), total, label)

        self.sweep.report(shown)


def _damage(cell: Mapping[str, Any]) -> Damage:
    figures = [None if cell[name] is None else float(cell[name]) for name in ("delta_nll", "kl")]
    windows = tuple(float(value) for value in cell["windows"])
    if not all(map(math.isfinite, (*windows, *(f for f in figures if f is not None)))):
        raise ValueError("a stored figure is not finite")
    return Damage(figures[0], figures[1], windows, bool(cell.get("effect", True)))
