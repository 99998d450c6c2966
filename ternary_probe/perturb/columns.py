"""Which input columns of a matrix a recipe may touch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ternary_probe.errors import ProbeError
from ternary_probe.perturb.positions import Indices

if TYPE_CHECKING:
    from ternary_probe.anatomy import WeightMatrix

Select = Literal["all", "outlier", "other", "listed"]
SelectBy = Literal["energy", "mean_abs"]


class Columns(BaseModel):
    """A choice of input columns, per matrix.

    ``outlier`` and ``other`` need a measurement: `resolve` freezes the outlier columns of every matrix into ``outlier``,
    after which the choice is pure data and replays anywhere.

    Attributes:
        select: ``all`` columns, the ``outlier`` ones, the ``other`` ones (the complement), or the ``listed`` ones.
        fraction: Share of a matrix's input columns that count as outliers (``int(fraction * n)``, the paper's rule).
        by: What ranks columns: ``energy`` E[x^2] (the theory's), or ``mean_abs`` E|x| (the paper's protocol).
        listed: Column indices for ``listed``, the same in every matrix.
        outlier: Matrix name to outlier columns, once resolved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    select: Select = "all"
    fraction: float = Field(0.05, gt=0, lt=1, allow_inf_nan=False)
    by: SelectBy = "energy"
    listed: tuple[int, ...] = ()
    outlier: Mapping[str, tuple[int, ...]] | None = None

    @model_validator(mode="after")
    def _listed_when_listed(self) -> Self:
        if (self.select == "listed") != bool(self.listed):
            raise ValueError("a list of columns goes with select=listed and with nothing else")
        if self.listed and min(self.listed) < 0:
            raise ValueError(f"column {min(self.listed)} is negative")
        return self

    @property
    def needs_measurement(self) -> bool:
        """Whether the choice depends on activations not yet measured."""
        return self.select in {"outlier", "other"} and self.outlier is None

    def freeze(self, matrices: Iterable[WeightMatrix], outlier: Mapping[str, tuple[int, ...]]) -> Self:
        """Return the same choice with the outlier columns of every matrix frozen.

        Args:
            matrices: The matrices it will be used on.
            outlier: Matrix name to outlier columns, of at least these matrices.

        Returns:
            Pure data.

        Raises:
            ProbeError: If a matrix was not measured, or no matrix has an outlier column.
        """
        names = [m.name for m in matrices]
        missing = [name for name in names if name not in outlier]
        if missing:
            raise ProbeError(
                f"no activation reached {missing[0]} on the calibration text (and {len(missing) - 1} more): "
                "use more text, or --exclude it"
            )
        frozen = {name: tuple(outlier[name]) for name in names}
        if not any(frozen.values()):
            raise ProbeError(
                f"no outlier column selected: {self.fraction:g} of the input columns is less than one column in "
                "every matrix; raise --fraction"
            )
        return self.model_copy(update={"outlier": frozen})

    def outlier_of(self, name: str, in_features: int) -> Indices:
        """Return the frozen outlier columns of one matrix.

        Args:
            name: Qualified name of the matrix.
            in_features: Number of its input columns.

        Returns:
            Sorted indices, int64.

        Raises:
            ProbeError: If the selection was never resolved, lacks this matrix, or does not fit it.
        """
        if self.outlier is None:
            raise ProbeError(
                f"columns={self.select} depends on activations: call recipe.resolve(model, calibration) before applying it"
            )
        if name not in self.outlier:
            raise ProbeError(f"the frozen outlier columns do not name {name}; resolve the recipe on this model")
        return _checked(self.outlier[name], name, in_features)

    def of(self, name: str, in_features: int) -> Indices:
        """Return the selected columns of one matrix.

        Args:
            name: Qualified name of the matrix.
            in_features: Number of its input columns.

        Returns:
            Sorted indices, int64.
        """
        if self.select == "all":
            return np.arange(in_features, dtype=np.int64)
        if self.select == "listed":
            return _checked(self.listed, name, in_features)
        outlier = self.outlier_of(name, in_features)
        if self.select == "outlier":
            return outlier
        keep = np.ones(in_features, dtype=bool)
        keep[outlier] = False
        return np.flatnonzero(keep)


def _checked(columns: tuple[int, ...], name: str, in_features: int) -> Indices:
    """Return sorted distinct indices, refusing any that the matrix does not have."""
    indices = np.unique(np.asarray(columns, dtype=np.int64))
    if indices.size and (indices[0] < 0 or indices[-1] >= in_features):
        bad = indices[0] if indices[0] < 0 else indices[-1]
        raise ProbeError(f"column {bad} does not exist in {name}, which has {in_features} input columns")
    return indices


def top_columns(score: np.ndarray, fraction: float) -> tuple[int, ...]:
    """Return the outlier columns by a score: the ``int(fraction * n)`` largest, ties to the lower index.

    Args:
        score: One non-negative figure per input column, shape ``[n]``.
        fraction: Share of columns to take.

    Returns:
        Sorted column indices; empty where ``fraction * n < 1``.
    """
    count = int(fraction * len(score))
    order = np.argsort(-np.asarray(score, dtype=np.float64), kind="stable")
    return tuple(sorted(int(j) for j in order[:count]))
