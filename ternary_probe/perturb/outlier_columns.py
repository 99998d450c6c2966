"""Plant outlier input columns of known strength, to test leverage and quantizers against a known answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from ternary_probe.errors import ProbeError
from ternary_probe.perturb.draw import compact
from ternary_probe.perturb.positions import sample, stream
from ternary_probe.perturb.recipe import Edit, Perturbation

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, NormSite, WeightMatrix


class OutlierColumns(Perturbation):
    """Make some input features of every norm ``k`` times as large.

    ``preserving`` scales the norm's gain (and bias) at those coordinates by ``k`` and divides the columns of *every* matrix
    that reads the norm by ``k``: the function stays the same (bit for bit in exact arithmetic; for ``k`` a power of two
    nothing is rounded), ``alpha_j^2`` grows as ``k^2`` and the columns shrink. This is the gauge freedom of THEORY 1.5.
    ``raw`` scales the gain only: another model, with a baseline of its own.

    Attributes:
        k: Factor, positive and not 1.
        number: Columns planted at each norm, drawn by seed; not used when ``columns`` lists them.
        columns: Coordinates to plant at, the same at each norm; empty to draw them.
        mode: ``preserving`` or ``raw``.
    """

    kind: Literal["outlier_columns"] = "outlier_columns"
    k: float = Field(gt=0)
    number: int = Field(8, ge=1)
    columns: tuple[int, ...] = ()
    mode: Literal["preserving", "raw"] = "preserving"

    @model_validator(mode="after")
    def _plants_something(self) -> Self:
        if self.k == 1:
            raise ValueError("k=1 plants nothing")
        if self.columns and min(self.columns) < 0:
            raise ValueError(f"column {min(self.columns)} is negative")
        return self

    def sites(self, anatomy: Anatomy) -> list[NormSite]:
        """Return the norms planted at: inside the blocks, all of whose readers are known and targeted.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Norm sites in execution order.

        Raises:
            ProbeError: If the model has no such norm.
        """
        targets = {m.name for m in self.targets(anatomy)}
        sites = [s for s in anatomy.norms if s.readers and s.readers_complete and set(s.readers) <= targets]
        if not sites:
            raise ProbeError(
                "no norm to plant outlier columns at: none has a gain whose every reader is a targeted matrix "
                "(`ternary-probe inspect` lists norms and readers)"
            )
        return sites

    def coordinates(self, site: NormSite) -> torch.Tensor:
        """Return the coordinates planted at one norm, sorted, int64.

        Args:
            site: The norm.

        Returns:
            Shape ``[number]``.

        Raises:
            ProbeError: If the norm has too few coordinates.
        """
        width = site.gain.numel()
        if self.columns:
            chosen = np.unique(np.asarray(self.columns, dtype=np.int64))
            if chosen[-1] >= width:
                raise ProbeError(f"column {chosen[-1]} does not exist at {site.name}, which has {width} coordinates")
            return torch.from_numpy(chosen)
        if self.number > width:
            raise ProbeError(f"number={self.number} columns asked of {site.name}, which has {width} coordinates")
        return torch.from_numpy(sample(stream(self.kind, self.seed, site.name, (1, width)), width, self.number))

    def planted(self, anatomy: Anatomy) -> dict[str, tuple[int, ...]]:
        """Return the planted columns of every matrix that reads a planted norm.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Matrix name to columns; usable as frozen outlier columns.
        """
        return {name: tuple(self.coordinates(site).tolist()) for site in self.sites(anatomy) for name in site.readers}

    def touched(self, anatomy: Anatomy) -> list[tuple[str, torch.Tensor]]:
        """Return the norms' parameters and, when function-preserving, the reading matrices.

        Args:
            anatomy: The model's anatomy.

        Returns:
            Live tensors by name.
        """
        matrices = {m.name: m for m in anatomy.matrices}
        tensors: dict[str, torch.Tensor] = {}
        for site in self.sites(anatomy):
            tensors.update(site.parameters())
            if self.mode == "preserving":
                tensors.update((name, matrices[name].view()) for name in site.readers)
        return list(tensors.items())

    def edits(self, anatomy: Anatomy) -> Iterator[Edit]:
        """Plant norm by norm, then matrix by matrix.

        Args:
            anatomy: The model's anatomy.

        Yields:
            One edit per norm, and one per reading matrix when function-preserving.
        """
        matrices = {m.name: m for m in anatomy.matrices}
        for site in self.sites(anatomy):
            coordinates = self.coordinates(site)
            yield self._gain(site, coordinates)
            if self.mode == "preserving":
                for name in site.readers:
                    yield self._column(matrices[name], coordinates)

    def _gain(self, site: NormSite, coordinates: torch.Tensor) -> Edit:
        saved = {name: parameter.detach().clone() for name, parameter in site.parameters().items()}

        def undo() -> None:
            with torch.no_grad():
                for name, parameter in site.parameters().items():
                    parameter.copy_(saved[name])

        try:
            site.scale_gain(coordinates, self.k)
            moved = torch.stack([
                (p.detach().double() - saved[n].double()).reshape(-1) for n, p in site.parameters().items()
            ])[:, coordinates.to(saved[next(iter(saved))].device)]
            zeros, energy = int((moved == 0).all(0).sum()), float(moved.square().sum())
        except BaseException:
            undo()
            raise
        return Edit(undo, entries=coordinates.numel(), zeros=zeros, delta_energy=energy)

    def _column(self, matrix: WeightMatrix, coordinates: torch.Tensor) -> Edit:
        saved = matrix.read_columns(coordinates).clone()
        new = (saved.double() / self.k).to(saved.dtype)
        moved = new.double() - saved.double()
        zeros, energy = int((moved == 0).sum()), float(moved.square().sum())
        matrix.write_columns(coordinates, new)
        return Edit(
            undo=lambda: matrix.write_columns(coordinates, saved),
            entries=saved.numel(),
            zeros=zeros,
            delta_energy=energy,
        )

    def __str__(self) -> str:
        """Return the recipe string."""
        where: dict[str, object] = {"columns": ";".join(map(str, self.columns))} if self.columns else {}
        if not self.columns or self.number != type(self).model_fields["number"].default:
            where["number"] = self.number
        return compact(self, {"k": _plain(self.k), **where, "mode": self.mode})


def _plain(value: float) -> str:
    """Return the shortest text that reads back as the value, whole numbers without a point."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
