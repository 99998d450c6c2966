"""Input activations of every weight matrix: amplitude alpha_j, outlier columns, share of energy (THEORY 1.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ternary_probe.anatomy import tap_inputs
from ternary_probe.measure.finite import require_finite_activation
from ternary_probe.perturb.columns import SelectBy, top_columns

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.text import Windows

Vector = NDArray[np.float64]

_HEAD_ROWS = 256  # rows of logits at a time, where a matrix of the head is measured


class InputMoments(NamedTuple):
    """Moments of one matrix's input over the calibration tokens."""

    energy: Vector
    """``E[x_j^2]``, shape ``[in_features]``."""
    mean_abs: Vector
    """``E|x_j|``, shape ``[in_features]``."""
    tokens: int

    @property
    def alpha(self) -> Vector:
        """Amplitude ``alpha_j = sqrt(E[x_j^2] / E||x||^2)``; ``sum alpha_j^2 = 1``."""
        total = self.energy.sum()
        return np.sqrt(self.energy / total) if total > 0 else np.zeros_like(self.energy)


@dataclass(frozen=True)
class Activations:
    """Input moments of a set of matrices, by matrix name. Matrices no token reached are absent."""

    moments: Mapping[str, InputMoments]

    def outlier_columns(self, fraction: float, by: SelectBy) -> dict[str, tuple[int, ...]]:
        """Return the outlier columns of every measured matrix.

        Args:
            fraction: Share of input columns taken, ``int(fraction * n)`` of them.
            by: ``energy`` (E[x^2], the theory's) or ``mean_abs`` (E|x|, the paper's protocol).

        Returns:
            Matrix name to sorted column indices.
        """
        return {name: top_columns(getattr(m, by), fraction) for name, m in self.moments.items()}


def measure_activations(
    anatomy: Anatomy, windows: Windows, matrices: Sequence[WeightMatrix] | None = None
) -> Activations:
    """Run the text through the model and accumulate the moments of every matrix's input, in fp64.

    Args:
        anatomy: The model's anatomy.
        windows: Calibration text.
        matrices: Matrices to measure; all inside blocks by default.

    Returns:
        The moments. Memory: two vectors per matrix.
    """
    wanted = list(anatomy.block_matrices if matrices is None else matrices)
    # Accumulators are made before the forward: a small vector allocated between its large temporaries lands in the hole
    # one of them left, the next does not fit there any more, and the heap grows by a temporary for every matrix.
    squares = {m.name: _accumulator(m) for m in wanted}
    absolutes = {m.name: _accumulator(m) for m in wanted}
    counts = dict.fromkeys(squares, 0)

    def accumulate(matrix: WeightMatrix, x: torch.Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        squares[matrix.name] += rows.square().sum(0, dtype=torch.float64).to(squares[matrix.name].device)
        absolutes[matrix.name] += rows.abs().sum(0, dtype=torch.float64).to(absolutes[matrix.name].device)
        counts[matrix.name] += rows.shape[0]

    with_head = any(matrix.block is None for matrix in wanted)
    with torch.no_grad(), tap_inputs(anatomy, wanted, accumulate):
        for inputs in windows.inputs:
            states = anatomy.head.states(inputs[None].to(anatomy.input_device))[0]
            if with_head:
                for rows in states.tensor_split(-(-states.shape[0] // _HEAD_ROWS)):
                    anatomy.head.logits(rows)
    moments = {}
    for name, total in squares.items():
        if counts[name]:
            require_finite_activation(name, total)
            tokens = counts[name]
            moments[name] = InputMoments(
                (total / tokens).cpu().numpy(), (absolutes[name] / tokens).cpu().numpy(), tokens
            )
    return Activations(moments)


def _accumulator(matrix: WeightMatrix) -> torch.Tensor:
    device = torch.device("cpu") if matrix.device.type == "meta" else matrix.device
    return torch.zeros(matrix.in_features, dtype=torch.float64, device=device)


class OutlierAmplitude(NamedTuple):
    """How far the outlier columns of one matrix stick out. All are 1 when no column differs from another."""

    n_alpha2_outlier: float
    """``n * mean(alpha_j^2)`` over outlier columns: predicted leverage of a flip there over one anywhere."""
    n_alpha2_other: float
    energy_share: float
    weighted_outlier: float
    """As above with ``alpha_j^2`` weighted by column energy ``||W_:j||^2``: what a flip there really adds."""
    weighted_other: float


def outlier_amplitude(moments: InputMoments, outlier: Sequence[int], matrix: WeightMatrix | None) -> OutlierAmplitude:
    """Return the amplitudes of one matrix (THEORY 1.5).

    Args:
        moments: Input moments of the matrix.
        outlier: Its outlier columns.
        matrix: The matrix, for the column energies; ``None`` takes them as equal.

    Returns:
        The amplitudes.
    """
    alpha2 = moments.alpha**2
    mask = np.zeros(alpha2.size, dtype=bool)
    mask[list(outlier)] = True
    plain = alpha2 * alpha2.size
    damage = plain.copy()
    if matrix is not None:
        damage = damage * column_energy(matrix)
    damage /= max(float(damage.mean()), np.finfo(np.float64).tiny)

    def mean(values: Vector, where: NDArray[np.bool_]) -> float:
        return float(values[where].mean()) if where.any() else 0.0

    return OutlierAmplitude(
        n_alpha2_outlier=mean(plain, mask),
        n_alpha2_other=mean(plain, ~mask),
        energy_share=float(alpha2[mask].sum()),
        weighted_outlier=mean(damage, mask),
        weighted_other=mean(damage, ~mask),
    )


def column_energy(matrix: WeightMatrix) -> Vector:
    """Return ``||W_:j||^2 / m`` of every input column, fp64, shape ``[in_features]``.

    Args:
        matrix: The matrix.

    Returns:
        Mean square of each column.
    """
    weight = matrix.view().detach()
    total = torch.zeros(matrix.in_features, dtype=torch.float64, device=weight.device)
    step = max(1, (1 << 20) // max(1, matrix.in_features))  # rows at a time: no fp64 copy of the matrix
    for start in range(0, matrix.out_features, step):
        total += weight[start : start + step].double().square().sum(0)
    return (total / matrix.out_features).cpu().numpy()


def weight_energy(matrices: Sequence[WeightMatrix]) -> float:
    """Return ``||W||_F^2`` summed over matrices, fp64, without an fp64 copy of any.

    Args:
        matrices: The matrices.

    Returns:
        The energy.
    """
    return sum(float(column_energy(m).sum()) * m.out_features for m in matrices)
