"""Flip or remove named single entries: super weights, measured one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, model_validator

from ternary_probe.errors import ProbeError
from ternary_probe.perturb.draw import compact
from ternary_probe.perturb.recipe import Edit, Perturbation

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix

_PLACE = re.compile(r"(?P<matrix>.+)@(?P<row>\d+)@(?P<column>\d+)")


def _read_entries(value: Any) -> Any:
    """Read ``matrix@row@column;…``; mappings pass."""
    if not isinstance(value, str):
        return value
    found: dict[str, list[tuple[int, int]]] = {}
    for piece in filter(None, (part.strip() for part in value.split(";"))):
        place = _PLACE.fullmatch(piece)
        if place is None:
            raise ValueError(f"{piece!r} is not of the form matrix@row@column")
        found.setdefault(place["matrix"], []).append((int(place["row"]), int(place["column"])))
    return found


class EntryFlip(Perturbation):
    """Flip the sign of named entries, or set them to zero. Nothing is drawn: the seed is not used.

    Attributes:
        entries: Matrix name to ``(row, column)`` of each entry; in a recipe string ``name@row@column;…``.
        to: ``negative`` flips the sign, exactly; ``zero`` removes the weight.
    """

    kind: Literal["entry_flip"] = "entry_flip"
    entries: Annotated[Mapping[str, tuple[tuple[int, int], ...]], BeforeValidator(_read_entries)]
    to: Literal["negative", "zero"] = "negative"

    @model_validator(mode="after")
    def _some_and_distinct(self) -> EntryFlip:
        if not any(self.entries.values()):
            raise ValueError("no entry is named")
        for name, places in self.entries.items():
            if len(set(places)) < len(places):
                raise ValueError(f"an entry of {name} is named twice")
        return self

    def targets(self, anatomy: Anatomy) -> list[WeightMatrix]:
        """Return the matrices that hold the entries, in execution order.

        Args:
            anatomy: The model's anatomy.

        Returns:
            The matrices, less those that ``include`` or ``exclude`` leave out.
        """
        named = {id(anatomy.matrix(name)) for name in self.entries}  # refuses a name the model does not have
        chosen = self.model_copy(update={"include": self.include or tuple(self.entries)})
        return [m for m in Perturbation.targets(chosen, anatomy) if id(m) in named]

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Change the entries matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per matrix.

        Raises:
            ProbeError: If the model has no such matrix or entry.
        """
        for matrix in self.targets(anatomy):
            yield self._changed(matrix, self._flat(matrix))

    def _flat(self, matrix: WeightMatrix) -> torch.Tensor:
        places = [p for name in (matrix.name, *matrix.aliases) for p in self.entries.get(name, ())]
        for row, column in places:
            if not (0 <= row < matrix.out_features and 0 <= column < matrix.in_features):
                raise ProbeError(
                    f"entry ({row}, {column}) does not exist in {matrix.name}, which is "
                    f"{matrix.out_features} x {matrix.in_features}"
                )
        return torch.tensor([row * matrix.in_features + column for row, column in places], dtype=torch.int64)

    def _changed(self, matrix: WeightMatrix, entries: torch.Tensor) -> Edit:
        values = matrix.read(entries)
        exact = values.double()
        zeros, step = int((exact == 0).sum()), 2.0 if self.to == "negative" else 1.0
        if self.to == "negative":
            matrix.flip_signs(entries)
        else:
            matrix.write(entries, torch.zeros_like(values))

        def undo() -> None:
            matrix.write(entries, values)

        return Edit(undo, entries.numel(), zeros, step**2 * float(exact.square().sum()))

    def __str__(self) -> str:
        """Return the recipe string."""
        places = ";".join(f"{name}@{row}@{column}" for name, where in self.entries.items() for row, column in where)
        options: dict[str, Any] = {"entries": places}
        if self.to != "negative":
            options["to"] = self.to
        return compact(self, options)
