"""The quantizer transformers calls while it loads a packed checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ternary_probe import schemes
from ternary_probe.errors import ProbeError
from ternary_probe.pretrained import PACKED_METHOD
from ternary_probe.saving.packed import Layout, check
from ternary_probe_transformers.linear import TernaryLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ternary_probe_transformers.config import TernaryProbeConfig


@register_quantizer(PACKED_METHOD)
class TernaryProbeQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replace the packed modules before the weights are read, and check every byte after."""

    requires_calibration = True  # it reads packed checkpoints and makes none: `ternary-probe quantize --save` does
    quantization_config: TernaryProbeConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        scheme = schemes.parse(self.quantization_config.scheme)
        for stored in self.quantization_config.modules:
            name = _name_in(model, stored)
            if name is None:
                continue
            module = model.get_submodule(name)
            if type(module) is not nn.Linear:
                raise ValueError(f"the packed checkpoint names {stored}, which is a {type(module).__name__} here")
            layout = Layout(scheme, module.out_features, module.in_features, self.quantization_config.codes_per_byte)
            with torch.device("meta"):
                packed = TernaryLinear(layout, bias=module.bias is not None, dtype=module.weight.dtype)
            model.set_submodule(name, packed)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        dispatched = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        for name, module in _packed_modules(model):
            absent = [
                key
                for key, parameter in module.named_parameters()
                if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False)
            ]
            if absent and not dispatched:  # dispatching makes new parameters, without the loader's mark
                raise ValueError(f"the packed checkpoint does not hold a fitting {name}.{absent[0]}")
            if not any(parameter.is_meta for parameter in module.parameters()):
                try:
                    check(module.packed, module.layout)
                except ProbeError as error:
                    raise ValueError(f"{name}: {error}") from error
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        # Each weight keeps the dtype it was loaded in, which for some modules is not the model's.
        del dtype
        for name, module in list(_packed_modules(model)):
            if module.weight.is_meta:
                raise ValueError(f"{name} is offloaded and cannot be unpacked: load the model wholly into memory")
            with torch.device("meta"):
                dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            dense.weight = nn.Parameter(module.dense_weight(), requires_grad=False)
            dense.register_parameter("bias", module.bias)
            model.set_submodule(name, dense.train(module.training))
        for module in model.modules():
            if "_is_quantized" in vars(getattr(module, "config", None) or object):
                delattr(module.config, "_is_quantized")
        return model

    def is_serializable(self) -> bool:
        """Return whether ``save_pretrained`` writes the packed tensors: it does."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the packed weights can be trained: they cannot."""
        return False


def _packed_modules(model: nn.Module) -> list[tuple[str, TernaryLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TernaryLinear)]


def _name_in(model: PreTrainedModel, stored: str) -> str | None:
    """Return a module's name in this model class, or None for a head that a headless class lacks."""
    prefix = f"{model.base_model_prefix}."
    headless = not hasattr(model, model.base_model_prefix)
    for name in (stored, stored.removeprefix(prefix), f"{prefix}{stored}"):
        try:
            model.get_submodule(name)
        except AttributeError:
            continue
        return name
    if headless and not stored.startswith(prefix):
        return None
    raise ValueError(f"the packed checkpoint names {stored}, which a {type(model).__name__} does not have")
