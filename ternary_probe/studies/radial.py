"""Radial fraction of each matrix's own quantization error, at the next norm of the stream it writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ternary_probe.anatomy import tap_inputs

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, NormSite, WeightMatrix
    from ternary_probe.ternary import TernaryWeight
    from ternary_probe.text import Windows

_LINEARITY = 1e-2


class Radial(NamedTuple):
    """A radial fraction, or why there is none."""

    value: float | None
    note: str


def radial_fractions(
    anatomy: Anatomy,
    windows: Windows,
    matrices: Sequence[WeightMatrix],
    quantized: Callable[[WeightMatrix], TernaryWeight],
) -> dict[str, Radial]:
    """Return ``Σ⟨ŷ,Δy⟩² / Σ‖Δy‖²`` with ``y`` the input of the next norm and ``Δy = (q - w) x`` (THEORY 1.1).

    A matrix qualifies when it writes to the residual stream: a small change of it must arrive at the next norm that reads
    the stream as exactly ``ΔW x``. That is tested by making such a change, matrix by matrix; names play no part.

    Args:
        anatomy: The model's anatomy.
        windows: A short text; one window is enough.
        matrices: The matrices.
        quantized: Quantizes one of them.

    Returns:
        Matrix name to its radial fraction or the reason there is none.
    """
    width = anatomy.final_norm.gain.numel() if anatomy.final_norm is not None else 0
    writers = [m for m in matrices if m.out_features == width and m.module_name is not None]
    found = {m.name: Radial(None, "does not write to the residual stream") for m in matrices}
    if not writers or not width:
        return found
    inputs = windows.inputs[:1].to(anatomy.input_device)
    seen = _record(anatomy, inputs, writers, width)
    for matrix in writers:
        entry = seen.get(matrix.name)
        if entry is None:
            found[matrix.name] = Radial(None, "no norm of the stream follows it")
            continue
        x, site = entry
        y = seen_norm(anatomy, inputs, site)
        if not _writes(anatomy, inputs, matrix, x, y, site):
            continue
        with torch.no_grad():
            q = quantized(matrix).dequantize(torch.float32)
            change = x.double() @ (q.double() - matrix.view().double()).T
        y = y.double()
        total = change.square().sum()
        along = ((y * change).sum(-1).square() / y.square().sum(-1).clamp(min=1e-300)).sum()
        found[matrix.name] = Radial(float(along / total), site.name) if total > 0 else Radial(None, "no error at all")
    return found


def _record(
    anatomy: Anatomy, inputs: torch.Tensor, writers: Sequence[WeightMatrix], width: int
) -> dict[str, tuple[torch.Tensor, NormSite]]:
    """Run once; return each writer's input and the stream norm called first after it."""
    pending: dict[str, torch.Tensor] = {}
    found: dict[str, tuple[torch.Tensor, NormSite]] = {}

    def keep(matrix: WeightMatrix, x: torch.Tensor) -> None:
        pending[matrix.name] = x.clone()

    def claim(site: NormSite) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _args: Any) -> None:
            for name in list(pending):
                found.setdefault(name, (pending.pop(name), site))

        return hook

    sites = [s for s in anatomy.norms if s.gain.numel() == width and s.position in {"pre", "post", "final"}]
    handles = [site.module.register_forward_pre_hook(claim(site)) for site in sites]
    try:
        with torch.no_grad(), tap_inputs(anatomy, writers, keep):
            anatomy.head.states(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _ReachedError(Exception):
    """Stops a forward once the norm's input is known."""


def seen_norm(anatomy: Anatomy, inputs: torch.Tensor, site: NormSite) -> torch.Tensor:
    """Return what enters a norm, running the model no further.

    Args:
        anatomy: The model's anatomy.
        inputs: Token ids ``[1, L]``.
        site: The norm.

    Returns:
        ``[L, width]``.
    """
    caught: list[torch.Tensor] = []

    def hook(_module: torch.nn.Module, args: Any) -> None:
        caught.append(args[0].detach().reshape(-1, args[0].shape[-1]).clone())
        raise _ReachedError

    handle = site.module.register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            anatomy.model(input_ids=inputs)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return caught[0]


def _writes(
    anatomy: Anatomy, inputs: torch.Tensor, matrix: WeightMatrix, x: torch.Tensor, y: torch.Tensor, site: NormSite
) -> bool:
    """Flip one eighth of the matrix's columns: does exactly ``ΔW x`` arrive at the norm?"""
    columns = torch.arange(0, matrix.in_features, 8)
    saved = matrix.read_columns(columns).clone()
    try:
        matrix.write_columns(columns, -saved)
        arrived = seen_norm(anatomy, inputs, site).double() - y.double()
    finally:
        matrix.write_columns(columns, saved)
    expected = x[:, columns.to(x.device)].double() @ (-2 * saved.double()).T
    size = expected.norm()
    return bool(size > 0 and (arrived - expected).norm() <= _LINEARITY * size)
