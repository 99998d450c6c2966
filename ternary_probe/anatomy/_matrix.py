"""`WeightMatrix`: one 2-D linear map with an explicit orientation, and the only code that touches its storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ternary_probe.errors import ProbeError

# The sign bit of each floating dtype, as a number of the integer dtype of the same width.
_SIGN_BITS: dict[int, tuple[torch.dtype, int]] = {
    1: (torch.int8, -(2**7)),
    2: (torch.int16, -(2**15)),
    4: (torch.int32, -(2**31)),
    8: (torch.int64, -(2**63)),
}


class StorageError(ProbeError):
    """A matrix has no storage that could be edited: meta, quantized, sharded, or changed in shape since it was examined."""


class Axes(NamedTuple):
    """Which axes of a parameter a matrix spans.

    Attributes:
        output: Axis of the outputs.
        input: Axis that is contracted with the activation.
        group: Axis along which the parameter holds several matrices, or None.
        member: This matrix's position on that axis.
    """

    output: int
    input: int
    group: int | None = None
    member: int = 0


class CallInput(NamedTuple):
    """The module whose input is what the matrix is contracted with, and where it stands among the arguments."""

    module_name: str
    key: int | str


@dataclass(frozen=True, slots=True, eq=False)
class WeightMatrix:
    """One linear map ``y = x W^T`` of a live model, seen as ``[out_features, in_features]`` whatever its storage looks like.

    Attributes:
        name: Qualified parameter name; for one of several matrices of a parameter with its position:
            ``...gate_up_proj[3]``.
        parameter_name: The parameter it lies in.
        aliases: Other names of the same storage (tied weights).
        role: Last meaningful part of the name (``q_proj``).
        block: Index of the block it is first used in, or None.
        shape: ``(out_features, in_features)``.
        axes: The parameter's axes it spans.
        input_of: The module whose input tensor is contracted with it, where that module's call is its only use; else
            None.
        also_lookup: The same storage is also read as a table of embeddings.
        rows_seen: Activation rows it met in the recorded forward; 0 for an expert no token was routed to.
        shared_calls: Number of module calls it was used in.
    """

    model: nn.Module = field(repr=False)
    name: str
    parameter_name: str
    aliases: tuple[str, ...]
    role: str
    block: int | None
    shape: tuple[int, int]
    axes: Axes
    input_of: CallInput | None
    also_lookup: bool
    rows_seen: int
    shared_calls: int = 1

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.shape[1]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    @property
    def module_name(self) -> str | None:
        """Module whose input is contracted with this matrix, or None where only the product itself can be watched."""
        return None if self.input_of is None else self.input_of.module_name

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype of the live parameter."""
        return self._parameter().dtype

    @property
    def device(self) -> torch.device:
        """Device of the live parameter."""
        return self._parameter().device

    def view(self) -> Tensor:
        """Return the matrix as a view onto the live storage.

        Returns:
            ``[out_features, in_features]``, strided, no copy, detached from autograd; writing to it edits the model.

        Raises:
            StorageError: If there is no floating-point storage of the examined shape to look at.
        """
        tensor = self._parameter().detach()
        why = _unusable(tensor)
        if why is not None:
            raise StorageError(f"{self.name} {why}")
        return self.view_of(tensor)

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return what of another tensor of the parameter's shape, its gradient for one, belongs to this matrix.

        Args:
            tensor: Of the parameter's shape.

        Returns:
            ``[out_features, in_features]``, a view.

        Raises:
            StorageError: If the shape is not the examined one.
        """
        if self.axes.group is not None and tensor.dim() == 3:
            tensor = tensor.movedim(self.axes.group, 0)[self.axes.member]
        if tensor.dim() == 2 and self.axes.output > self.axes.input:
            tensor = tensor.t()
        if tuple(tensor.shape) != self.shape:
            raise StorageError(
                f"{self.name} now has shape {tuple(tensor.shape)} where {self.shape} was examined: "
                "it was replaced or repacked, examine the model again"
            )
        return tensor

    @torch.no_grad()
    def flip_signs(self, entries: Tensor) -> None:
        """Flip the sign of some entries by XOR of the sign bit: exact in every dtype, zeros included, and its own inverse.

        Args:
            entries: Distinct flat positions in the row-major ``[out_features, in_features]`` matrix, int64 ``[k]``.
                A position given twice would be flipped once only.
        """
        bits, positions, sign = self._sign_bits(entries)
        bits.index_copy_(0, positions, bits.index_select(0, positions).bitwise_xor_(sign))

    def read(self, entries: Tensor) -> Tensor:
        """Return the entries at flat row-major positions, ``[k]``, as a copy."""
        flat, positions = self._flat(self.view(), entries)
        return flat.index_select(0, positions)

    @torch.no_grad()
    def write(self, entries: Tensor, values: Tensor) -> None:
        """Set the entries at flat row-major positions to values of the storage dtype, both ``[k]``."""
        flat, positions = self._flat(self.view(), entries)
        flat.index_copy_(0, positions, values.to(flat))

    def read_columns(self, columns: Tensor) -> Tensor:
        """Return a copy of some input columns, ``[out_features, k]``."""
        view = self.view()
        return view.index_select(1, columns.to(view.device))

    @torch.no_grad()
    def write_columns(self, columns: Tensor, values: Tensor) -> None:
        """Set some input columns, int64 ``[k]``, to values ``[out_features, k]``."""
        view = self.view()
        view.index_copy_(1, columns.to(view.device), values.to(view))

    def _parameter(self) -> Tensor:
        try:
            return self.model.get_parameter(self.parameter_name)
        except AttributeError as error:
            raise StorageError(
                f"{self.parameter_name} is no longer a parameter of the model: it was replaced, examine the model again"
            ) from error

    def _flat(self, view: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return a 1-D view of the stretch of storage the matrix spans, and the entries' positions in it."""
        entries = entries.to(view.device)
        rows, columns = view.stride()
        span = 1 + (self.shape[0] - 1) * rows + (self.shape[1] - 1) * columns
        flat = view.as_strided((span,), (1,), view.storage_offset())
        if (rows, columns) == (self.shape[1], 1):
            return flat, entries
        row = torch.div(entries, self.shape[1], rounding_mode="floor")
        return flat, row * (rows - self.shape[1] * columns) + entries * columns

    def _sign_bits(self, entries: Tensor) -> tuple[Tensor, Tensor, int]:
        view = self.view()
        dtype, sign = _SIGN_BITS[view.element_size()]
        flat, positions = self._flat(view, entries)
        return flat.view(dtype), positions, sign


def _unusable(tensor: Tensor) -> str | None:
    if type(tensor) not in {Tensor, nn.Parameter}:
        return f"is a {type(tensor).__name__}, not a plain tensor: gather or dequantize the model first"
    if tensor.device.type == "meta":
        return (
            "is offloaded or was never loaded (meta device), so an edit would do nothing: "
            "load the model wholly into memory"
        )
    if not tensor.is_floating_point():
        return f"is stored as {str(tensor.dtype).removeprefix('torch.')}: dequantize the model first"
    return None


def role_of(parameter_name: str) -> str:
    """Return the last meaningful part of a parameter's name: ``model.layers.0.mlp.down_proj.weight`` gives ``down_proj``."""
    parts = parameter_name.split(".")
    if len(parts) > 1 and parts[-1] == "weight":
        parts = parts[:-1]
    last = parts[-1]
    return f"{parts[-2]}.{last}" if last.isdigit() and len(parts) > 1 else last
