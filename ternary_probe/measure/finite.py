"""Name the first non-finite value instead of returning a NaN perplexity after an hour."""

from __future__ import annotations

import torch

from ternary_probe.anatomy import NonFiniteError


def require_finite_activation(name: str, total: torch.Tensor) -> None:
    """Refuse input moments that are not finite.

    Args:
        name: The matrix whose input it is.
        total: Accumulated second moments, shape ``[in_features]``.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    bad = torch.nonzero(~torch.isfinite(total))
    if bad.numel():
        raise NonFiniteError(
            f"the input of {name} is not finite at feature {int(bad[0])}: load the model with --dtype float32, "
            "or check its weights for NaN"
        )
