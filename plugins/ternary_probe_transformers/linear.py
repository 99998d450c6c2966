"""A linear layer whose weight is held as packed ternary codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ternary_probe.saving.packed import Layout, Packed, unpack


class TernaryLinear(nn.Module):
    """``y = x W^T + b`` with ``W`` unpacked at every call, on the device and in the dtype of the scale.

    The result is that of an `nn.Linear` holding the dense weight. ``model.to(dtype)`` casts the scale, and with it the
    weight; the codes stay.

    Attributes:
        weight: Codes, uint8 (`Layout.weight_shape`).
        weight_scale: Scales (`Layout.scale_shape`).
        bias: ``[out_features]`` or None.
    """

    bias: nn.Parameter | None

    def __init__(self, layout: Layout, *, bias: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.in_features, self.out_features = layout.in_features, layout.out_features
        self.weight = nn.Parameter(torch.zeros(layout.weight_shape, dtype=torch.uint8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(layout.scale_shape, dtype=dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(layout.out_features, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @property
    def packed(self) -> Packed:
        """The packed weight."""
        return Packed(self.weight, self.weight_scale)

    def dense_weight(self) -> Tensor:
        """Return the weight, ``[out_features, in_features]``, in the scale's dtype."""
        return unpack(self.packed, self.layout)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Apply the layer.

        Args:
            input: ``[..., in_features]``.

        Returns:
            ``[..., out_features]``.
        """
        return functional.linear(input, self.dense_weight(), self.bias)

    def extra_repr(self) -> str:
        """Return sizes and scheme."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.layout.scheme}"
        )
