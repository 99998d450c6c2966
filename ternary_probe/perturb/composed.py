"""Several recipes, one after the other: plant outliers, then flip signs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Literal, Self

import torch
from pydantic import Field

from ternary_probe.perturb.column_flip import ColumnFlip
from ternary_probe.perturb.entry_flip import EntryFlip
from ternary_probe.perturb.magnitude import Magnitude
from ternary_probe.perturb.outlier_columns import OutlierColumns
from ternary_probe.perturb.recipe import Edit, Perturbation, anatomy_of
from ternary_probe.perturb.sign_flip import SignFlip
from ternary_probe.perturb.ternarize import Ternarize

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy
    from ternary_probe.measure.activations import Activations
    from ternary_probe.text import Windows

Simple = Annotated[
    SignFlip | Magnitude | ColumnFlip | OutlierColumns | Ternarize | EntryFlip, Field(discriminator="kind")
]


class Composed(Perturbation):
    """Apply ``parts`` in order; undo them in reverse. Its own seed and patterns are not used: the parts have theirs."""

    kind: Literal["composed"] = "composed"
    parts: tuple[Simple, ...] = Field(min_length=1)

    @property
    def needs_measurement(self) -> bool:
        """Whether any part needs activations."""
        return any(part.needs_measurement for part in self.parts)

    def resolve(self, target: torch.nn.Module | Anatomy, calibration: Windows | Activations) -> Self:
        """Freeze each part *with the parts before it applied*, since planting moves the activations.

        Args:
            target: The model, or its anatomy.
            calibration: Text to measure on. An `Activations` is taken as measured where it will be used.

        Returns:
            The same recipe as pure data.
        """
        anatomy = anatomy_of(target)
        parts: list[Simple] = []
        with ExitStack() as stack:
            for number, part in enumerate(self.parts, start=1):
                ready = part.resolve(anatomy, calibration)
                parts.append(ready)
                if number < len(self.parts):
                    stack.enter_context(ready.applied(anatomy))
        return self.model_copy(update={"parts": tuple(parts)})

    def touched(self, anatomy: Anatomy) -> list[tuple[str, torch.Tensor]]:
        """Return the union of the parts' live tensors.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Live tensors by name.
        """
        return list({name: tensor for part in self.parts for name, tensor in part.touched(anatomy)}.items())

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Apply part after part. Each must have an effect of its own: a plant would hide a flip that hit nothing.

        Args:
            anatomy: The model's anatomy.

        Yields:
            The parts' edits.
        """
        for part in self.parts:
            entries = zeros = 0
            for edit in part.edits(anatomy):
                entries += edit.entries
                zeros += edit.zeros
                yield edit
            part.require_effect(entries, zeros)

    def __str__(self) -> str:
        """Return the parts' recipe strings, joined by ``+``."""
        return "+".join(map(str, self.parts))
