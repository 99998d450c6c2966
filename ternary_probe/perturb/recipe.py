"""What every recipe shares: frozen data, applied and undone exactly, with proof of both."""

from __future__ import annotations

import fnmatch
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from ternary_probe import anatomy as anatomies
from ternary_probe.errors import ProbeError
from ternary_probe.perturb.interrupt import interrupts_deferred, undone_on_interrupt
from ternary_probe.perturb.proof import NoEffectError, NotRestoredError, checksum

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.measure.activations import Activations
    from ternary_probe.text import Windows

log = logging.getLogger(__name__)


class Edit(NamedTuple):
    """One change already made to the weights, and the way back."""

    undo: Callable[[], None]
    entries: int
    zeros: int
    delta_energy: float
    """``||dW||_F^2`` of this change, fp64."""


@dataclass
class Application:
    """What a recipe did to a model while it was applied."""

    recipe: Perturbation
    entries: int = 0
    zeros: int = 0
    delta_energy: float = 0.0
    checksum_before: str = ""
    checksum_during: str = ""
    checksum_after: str = ""
    matrices: list[str] = field(default_factory=list)

    @property
    def changed(self) -> int:
        """Entries whose value really moved."""
        return self.entries - self.zeros


class Perturbation(BaseModel, ABC):
    """A recipe for changing weights. Data only: equal recipes change equal entries, anywhere (`positions`).

    Attributes:
        seed: Seed of the random positions.
        include: `fnmatch` patterns on matrix names; empty means every matrix inside a block.
        exclude: Patterns taken out again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    seed: int = Field(0, ge=0)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def needs_measurement(self) -> bool:
        """Whether `resolve` must run before the recipe can be applied."""
        return False

    def resolve(self, target: torch.nn.Module | Anatomy, calibration: Windows | Activations) -> Self:
        """Freeze whatever depends on activations. Recipes without such a part return themselves.

        Args:
            target: The model, or its anatomy.
            calibration: Text to measure activations on, or the measurement.

        Returns:
            A recipe that is pure data.
        """
        del target, calibration
        return self

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON-able data; `ternary_probe.perturb.from_description` is the inverse."""
        return self.model_dump(mode="json")

    def targets(self, anatomy: Anatomy) -> list[WeightMatrix]:
        """Return the matrices this recipe touches, in execution order.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Matrices inside blocks, or those that match ``include``, less those that match ``exclude``.

        Raises:
            ProbeError: If a pattern matches nothing, or nothing is left.
        """
        names = {name for m in anatomy.matrices for name in (m.name, *m.aliases)}
        for pattern in (*self.include, *self.exclude):
            if pattern.replace("[[]", "[") in names:  # a name, escaped or not; there may be thousands
                continue
            if not any(_matches(m, (pattern,)) for m in anatomy.matrices):
                raise ProbeError(
                    f"pattern {pattern!r} matches no weight matrix of this model: `ternary-probe inspect` lists their names"
                )
        chosen = [m for m in anatomy.matrices if _matches(m, self.include)] if self.include else anatomy.block_matrices
        chosen = [m for m in chosen if not _matches(m, self.exclude)]
        if not chosen:
            stored = anatomies.stored_as_integers(anatomy.model)
            if stored is not None:
                raise ProbeError(f"the weights of this model are stored as {stored}: dequantize the model first")
            wanted = f"include={';'.join(self.include) or 'every block matrix'}"
            raise ProbeError(
                f"{wanted} exclude={';'.join(self.exclude) or 'none'} matches no weight matrix of this model"
            )
        return chosen

    def touched(self, anatomy: Anatomy) -> list[tuple[str, torch.Tensor]]:
        """Return the live tensors whose bits this recipe may change, by name.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Views, not copies.
        """
        return [(m.name, m.view()) for m in self.targets(anatomy)]

    @abstractmethod
    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Change the weights piece by piece, yielding the way back after each piece.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One `Edit` per changed piece.
        """

    @contextmanager
    def applied(self, target: torch.nn.Module | Anatomy, *, known_checksum: str | None = None) -> Iterator[Application]:
        """Apply the recipe; on exit, also by an exception or Ctrl-C, every bit is as before.

        Args:
            target: The model, or its anatomy (cheaper when many recipes follow).
            known_checksum: Checksum of the touched matrices just now, where the caller has proof of it; saves one pass.

        Yields:
            What was done. ``checksum_after`` is filled in on exit.

        Raises:
            ProbeError: If the recipe does not fit the model or still needs `resolve`.
            NoEffectError: If no bit changed.
            NotRestoredError: If undoing left a difference.
        """
        anatomy = anatomy_of(target)
        if self.needs_measurement:
            raise ProbeError(f"recipe {self} depends on activations: call recipe.resolve(model, calibration) first")
        done = Application(recipe=self)
        tensors = self.touched(anatomy)
        done.matrices = [name for name, _ in tensors]
        done.checksum_before = known_checksum or checksum(t for _, t in tensors)
        undo: list[Callable[[], None]] = []
        with undone_on_interrupt(lambda: _take_back(undo)):
            try:
                with interrupts_deferred():
                    for edit in self.edits(anatomy):
                        undo.append(edit.undo)
                        done.entries += edit.entries
                        done.zeros += edit.zeros
                        done.delta_energy += edit.delta_energy
                done.checksum_during = checksum(t for _, t in self.touched(anatomy))
                self.require_effect(done.entries, done.zeros, moved=done.checksum_during != done.checksum_before)
                yield done
            finally:
                with interrupts_deferred():
                    _take_back(undo)
                done.checksum_after = checksum(t for _, t in self.touched(anatomy))
        if done.checksum_after != done.checksum_before:
            raise NotRestoredError(
                f"recipe {self} was not undone exactly ({done.checksum_before} before, {done.checksum_after} after): "
                "something else changed these weights meanwhile; reload the model"
            )

    def require_effect(self, entries: int, zeros: int, *, moved: bool = True) -> None:
        """Refuse to measure anything under a recipe that did nothing.

        Args:
            entries: Entries hit.
            zeros: Entries hit whose value did not move.
            moved: Whether the checksum changed.

        Raises:
            NoEffectError: If no weight changed.
        """
        if entries == 0:
            raise NoEffectError(f"recipe {self} selects no entry: raise the rate or select more columns")
        if entries == zeros or not moved:
            raise NoEffectError(
                f"recipe {self} changed no weight ({zeros} of {entries} entries hit are zero or were left as they are); "
                "a result from it would look perfectly robust"
            )


def anatomy_of(target: torch.nn.Module | Anatomy) -> Anatomy:
    """Return the anatomy of a model, examining it if need be.

    Args:
        target: A model or its anatomy.

    Returns:
        The anatomy.
    """
    return target if isinstance(target, anatomies.Anatomy) else anatomies.examine(target)


def entries_in_columns(columns: Any, positions: Any, in_features: int) -> torch.Tensor:
    """Map positions within a column selection to flat entries of the matrix.

    Args:
        columns: Sorted selected columns, int64 ``[k]``.
        positions: Values in ``[0, out_features * k)``, row-major over the selection, int64.
        in_features: Columns of the whole matrix.

    Returns:
        Flat row-major indices into ``[out_features, in_features]``, int64.
    """
    if len(columns) == in_features:
        return torch.from_numpy(positions)
    return torch.from_numpy(positions // len(columns) * in_features + columns[positions % len(columns)])


def count_by_rate(rate: float, pool: int) -> int:
    """Return how many of ``pool`` entries a rate asks for: the nearest integer, halves to even.

    Args:
        rate: Share in ``(0, 1]``.
        pool: Number of entries.

    Returns:
        The count.
    """
    return round(rate * pool)


def _matches(matrix: WeightMatrix, patterns: tuple[str, ...]) -> bool:
    """Tell whether a pattern fits a name of the matrix; a name that has brackets (``experts.up[3]``) also fits itself."""
    plain, globs = _compiled(patterns)
    return any(name in plain or (globs is not None and globs.match(name)) for name in (matrix.name, *matrix.aliases))


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    return frozenset(patterns), re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None


def _take_back(undo: list[Callable[[], None]]) -> None:
    """Undo everything, last first; an undo that fails does not keep the others from running."""
    failed: Exception | None = None
    while undo:
        try:
            undo.pop()()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def frozen_counts(counts: Mapping[str, int] | None, name: str) -> int:
    """Return a matrix's frozen number of entries.

    Args:
        counts: Matrix name to count.
        name: The matrix.

    Returns:
        The count.

    Raises:
        ProbeError: If the frozen counts do not name the matrix.
    """
    if counts is None or name not in counts:
        raise ProbeError(f"the recipe's frozen counts do not name {name}; resolve the recipe on this model")
    return counts[name]
