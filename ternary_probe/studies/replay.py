"""From a record back to the recipe of one of its arms, to flip the same entries again, anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import Composed, Perturbation, parse
from ternary_probe.perturb.draw import RandomEntries, proportional_counts
from ternary_probe.perturb.recipe import anatomy_of

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy
    from ternary_probe.records import Arm, LeverageRecord


def recipe_of(record: LeverageRecord, arm: Arm, target: torch.nn.Module | Anatomy) -> Perturbation:
    """Return an arm's recipe, with the outlier columns the record froze: nothing is measured again.

    Args:
        record: A leverage record.
        arm: One of its arms.
        target: The model, or its anatomy.

    Returns:
        A resolved recipe; applied to the same weights it gives the arm's ``checksum_during``.

    Raises:
        ProbeError: If the record lacks the outlier columns of a matrix of this model.
    """
    anatomy = anatomy_of(target)
    recipe = parse(arm.recipe)
    parts = list(recipe.parts) if isinstance(recipe, Composed) else [recipe]
    flip = parts[-1]
    if not isinstance(flip, RandomEntries):
        raise ProbeError(f"the record's recipe {arm.recipe} draws no entries: it is not an arm of a leverage study")
    matrices = [m for m in flip.targets(anatomy) if m.name in record.outlier_columns]
    if len(matrices) != len(record.outlier_columns):
        missing = sorted(set(record.outlier_columns) - {m.name for m in matrices})
        raise ProbeError(f"this model has no matrix {missing[0]}, which the record perturbs: load the record's model")
    flip = flip.resolved_with(matrices, record.outlier_columns)
    if arm.matching == "count" and record.protocol is not None and record.protocol.name == "dong2026":
        counts = proportional_counts(flip, matrices, record.outlier_columns)
        flip = flip.model_copy(update={"counts": counts})
    return flip if len(parts) == 1 else Composed.model_validate({"parts": [*parts[:-1], flip]})
