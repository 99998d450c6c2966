"""Flip whole input columns: the worst a sign error can do to one feature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Self

import torch

from ternary_probe.perturb.columns import Columns
from ternary_probe.perturb.draw import column_options, compact
from ternary_probe.perturb.recipe import Edit, Perturbation, anatomy_of

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.measure.activations import Activations
    from ternary_probe.text import Windows


class ColumnFlip(Perturbation):
    """Flip the sign of every entry of the selected columns: ``dW_:j = -2 W_:j``, the same as negating input feature j."""

    kind: Literal["column_flip"] = "column_flip"
    columns: Columns = Columns(select="outlier")

    @property
    def needs_measurement(self) -> bool:
        """Whether outlier columns must be measured first."""
        return self.columns.needs_measurement

    def resolve(self, target: torch.nn.Module | Anatomy, calibration: Windows | Activations) -> Self:
        """Freeze the outlier columns.

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
        measured = (
            calibration if isinstance(calibration, Activations) else measure_activations(anatomy, calibration, matrices)
        )
        outlier = measured.outlier_columns(self.columns.fraction, self.columns.by)
        return self.model_copy(update={"columns": self.columns.freeze(matrices, outlier)})

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Flip matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per matrix with a selected column.
        """
        for matrix in self.targets(anatomy):
            columns = torch.from_numpy(self.columns.of(matrix.name, matrix.in_features))
            if columns.numel():
                yield _flipped(matrix, columns)

    def __str__(self) -> str:
        """Return the recipe string, without the frozen measurement."""
        return compact(self, column_options(self.columns))


def _flipped(matrix: WeightMatrix, columns: torch.Tensor) -> Edit:
    values = matrix.read_columns(columns)
    zeros = int((values == 0).sum())
    energy = 4 * float(values.double().square().sum())
    rows = torch.arange(matrix.out_features)[:, None] * matrix.in_features
    entries = (rows + columns).reshape(-1)
    matrix.flip_signs(entries)
    return Edit(undo=lambda: matrix.flip_signs(entries), entries=entries.numel(), zeros=zeros, delta_energy=energy)
