"""Does a matrix already lie on a k-bit grid? Then it looks falsely robust to that same grid (THEORY 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy

_GROUPS = (16, 32, 64, 128, 256)
_SAMPLE_ROWS = 64
_MOST_BITS = 8
_SAMPLE_MATRICES = 8


class Grid(NamedTuple):
    """The coarsest grid a matrix lies on."""

    bits: int
    """``ceil(log2(levels))``."""
    group: int
    """Consecutive inputs that share their levels; 0 for a whole row."""
    levels: int
    """Largest number of distinct values in a group."""

    def describe(self) -> str:
        """Return the grid in words: ``4-bit grid, groups of 32``."""
        return f"{self.bits}-bit grid, {f'groups of {self.group}' if self.group else 'per row'}"


def find_grid(weight: torch.Tensor) -> Grid | None:
    """Find a k-bit grid, k <= 8, shared by groups of consecutive inputs of a row, or by whole rows.

    A grid is believed only where a group holds at least 1.5 times as many entries as levels: fewer would be distinct in
    any matrix. Half-precision matrices repeat values by chance; that is never taken for a grid of more than 4 bits there.

    Args:
        weight: Shape ``[out, in]``, floating.

    Returns:
        The grid of fewest bits, or ``None``.

    Raises:
        ProbeError: If ``weight`` is no floating matrix.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ProbeError(
            f"a grid is looked for in a floating matrix [out, in], not {weight.dtype} {list(weight.shape)}"
        )
    step = max(1, weight.shape[0] // _SAMPLE_ROWS)
    rows = weight.detach()[::step][:_SAMPLE_ROWS].float()
    most = _MOST_BITS if weight.element_size() > 2 else 4
    found: list[Grid] = []
    for group in (*_GROUPS, 0):
        size = group or rows.shape[1]
        if size < 2 or rows.shape[1] < size:
            continue
        pieces = rows[:, : rows.shape[1] // size * size].reshape(-1, size).sort(-1).values
        levels = int((pieces.diff(dim=-1) != 0).sum(-1).max()) + 1 if pieces.numel() else size
        bits = max(1, (levels - 1).bit_length())
        if levels > 1 and size >= 1.5 * levels and bits <= most:
            found.append(Grid(bits, group, levels))
    # Among equal bits the widest group is the grid itself; narrower ones merely lie inside it.
    return min(found, key=lambda grid: (grid.bits, -(grid.group or 1 << 30))) if found else None


def grid_note(anatomy: Anatomy) -> tuple[str, ...]:
    """Say, from a few matrices of a model, whether it was quantized before.

    Args:
        anatomy: The model's anatomy.

    Returns:
        At most one note.
    """
    matrices = anatomy.block_matrices
    step = max(1, len(matrices) // _SAMPLE_MATRICES)
    grids = [find_grid(m.view()) for m in matrices[::step]]
    found = sorted({grid.describe() for grid in grids if grid is not None})
    if not found or sum(grid is not None for grid in grids) < len(grids) / 2:
        return ()
    return (f"the weights lie on a grid already ({found[0]}): the model looks falsely robust to that same grid",)
