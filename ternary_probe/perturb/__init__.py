"""Recipes that change weights, as data: parsed, described, applied and undone exactly."""

from __future__ import annotations

from ternary_probe.perturb._parse import KINDS, from_description, parse
from ternary_probe.perturb.column_flip import ColumnFlip
from ternary_probe.perturb.columns import Columns, top_columns
from ternary_probe.perturb.composed import Composed
from ternary_probe.perturb.entry_flip import EntryFlip
from ternary_probe.perturb.magnitude import Magnitude
from ternary_probe.perturb.outlier_columns import OutlierColumns
from ternary_probe.perturb.proof import NoEffectError, NotRestoredError, checksum, sha256_weights
from ternary_probe.perturb.recipe import Application, Perturbation
from ternary_probe.perturb.sign_flip import SignFlip
from ternary_probe.perturb.ternarize import Ternarize

__all__ = [
    "KINDS",
    "Application",
    "ColumnFlip",
    "Columns",
    "Composed",
    "EntryFlip",
    "Magnitude",
    "NoEffectError",
    "NotRestoredError",
    "OutlierColumns",
    "Perturbation",
    "SignFlip",
    "Ternarize",
    "checksum",
    "from_description",
    "parse",
    "sha256_weights",
    "top_columns",
]
