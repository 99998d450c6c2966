"""Make the model known to lm-eval. Importing this module is enough: a hook YAML can only import, never call."""

from __future__ import annotations

from typing import Any

from ternary_probe.errors import ProbeError

MODEL_NAME = "ternary_probe"
TARGET = "ternary_probe_lm_eval.model:TernaryProbeLM"  # the defining module: the registry refuses a re-export


def register(*_args: Any, **_kwargs: Any) -> None:
    """Register the model class, lazily and once; whatever a YAML hands over is ignored.

    Raises:
        ProbeError: If another package took the name.
    """
    import lm_eval.models  # noqa: F401  # first, or the built-in models would disappear from the registry
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=TARGET)
        return
    found = model_registry.get(MODEL_NAME)
    if f"{found.__module__}:{found.__name__}" != TARGET:
        raise ProbeError(
            f"lm-eval's model name {MODEL_NAME!r} is taken by {found.__module__}.{found.__name__}: uninstall one of the two"
        )


register()
