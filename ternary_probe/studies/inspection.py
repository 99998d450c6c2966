"""The anatomy of a model as a record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ternary_probe import anatomy as anatomies
from ternary_probe.measure.grid import grid_note
from ternary_probe.records import CheckInfo, Environment, InspectRecord, MatrixInfo, NormInfo, Timing
from ternary_probe.studies.leverage import model_info
from ternary_probe.studies.summary import finite

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel


def run_inspection(loaded: LoadedModel) -> InspectRecord:
    """Examine a model.

    Args:
        loaded: The model.

    Returns:
        Blocks, matrices, norms, what is not handled and why, and every capability's self-check.
    """
    started = time.perf_counter()
    anatomy = anatomies.examine(loaded.model)
    stream = anatomy.residual_stream
    skip = stream.kind if stream.identity_skips else f"{stream.kind}: {stream.first_exception}"
    return InspectRecord(
        model=model_info(loaded, None),
        protocol=None,
        environment=Environment.here(torch.get_num_threads()),
        timing=Timing(seconds=time.perf_counter() - started, evaluations=0),
        status="ok",
        notes=(*loaded.source.notes, *grid_note(anatomy)),
        blocks=tuple(block.name for block in anatomy.blocks),
        skip=skip,
        backbone=anatomy.backbone_name,
        head=anatomy.head_name,
        final_norm=anatomy.final_norm.name if anatomy.final_norm is not None else None,
        matrices=tuple(
            MatrixInfo(
                matrix=m.name,
                role=m.role,
                block=m.block,
                out_features=m.out_features,
                in_features=m.in_features,
                dtype=str(m.dtype).removeprefix("torch."),
                aliases=m.aliases,
            )
            for m in anatomy.matrices
        ),
        norms=tuple(
            NormInfo(
                norm=n.name,
                kind=n.kind,
                position=n.position,
                block=n.block,
                readers=len(n.readers),
                plantable=bool(n.readers) and n.readers_complete,
            )
            for n in anatomy.norms
        ),
        unhandled={item.name: item.reason for item in anatomy.unhandled},
        accounted=anatomy.accounted.fraction,
        checks=tuple(
            CheckInfo(
                check=c.name,
                passed=c.passed,
                difference=None if c.difference is None else finite(c.difference),
                note=c.note,
            )
            for c in anatomy.checks.values()
        ),
    )
