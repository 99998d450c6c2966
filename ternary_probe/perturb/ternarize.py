"""Ternarize: replace matrices by their ternary form, as a perturbation that is undone exactly."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import field_validator

from ternary_probe import schemes, ternary
from ternary_probe.errors import ProbeError
from ternary_probe.perturb.draw import compact
from ternary_probe.perturb.recipe import Edit, Perturbation

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.ternary import TernaryWeight

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BLOCKS = re.compile(r"(\d+)(?:-(\d+))?")
_CHUNK = 1 << 20


class Ternarize(Perturbation):
    """Replace every targeted matrix by its ternary form ``q``, in the storage dtype: ``dW = q - W``.

    Unlike a sign flip this cannot be undone in place: a copy of each touched matrix is kept while the recipe is applied,
    so that memory holds a second copy of what it touches. Each expert is a matrix of its own, tied storage is quantized
    once, and a unit of a row is a unit of *input* features however the storage is laid out. Matrices already on the grid
    stay as they are; only if nothing changes anywhere is that an error. Nothing is random: ``seed`` plays no part.

    Attributes:
        scheme: Quantizer, ``method[+ls][@row|@tensor|@g128]`` (`schemes.parse`); kept with its granularity spelled out.
        blocks: Blocks to touch, ``0-3;7``; all if absent. A matrix outside every block is then left alone.
        roles: `fnmatch` patterns on roles (``down_proj``); all if empty.
    """

    kind: Literal["ternarize"] = "ternarize"
    scheme: str = "absmean@tensor"
    blocks: str | None = None
    roles: tuple[str, ...] = ()

    @field_validator("scheme")
    @classmethod
    def _spelled_out(cls, value: str) -> str:
        return schemes.parse(value).describe()

    @field_validator("blocks")
    @classmethod
    def _selectable(cls, value: str | None) -> str | None:
        if value is not None:
            _ranges(value)
        return value

    def targets(self, anatomy: Anatomy) -> list[WeightMatrix]:
        """Return the matrices to ternarize, in execution order.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Matrices inside blocks, or those that match ``include``; less those that match ``exclude``, lie in another
            block, or have another role.

        Raises:
            ProbeError: If nothing matches, a listed block does not exist, or a role pattern matches no candidate.
        """
        chosen = super().targets(anatomy)
        if self.blocks is not None:
            ranges = _ranges(self.blocks)
            last = max(high for _, high in ranges)
            if last >= len(anatomy.blocks):
                raise ProbeError(
                    f"blocks={self.blocks} names block {last}, and this model has {len(anatomy.blocks)} blocks, "
                    "counted from 0"
                )
            chosen = [m for m in chosen if m.block is not None and any(low <= m.block <= high for low, high in ranges)]
        if self.roles:
            known = sorted({m.role for m in chosen})
            for role in self.roles:
                if not fnmatch.filter(known, role):
                    raise ProbeError(
                        f"roles={role} matches no targeted matrix; roles there are {', '.join(known) or 'none'}"
                    )
            chosen = [m for m in chosen if any(fnmatch.fnmatchcase(m.role, role) for role in self.roles)]
        if not chosen:
            raise ProbeError(f"recipe {self} matches no weight matrix of this model")
        return chosen

    def quantized(self, matrix: WeightMatrix) -> TernaryWeight:
        """Quantize one matrix as it is now; nothing is changed.

        Args:
            matrix: The matrix.

        Returns:
            Codes ``[planes, out_features, in_features]`` and scales.

        Raises:
            ProbeError: If the matrix is stored in a dtype without arithmetic, or holds a NaN or an infinity.
        """
        view = matrix.view()
        if view.dtype not in _FLOATS:
            raise ProbeError(
                f"{matrix.name} is stored as {str(view.dtype).removeprefix('torch.')}: load the model with --dtype "
                "bfloat16 to ternarize it"
            )
        try:
            return ternary.quantize(view, self.scheme)
        except ProbeError as error:
            raise ProbeError(f"{matrix.name}: {error}") from error

    def values(self, matrix: WeightMatrix) -> torch.Tensor:
        """Return what the matrix becomes.

        A scale that underflows in the storage dtype becomes 0 and its unit with it, as rounding has it.

        Args:
            matrix: The matrix.

        Returns:
            ``[out_features, in_features]`` in the storage dtype, a new tensor.

        Raises:
            ProbeError: If a value overflows the storage dtype, or the matrix cannot be quantized.
        """
        quantized = self.quantized(matrix)
        try:
            return quantized.dequantize(matrix.dtype)
        except ProbeError as error:
            raise ProbeError(f"{matrix.name}: {error}") from error

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Ternarize matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per matrix, also for one that was ternary already.
        """
        for matrix in self.targets(anatomy):
            values = self.values(matrix)
            view = matrix.view()
            change = _change(view, values)
            if not change.moved:
                yield Edit(undo=lambda: None, entries=matrix.numel, zeros=matrix.numel, delta_energy=0.0)
                continue
            saved = view.clone()
            view.copy_(values)
            yield Edit(
                undo=_restoring(matrix, saved),
                entries=matrix.numel,
                zeros=matrix.numel - change.moved,
                delta_energy=change.energy,
            )

    def __str__(self) -> str:
        """Return the recipe string."""
        options: dict[str, Any] = {"scheme": self.scheme}
        if self.blocks is not None:
            options["blocks"] = self.blocks
        if self.roles:
            options["roles"] = ";".join(self.roles)
        return compact(self, options)


class _Change(NamedTuple):
    moved: int
    energy: float


def _change(before: torch.Tensor, after: torch.Tensor) -> _Change:
    # Row by row: a double of a whole matrix would be the largest thing in memory.
    step = max(1, _CHUNK // max(1, before.shape[1]))
    moved, energy = 0, torch.zeros((), dtype=torch.float64, device=before.device)
    for start in range(0, len(before), step):
        old, new = before[start : start + step], after[start : start + step]
        moved += int((old != new).sum())
        energy += (new.double() - old).square_().sum()
    return _Change(moved, float(energy))


def _restoring(matrix: WeightMatrix, saved: torch.Tensor) -> Callable[[], None]:
    def undo() -> None:
        matrix.view().copy_(saved)

    return undo


def _ranges(text: str) -> list[tuple[int, int]]:
    """Read ``0-3;7``.

    Args:
        text: Block numbers and ranges, both ends included, separated by ``;``.

    Returns:
        Lowest and highest of each range.

    Raises:
        ProbeError: If it is anything else.
    """
    found = []
    for piece in text.split(";"):
        match = _BLOCKS.fullmatch(piece.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise ProbeError(f"blocks={text} is no selection of blocks: write numbers and ranges like 0-3;7")
        found.append((low, high))
    return found
