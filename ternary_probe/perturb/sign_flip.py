"""The sign flip: the perturbation that hurts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch

from ternary_probe.perturb.columns import Columns
from ternary_probe.perturb.draw import RandomEntries
from ternary_probe.perturb.recipe import Edit

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix

_KEEP_POSITIONS_BELOW = 0.03  # above this share of a matrix, positions are drawn again to undo rather than kept


class SignFlip(RandomEntries):
    """Flip the sign of a random fraction of a matrix's entries: ``dW = -2W`` there (arXiv 2605.18933, perturbations).

    A flip is an XOR of the sign bit: exact, its own inverse in every dtype, and nothing is copied. With
    ``matching=energy`` the change is rescaled, matrix by matrix, to the Frobenius norm of the flip over *all* columns at
    the same rate and seed; the paper does not say whether it rescales per matrix or over the model, so this is our reading.
    """

    kind: Literal["sign_flip"] = "sign_flip"

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Flip matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per matrix that has an entry to flip.
        """
        for matrix in self.targets(anatomy):
            entries = self.draw(matrix)
            if entries.numel():
                yield self._rescaled(matrix, entries) if self.matching == "energy" else self._flipped(matrix, entries)

    def norm(self, matrix: WeightMatrix, entries: torch.Tensor) -> float:
        """Return the Frobenius norm of the change to one matrix, from the weights as they are now.

        Args:
            matrix: The matrix.
            entries: What `draw` gave for it.

        Returns:
            ``||dW||_F``, before rounding to the storage dtype.
        """
        own = float(matrix.read(entries).double().square().sum().sqrt())
        return 2 * (self._yardstick(matrix) if self.matching == "energy" and own > 0 else own)

    def _yardstick(self, matrix: WeightMatrix) -> float:
        """Return the norm of the weights that the flip over all columns hits, at the same rate and seed."""
        every = self.model_copy(update={"columns": Columns(), "matching": "rate"}).draw(matrix)
        return float(matrix.read(every).double().square().sum().sqrt())

    def _flipped(self, matrix: WeightMatrix, entries: torch.Tensor) -> Edit:
        # All that can fail (memory) comes before the flip: once it is made, its undo must reach the caller.
        values = matrix.read(entries).double()
        zeros, energy = int((values == 0).sum()), 4 * float(values.square().sum())
        size = matrix.out_features * matrix.in_features
        kept = None
        if entries.numel() <= _KEEP_POSITIONS_BELOW * size:
            kept = entries.to(torch.int32) if size < 2**31 else entries  # half the memory while the arm runs
        matrix.flip_signs(entries)
        return Edit(
            undo=lambda: matrix.flip_signs(self.draw(matrix) if kept is None else kept.to(torch.int64)),
            entries=entries.numel(),
            zeros=zeros,
            delta_energy=energy,
        )

    def _rescaled(self, matrix: WeightMatrix, entries: torch.Tensor) -> Edit:
        values = matrix.read(entries)
        exact = values.double()
        wanted = self._yardstick(matrix)
        have = float(exact.square().sum().sqrt())
        scale = wanted / have if have > 0 else 0.0
        new = (exact * (1 - 2 * scale)).to(values.dtype)
        zeros, energy = int((new == values).sum()), float((new.double() - exact).square().sum())
        matrix.write(entries, new)
        return Edit(
            undo=lambda: matrix.write(entries, values), entries=entries.numel(), zeros=zeros, delta_energy=energy
        )
