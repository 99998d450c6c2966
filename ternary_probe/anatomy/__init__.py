"""A model's anatomy, found by running it: blocks, weight matrices, norms, residual stream, head.

No architecture is known by name.
"""

from __future__ import annotations

from ternary_probe.anatomy._accounting import Accounted
from ternary_probe.anatomy._anatomy import Anatomy, AnatomyError, examine
from ternary_probe.anatomy._blocks import Block
from ternary_probe.anatomy._checks import SelfCheck
from ternary_probe.anatomy._collect import Unhandled
from ternary_probe.anatomy._finite import NonFiniteError, explain_non_finite
from ternary_probe.anatomy._head import ChunkedHead, HeadError, stored_as_integers
from ternary_probe.anatomy._matrix import StorageError, WeightMatrix
from ternary_probe.anatomy._norms import NormError, NormSite
from ternary_probe.anatomy._skips import ResidualStream
from ternary_probe.anatomy._suffix import Recording, first_affected, record_blocks
from ternary_probe.anatomy._taps import InputError, negate_each, negate_inputs, scale_inputs, tap_inputs

__all__ = [
    "Accounted",
    "Anatomy",
    "AnatomyError",
    "Block",
    "ChunkedHead",
    "HeadError",
    "InputError",
    "NonFiniteError",
    "NormError",
    "NormSite",
    "Recording",
    "ResidualStream",
    "SelfCheck",
    "StorageError",
    "Unhandled",
    "WeightMatrix",
    "examine",
    "explain_non_finite",
    "first_affected",
    "negate_each",
    "negate_inputs",
    "record_blocks",
    "scale_inputs",
    "stored_as_integers",
    "tap_inputs",
]
