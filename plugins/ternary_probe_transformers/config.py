"""The ``quantization_config`` of a packed checkpoint."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ternary_probe import schemes
from ternary_probe.packing import CODES_PER_BYTE, TRITS_PER_BYTE
from ternary_probe.pretrained import PACKED_METHOD
from ternary_probe.saving.packed import FORMAT_VERSION


@register_quantization_config(PACKED_METHOD)
class TernaryProbeConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which modules of a checkpoint are packed, and how.

    Attributes:
        scheme: The ternary scheme of all of them.
        modules: Qualified names of the `nn.Linear` modules whose weight is packed.
        codes_per_byte: 4 or 5.
        format_version: Version of the layout.
    """

    def __init__(
        self,
        scheme: str,
        modules: list[str],
        codes_per_byte: int = CODES_PER_BYTE,
        format_version: int = FORMAT_VERSION,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        if kwargs or format_version != FORMAT_VERSION or codes_per_byte not in {CODES_PER_BYTE, TRITS_PER_BYTE}:
            unknown = ", ".join(sorted(kwargs)) or f"version {format_version}, {codes_per_byte} codes a byte"
            raise ValueError(f"the packed checkpoint needs a newer ternary_probe: it is written with {unknown}")
        self.quant_method = PACKED_METHOD
        self.scheme = schemes.parse(scheme).describe()
        self.modules = list(modules)
        self.codes_per_byte = codes_per_byte
        self.format_version = format_version
