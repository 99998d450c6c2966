"""A model as quantized by a recipe, written as a checkpoint that loads: dense for everyone, packed at 2 bits a weight."""

from __future__ import annotations

from ternary_probe.saving.folder import SavingError
from ternary_probe.saving.quantized import Format, save_quantized

__all__ = ["Format", "SavingError", "save_quantized"]
