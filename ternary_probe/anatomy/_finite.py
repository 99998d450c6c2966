"""Find the first module that computes NaN or infinity, so that an error can name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ternary_probe.errors import ProbeError


class NonFiniteError(ProbeError):
    """The model computed NaN or infinity."""


def explain_non_finite(model: nn.Module, run: Callable[[], object]) -> NonFiniteError:
    """Run the model again and find the first parameter or module output that is not finite.

    Args:
        model: The model.
        run: Runs the forward whose result was not finite.

    Returns:
        An error naming the weight, or the module with token position and value.
    """
    for name, parameter in model.named_parameters():
        where = _first_bad(parameter.detach())
        if where is not None:
            return NonFiniteError(
                f"weight {name} holds {float(parameter.detach()[where])} at {list(where)}: the checkpoint is damaged, or "
                "the value does not fit --dtype or the perturbation"
            )
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if found or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                return
            where = _first_bad(tensor)
            if where is not None:
                token = where[1] if len(where) > 2 else where[0]
                found.append(f"{name} at token {token} (value {float(tensor[where])})")

        return hook

    handles = [module.register_forward_hook(watch(name or "the model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    first = found[0] if found else "the log-softmax of the logits"
    return NonFiniteError(
        f"the model computes NaN or infinity; first non-finite output: {first}; all weights are finite, try --dtype float32"
    )


def _first_bad(tensor: Tensor) -> tuple[int, ...] | None:
    if not tensor.is_floating_point() or tensor.numel() == 0 or bool(torch.isfinite(tensor).all()):
        return None
    return tuple(int(i) for i in torch.nonzero(~torch.isfinite(tensor))[0])
