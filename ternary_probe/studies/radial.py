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
_TOKENS = 128


class Radial(NamedTuple):
    """A radial fraction, or why there is none."""

    value: float | None
    note: str


class Writer(NamedTuple):
    """A matrix that writes to the residual stream: its clean input, and the clean input of the next norm."""

    x: torch.Tensor
    y: torch.Tensor
    site: NormSite


def find_writers(anatomy: Anatomy, windows: Windows, matrices: Sequence[WeightMatrix]) -> dict[str, Writer | str]:
    """Find the matrices that write to the residual stream.

    A matrix does when a change of it arrives at the next norm that reads the stream as exactly ``dW x``. That is tested by
    making such a change, matrix by matrix; names play no part.

    Args:
        anatomy: The model's anatomy.
        windows: A short text, of which at most 128 tokens are used.
        matrices: The matrices.

    Returns:
        Matrix name to what was seen, or to the reason there is nothing to see.
    """
    width = anatomy.final_norm.gain.numel() if anatomy.final_norm is not None else 0
    candidates = [m for m in matrices if m.out_features == width and m.module_name is not None]
    found: dict[str, Writer | str] = {m.name: "does not write to the residual stream" for m in matrices}
    if not candidates:
        return found
    inputs = windows.inputs[:1, :_TOKENS].to(anatomy.input_device)
    seen = _record(anatomy, inputs, candidates, width)
    for matrix in candidates:
        writer = seen.get(matrix.name)
        if writer is None:
            found[matrix.name] = "no norm of the stream follows it"
        elif _writes(anatomy, inputs, matrix, writer):
            found[matrix.name] = writer
    return found


def radial_fraction(writer: Writer | str, matrix: WeightMatrix, quantized: TernaryWeight) -> Radial:
    """Return ``Σ⟨ŷ,Δy⟩² / Σ‖Δy‖²`` with ``y`` the input of the next norm and ``Δy = (q - w) x`` (THEORY 1.1).

    Args:
        writer: From `find_writers`.
        matrix: The matrix, as it was then.
        quantized: Its quantized form.

    Returns:
        The radial fraction, or the reason there is none.
    """
    if isinstance(writer, str):
        return Radial(None, writer)
    difference = quantized.dequantize(torch.float32).double() - matrix.view().double()
    change, y = writer.x.double() @ difference.T, writer.y.double()
    total = change.square().sum()
    along = ((y * change).sum(-1).square() / y.square().sum(-1).clamp(min=1e-300)).sum()
    return Radial(float(along / total), writer.site.name) if total > 0 else Radial(None, "no error at all")


def _record(anatomy: Anatomy, inputs: torch.Tensor, writers: Sequence[WeightMatrix], width: int) -> dict[str, Writer]:
    """Run once; return each matrix's input with the stream norm called first after it, and that norm's input."""
    pending: dict[str, torch.Tensor] = {}
    found: dict[str, Writer] = {}

    def keep(matrix: WeightMatrix, x: torch.Tensor) -> None:
        pending[matrix.name] = x.clone()

    def claim(site: NormSite) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, args: Any) -> None:
            y = args[0].detach().reshape(-1, width).clone()
            for name in list(pending):
                found.setdefault(name, Writer(pending.pop(name), y, site))

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


def norm_input(anatomy: Anatomy, inputs: torch.Tensor, site: NormSite) -> torch.Tensor:
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


def _writes(anatomy: Anatomy, inputs: torch.Tensor, matrix: WeightMatrix, writer: Writer) -> bool:
    """Flip one eighth of the matrix's columns: does exactly ``dW x`` arrive at the norm?"""
    columns = torch.arange(0, matrix.in_features, 8)
    saved = matrix.read_columns(columns).clone()
    try:
        matrix.write_columns(columns, -saved)
        arrived = norm_input(anatomy, inputs, writer.site).double() - writer.y.double()
    finally:
        matrix.write_columns(columns, saved)
    expected = writer.x[:, columns.to(writer.x.device)].double() @ (-2 * saved.double()).T
    size = expected.norm()
    return bool(size > 0 and (arrived - expected).norm() <= _LINEARITY * size)
