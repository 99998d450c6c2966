"""A real model's matrices as a stack of square layers, with the hidden states its first one really reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ternary_probe.anatomy import tap_inputs
from ternary_probe.errors import ProbeError
from ternary_probe.simulators import square_crops

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.text import Windows


class RealStack(NamedTuple):
    """What `ternary_probe.simulators.depth` needs to run on a real model."""

    role: str
    names: tuple[str, ...]
    """The matrices, by layer."""
    matrices: list[Tensor]
    """Leading squares ``[width, width]``, fp32."""
    hidden_states: Tensor
    """Inputs ``[inputs, width]`` of the first matrix, fp32."""


def real_stack(
    anatomy: Anatomy, windows: Windows, *, role: str | None = None, layers: int = 6, inputs: int = 256
) -> RealStack:
    """Take one matrix per block, of one role that reads the residual stream through a norm, cropped to a square.

    The stack is the paper's construction (arXiv 2605.18933, depth on trained gate_proj crops): it shows what real weights
    and real inputs change, not what the model itself does.

    Args:
        anatomy: The model's anatomy.
        windows: Text whose first window makes the hidden states.
        role: Role of the matrices; by default, of those that read the stream, the first one with the most outputs.
        layers: Number of matrices, one from each of the first blocks.
        inputs: Largest number of hidden states.

    Returns:
        Crops and inputs; the model is not changed.

    Raises:
        ProbeError: If no matrix reads the stream, the role is none of theirs, or the weights are not floating.
    """
    readers = _stream_readers(anatomy)
    roles = list(dict.fromkeys(matrix.role for matrix in readers))
    if not roles:
        raise ProbeError("no matrix of this model reads the residual stream through a norm: run theory without --model")
    if role is None:
        role = max(roles, key=lambda name: max(m.out_features for m in readers if m.role == name))
    elif role not in roles:
        raise ProbeError(f"--role {role}: no matrix of that role reads the stream; there are {', '.join(roles)}")
    by_block: dict[int, WeightMatrix] = {}
    for matrix in readers:
        if matrix.role == role and matrix.block is not None:
            by_block.setdefault(matrix.block, matrix)
    chosen = [by_block[block] for block in sorted(by_block)][:layers]
    for matrix in chosen:
        if not matrix.view().is_floating_point():
            raise ProbeError(f"{matrix.name} is stored as {matrix.dtype}: load the model with --dtype bfloat16")
    crops = [crop.detach().float() for crop in square_crops([matrix.view() for matrix in chosen])]
    states = _inputs_of(anatomy, chosen[0], windows)[:inputs, : crops[0].shape[1]].float()
    return RealStack(role, tuple(matrix.name for matrix in chosen), crops, states)


def _stream_readers(anatomy: Anatomy) -> list[WeightMatrix]:
    width = anatomy.final_norm.gain.numel() if anatomy.final_norm is not None else None
    names = {name for site in anatomy.norms if site.position != "qk" for name in site.readers}
    return [m for m in anatomy.block_matrices if m.name in names and m.in_features == width]


def _inputs_of(anatomy: Anatomy, matrix: WeightMatrix, windows: Windows) -> Tensor:
    seen: list[Tensor] = []
    with torch.no_grad(), tap_inputs(anatomy, [matrix], lambda _matrix, x: seen.append(x.detach().clone())):
        anatomy.head.states(windows.inputs[:1].to(anatomy.input_device))
    return torch.cat(seen)
