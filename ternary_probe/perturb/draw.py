"""The part of a recipe that draws random entries: a rate, a choice of columns, and how arms are matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import Field

from ternary_probe.errors import ProbeError
from ternary_probe.perturb.columns import Columns
from ternary_probe.perturb.positions import sample, stream
from ternary_probe.perturb.recipe import Perturbation, anatomy_of, count_by_rate, entries_in_columns, frozen_counts

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.measure.activations import Activations
    from ternary_probe.text import Windows

Matching = Literal["count", "rate", "energy"]


class RandomEntries(Perturbation):
    """A recipe over a random fraction of the entries of selected columns.

    Attributes:
        rate: Share of entries, in ``(0, 1]``.
        columns: Which input columns may be hit.
        matching: How many entries, so that arms compare fairly. ``rate``: ``rate * (entries in the selected columns)``.
            ``count``: ``rate * (entries in the outlier columns)``, whatever columns are selected. ``energy``: as ``rate``,
            then the change is rescaled (the paper's 1,265x arm; no longer a pure flip).
        counts: Matrix name to number of entries, once resolved.
        spared: Matrix name to flat row-major entries that are drawn like any other but left alone: what remains is the
            bulk, without the super weights.
    """

    rate: float = Field(gt=0, le=1)
    columns: Columns = Columns()
    matching: Matching = "rate"
    counts: Mapping[str, int] | None = None
    spared: Mapping[str, tuple[int, ...]] | None = None

    @property
    def needs_measurement(self) -> bool:
        """Whether outlier columns must be measured first."""
        return self.columns.needs_measurement or (self.matching == "count" and self.counts is None)

    def resolve(self, target: torch.nn.Module | Anatomy, calibration: Windows | Activations) -> Self:
        """Freeze the outlier columns and the number of entries in each matrix.

        Args:
            target: The model, or its anatomy.
            calibration: Text to measure activations on, or the measurement.

        Returns:
            The same recipe as pure data.
        """
        from ternary_probe.measure.activations import Activations, measure_activations

        if not self.needs_measurement:
            return self
        anatomy = anatomy_of(target)
        matrices = self.targets(anatomy)
        if self.columns.outlier is not None:  # columns that are frozen already stay as they are
            return self.resolved_with(matrices, self.columns.outlier)
        measured = (
            calibration if isinstance(calibration, Activations) else measure_activations(anatomy, calibration, matrices)
        )
        return self.resolved_with(matrices, measured.outlier_columns(self.columns.fraction, self.columns.by))

    def resolved_with(self, matrices: list[WeightMatrix], outlier: Mapping[str, tuple[int, ...]]) -> Self:
        """Freeze the recipe with outlier columns that are already known.

        Args:
            matrices: The matrices it will touch.
            outlier: Matrix name to outlier columns.

        Returns:
            The same recipe as pure data.
        """
        columns = self.columns.freeze(matrices, outlier)
        counts = None
        if self.matching == "count":
            counts = {
                m.name: count_by_rate(self.rate, m.out_features * len(columns.outlier_of(m.name, m.in_features)))
                for m in matrices
            }
        return self.model_copy(update={"columns": columns, "counts": counts})

    def total(self, matrices: Sequence[WeightMatrix]) -> int:
        """Return how many entries the recipe hits in all.

        Args:
            matrices: The matrices it touches.

        Returns:
            The number of entries, zeros included.
        """
        return sum(self._count(m, len(self.columns.of(m.name, m.in_features)) * m.out_features) for m in matrices)

    def share(self, matrix: WeightMatrix) -> float:
        """Return the share of its pool that the recipe hits in one matrix: the rate, rounded to whole entries.

        Args:
            matrix: The matrix.

        Returns:
            Entries over the entries of the selected columns; 0 where those hold none.
        """
        pool = len(self.columns.of(matrix.name, matrix.in_features)) * matrix.out_features
        return self._count(matrix, pool) / pool if pool else 0.0

    def _count(self, matrix: WeightMatrix, pool: int) -> int:
        if self.matching == "count":
            return frozen_counts(self.counts, matrix.name)
        return count_by_rate(self.rate, pool)

    def draw(self, matrix: WeightMatrix) -> torch.Tensor:
        """Return the entries hit in one matrix: flat row-major indices, sorted, int64, on the CPU.

        Args:
            matrix: The matrix.

        Returns:
            Distinct indices into ``[out_features, in_features]``.

        Raises:
            ProbeError: If count matching asks for more entries than the selected columns hold.
        """
        columns = self.columns.of(matrix.name, matrix.in_features)
        pool = matrix.out_features * len(columns)
        count = count_by_rate(self.rate, pool)
        if self.matching == "count":
            count = frozen_counts(self.counts, matrix.name)
            if count > pool:
                raise ProbeError(
                    f"{matrix.name}: {count} entries to flip but only {pool} in its {self.columns.select} columns; "
                    "lower the rate or the fraction"
                )
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        bits = stream(self.kind, self.seed, matrix.name, (matrix.out_features, matrix.in_features))
        entries = entries_in_columns(columns, sample(bits, pool, count), matrix.in_features)
        spared = (self.spared or {}).get(matrix.name)
        return entries if not spared else entries[~torch.isin(entries, torch.tensor(spared))]

    def __str__(self) -> str:
        """Return the recipe string, without the frozen measurement."""
        return compact(self, {"rate": repr(self.rate), **column_options(self.columns), "matching": self.matching})


def proportional_counts(
    recipe: RandomEntries, matrices: Sequence[WeightMatrix], outlier: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Allocate ``int(rate * outlier pool)`` entries over matrices in proportion to the recipe's own pools.

    The rule of arXiv 2605.18933, largest remainders first. Ours rounds in each matrix instead, so that the number in a
    matrix does not depend on which others are present.

    Args:
        recipe: A recipe with frozen columns.
        matrices: The matrices.
        outlier: Matrix name to outlier columns.

    Returns:
        Matrix name to number of entries.

    Raises:
        ProbeError: If the recipe's columns hold no entry.
    """
    total = int(recipe.rate * sum(m.out_features * len(outlier[m.name]) for m in matrices))
    pools = [m.out_features * len(recipe.columns.of(m.name, m.in_features)) for m in matrices]
    if not any(pools):
        raise ProbeError(f"the columns of {recipe} hold no entry to allocate flips to; select more columns")
    exact = [total * pool / sum(pools) for pool in pools]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(pools)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return {m.name: count for m, count in zip(matrices, counts, strict=True)}


def column_options(columns: Columns) -> dict[str, Any]:
    """Return a column selection as recipe-string options.

    Args:
        columns: The selection.

    Returns:
        Option name to text.
    """
    default = Columns()
    text = ";".join(map(str, columns.listed)) if columns.select == "listed" else columns.select
    options: dict[str, Any] = {"columns": text}
    if columns.fraction != default.fraction:
        options["fraction"] = repr(columns.fraction)
    if columns.by != default.by:
        options["by"] = columns.by
    return options


def compact(recipe: Perturbation, options: Mapping[str, Any]) -> str:
    """Return ``kind:name=value,…`` with the options all recipes share.

    Args:
        recipe: The recipe.
        options: Its own options.

    Returns:
        A string that `ternary_probe.perturb.parse` reads.
    """
    shared: dict[str, Any] = {"seed": recipe.seed}
    if recipe.include:
        shared["include"] = ";".join(recipe.include)
    if recipe.exclude:
        shared["exclude"] = ";".join(recipe.exclude)
    return f"{recipe.kind}:" + ",".join(f"{name}={value}" for name, value in {**options, **shared}.items())
