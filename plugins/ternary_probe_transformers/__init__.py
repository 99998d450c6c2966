"""Lets stock transformers open the packed checkpoints of ternary_probe: importing this package is all it takes.

    import ternary_probe_transformers
    model = AutoModelForCausalLM.from_pretrained("packed-folder")

Without the import, transformers refuses such a folder, because packed codes have another shape than the weights it expects.
"""

from __future__ import annotations

from ternary_probe_transformers.config import TernaryProbeConfig
from ternary_probe_transformers.linear import TernaryLinear
from ternary_probe_transformers.quantizer import TernaryProbeQuantizer

__all__ = ["TernaryLinear", "TernaryProbeConfig", "TernaryProbeQuantizer"]
