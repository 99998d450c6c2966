"""Gram and covariance matrices of activations, accumulated in fp64 as the text streams by, and their smallest eigenvalues.

An fp32 Gram matrix squares the condition number into nothing (it returned 0.0 for a true smallest singular value of
1e-4), so everything here is fp64, and every smallest value comes with the floor below which it is rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ternary_probe.anatomy import NonFiniteError

_PANELS = 4  # of the upper triangle: 62.5 % of the whole product's work, still in large multiplications
_EPS = torch.finfo(torch.float64).eps


class GramMatrix:
    """``Σ x xᵀ`` over rows x, one chunk of tokens at a time.

    Args:
        width: Length of a row.
        device: Where rows will be; nothing is moved.

    Attributes:
        rows: Rows added.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.width = width
        self.rows = 0
        self._upper = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, rows: Tensor) -> None:
        """Add rows.

        Args:
            rows: ``[..., width]`` in any floating dtype.
        """
        x = rows.detach().reshape(-1, self.width).to(torch.float64)
        step = -(-self.width // _PANELS)
        for start in range(0, self.width, step):
            stop = start + step
            self._upper[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])
        self.rows += x.shape[0]

    @property
    def matrix(self) -> Tensor:
        """The whole matrix, fp64 ``[width, width]``."""
        return self._upper.triu() + self._upper.triu(1).T


class Covariance:
    """Mean and centred covariance of rows, merged chunk by chunk (Chan, Golub and LeVeque 1979), so no shift is lost.

    Args:
        width: Length of a row.
        device: Where rows will be.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self._centred = GramMatrix(width, device)
        self.mean = torch.zeros(width, dtype=torch.float64, device=device)
        self.between = torch.zeros(width, width, dtype=torch.float64, device=device)

    @property
    def rows(self) -> int:
        """Rows added."""
        return self._centred.rows

    def add(self, rows: Tensor) -> None:
        """Add rows.

        Args:
            rows: ``[..., width]`` in any floating dtype.
        """
        x = rows.detach().reshape(-1, self.mean.shape[0]).to(torch.float64)
        before, new = self.rows, x.shape[0]
        mean = x.mean(0)
        shift = mean - self.mean
        self._centred.add(x - mean)
        self.between.addr_(shift, shift, alpha=before * new / (before + new))
        self.mean += shift * (new / (before + new))

    @property
    def matrix(self) -> Tensor:
        """``(1/N) Σ (x − mean)(x − mean)ᵀ``, fp64 ``[width, width]``."""
        return (self._centred.matrix + self.between) / self.rows


class SmallestSingular(NamedTuple):
    """The smallest singular value of the rows whose Gram matrix was taken.

    Attributes:
        value: ``√λ_min`` of the Gram matrix, 0 where rounding made λ_min negative.
        floor: Values up to here cannot be told from 0: the larger of the two below.
        gram_floor: ``√(ε₆₄ · d · λ_max)``, what the fp64 eigenvalues can resolve.
        dtype_floor: What rounding the rows to their own dtype adds in a middling coordinate,
            ``ε/√12 · √N · rms`` (an estimate, our reading).
    """

    value: float
    floor: float
    gram_floor: float
    dtype_floor: float


def smallest_singular(gram: GramMatrix, dtype: torch.dtype = torch.float64, *, where: str = "rows") -> SmallestSingular:
    """Return σ_min of the rows behind a Gram matrix, by `eigvalsh`.

    Args:
        gram: The matrix.
        dtype: The dtype in which the rows were computed.
        where: What the rows are, for the error.

    Returns:
        The value and its floors, in the rows' unit.

    Raises:
        NonFiniteError: If a row held NaN or infinity.
    """
    matrix = gram.matrix
    require_finite(matrix, where)
    values = torch.linalg.eigvalsh(matrix)
    smallest, largest = float(values[0]), float(values[-1])
    gram_floor = max(_EPS * gram.width * largest, 0.0) ** 0.5
    rounding = torch.finfo(dtype).eps / 12**0.5 * float(matrix.diagonal().quantile(0.5)) ** 0.5
    return SmallestSingular(max(smallest, 0.0) ** 0.5, max(gram_floor, rounding), gram_floor, rounding)


def require_finite(matrix: Tensor, where: str) -> None:
    """Refuse second moments that are not finite.

    Args:
        matrix: ``[width, width]``.
        where: What was measured.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    bad = torch.nonzero(~torch.isfinite(matrix.diagonal()))
    if bad.numel():
        raise NonFiniteError(
            f"{where} is not finite at feature {int(bad[0])}: load the model with --dtype float32, "
            "or check its weights for NaN"
        )
