"""Radial and transverse energy of a perturbation, at the input of every norm of a real model (THEORY 1.1).

A norm that divides by the length of its input removes the part of a change that lies along that input (radial) and lets
the rest (transverse) through; so of two perturbations of equal norm, the one with more radial energy does less harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, NormSite
    from ternary_probe.text import Windows


class Energies(NamedTuple):
    """Energy of ``Δy`` over all tokens, relative to ``Σ‖y‖²``; ratios of sums, as the paper takes them."""

    total: float
    radial: float

    @property
    def transverse(self) -> float:
        """The part a norm lets through."""
        return self.total - self.radial

    @property
    def radial_fraction(self) -> float | None:
        """``Σ⟨ŷ,Δy⟩² / Σ‖Δy‖²``; ``None`` where nothing changed."""
        return self.radial / self.total if self.total > 0 else None


@dataclass
class StreamEnergy:
    """The inputs of the stream's norms under the clean model, to compare perturbed ones with.

    Holds ``norms x tokens x width`` values: use a short text.
    """

    anatomy: Anatomy
    windows: Windows
    sites: list[NormSite]
    clean: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, anatomy: Anatomy, windows: Windows) -> StreamEnergy:
        """Run the clean model and keep what enters each norm of the residual stream.

        Args:
            anatomy: The model's anatomy.
            windows: A short text.

        Returns:
            The reference. Norms inside a branch (position ``qk`` or ``sandwich``) are left out.
        """
        sites = [site for site in anatomy.norms if site.position in {"pre", "post", "final"}]
        energy = cls(anatomy, windows, sites)
        energy.clean = list(energy._run())
        return energy

    def measure(self) -> dict[str, Energies]:
        """Run the model as it is now.

        Returns:
            Norm name to the energies of the change at its input.
        """
        sums = {site.name: torch.zeros(3, dtype=torch.float64) for site in self.sites}
        for clean, now in zip(self.clean, self._run(), strict=True):
            for name, before in clean.items():
                y, change = before.double(), now[name].double() - before.double()
                length = y.square().sum(-1)
                along = (y * change).sum(-1).square() / length.clamp(min=torch.finfo(torch.float64).tiny)
                sums[name] += torch.stack([length.sum(), change.square().sum(), along.sum()]).cpu()
        found = {}
        for name, (length, total, radial) in ((n, s.tolist()) for n, s in sums.items()):
            if length > 0:
                found[name] = Energies(total / length, radial / length)
        return found

    @torch.no_grad()
    def _run(self) -> Iterator[dict[str, torch.Tensor]]:
        for inputs in self.windows.inputs:
            with _norm_inputs(self.sites) as seen:
                self.anatomy.head.states(inputs[None].to(self.anatomy.input_device))
            yield seen


@contextmanager
def _norm_inputs(sites: list[NormSite]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect each norm's first input tensor, ``[tokens, width]``."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args and name not in seen:
                seen[name] = args[0].detach().reshape(-1, args[0].shape[-1]).clone()

        return hook

    handles = [site.module.register_forward_pre_hook(keep(site.name)) for site in sites]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
