"""Sign-preserving noise: the perturbation of equal norm that should hurt less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch

from ternary_probe.perturb.draw import RandomEntries
from ternary_probe.perturb.recipe import Edit
from ternary_probe.perturb.sign_flip import SignFlip

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix


class Magnitude(RandomEntries):
    """Add one constant to every magnitude, ``dW = delta * sign(W)``, at the Frobenius norm of a sign flip.

    ``delta`` is set per matrix and per draw so that ``||dW||_F`` equals that of `SignFlip` with the same rate, columns,
    matching and seed (arXiv 2605.18933; only the *constant* shape gives the ratio pi/(pi-2)). The constant goes to every
    non-zero entry of the selected columns, so a copy of those columns is kept while the recipe is applied.
    """

    kind: Literal["magnitude"] = "magnitude"

    def flip(self) -> SignFlip:
        """Return the sign flip this noise is matched to."""
        return SignFlip(**self.model_dump(exclude={"kind"}))

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Change matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per matrix whose matched flip has an entry to flip.
        """
        flip = self.flip()
        for matrix in self.targets(anatomy):
            entries = flip.draw(matrix)
            if entries.numel():
                yield self._spread(matrix, flip.norm(matrix, entries))

    def _spread(self, matrix: WeightMatrix, norm: float) -> Edit:
        columns = torch.from_numpy(self.columns.of(matrix.name, matrix.in_features))
        saved = matrix.read_columns(columns).clone()
        filled = int((saved != 0).sum())
        delta = norm / filled**0.5 if filled else 0.0
        new = torch.add(saved, saved.sign(), alpha=delta)
        moved = new.double() - saved  # in a half-precision dtype the constant is rounded entry by entry
        zeros, energy = int((moved == 0).sum()), float(moved.square_().sum())
        del moved
        matrix.write_columns(columns, new)
        return Edit(
            undo=lambda: matrix.write_columns(columns, saved), entries=saved.numel(), zeros=zeros, delta_energy=energy
        )
