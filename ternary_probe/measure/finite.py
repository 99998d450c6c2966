"""Name the first non-finite value instead of returning a NaN perplexity after an hour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy


class NonFiniteError(ProbeError):
    """The model computed NaN or infinity."""


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


def explain_non_finite(anatomy: Anatomy, inputs: torch.Tensor) -> NonFiniteError:
    """Run one window again and find the first module whose output is not finite.

    Args:
        anatomy: The model's anatomy.
        inputs: Token ids ``[1, L]`` that gave a non-finite NLL.

    Returns:
        An error naming module, token position and value.
    """
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if found or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                return
            bad = torch.nonzero(~torch.isfinite(tensor))
            if bad.numel():
                where = bad[0].tolist()
                token = where[1] if len(where) > 2 else where[0]
                found.append(f"{name} at token {token} (value {float(tensor[tuple(where)])})")

        return hook

    handles = [m.register_forward_hook(watch(n or "the model")) for n, m in anatomy.model.named_modules()]
    try:
        with torch.no_grad():
            anatomy.model(input_ids=inputs)
    finally:
        for handle in handles:
            handle.remove()
    where = found[0] if found else "the log-softmax of the logits"
    return NonFiniteError(
        f"the model's NLL is not finite; first non-finite output: {where}; try --dtype float32 or check the weights"
    )
