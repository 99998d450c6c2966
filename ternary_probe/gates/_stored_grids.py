"""Grids that stored matrices lie on, found on a few rows of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ternary_probe.gates._weight_reader import is_float, is_matrix, sample_rows
from ternary_probe.measure.grid import Grid, find_grid

if TYPE_CHECKING:
    import torch

    from ternary_probe.gates._parameters import ParameterEvidence

SAMPLED_ROWS = 16
_FIRST_LOOK = 4


def matrices(found: ParameterEvidence) -> list[str]:
    """Name the stored floating matrices, eight-bit floats excepted: those are a grid by their dtype.

    Args:
        found: The files.

    Returns:
        Names of tensors.
    """
    return [
        name
        for name, entry in found.tensors.items()
        if is_float(entry.dtype) and not entry.dtype.startswith("F8") and is_matrix(name, entry.shape)
    ]


def stored_grid(found: ParameterEvidence, name: str) -> Grid | None:
    """Find the grid of one matrix along its last axis as stored.

    Args:
        found: The files.
        name: One of `matrices`.

    Returns:
        The grid, or None. Further rows can only add levels, so four rows without a grid end the search.
    """
    few = sample_rows(found, name, _FIRST_LOOK)
    if bool(few.any()) and find_grid(few) is None:
        return None
    return find_grid(sample_rows(found, name, SAMPLED_ROWS))


def grouped(rows: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Cut rows into the groups that share levels.

    Args:
        rows: ``[rows, width]``.
        grid: Their grid.

    Returns:
        ``[groups, size]``; a remainder shorter than a group is left out.
    """
    size = grid.group or rows.shape[1]
    return rows[:, : rows.shape[1] // size * size].reshape(-1, size)
