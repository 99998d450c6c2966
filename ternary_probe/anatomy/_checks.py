"""Self-checks: every capability against the plain way of computing the same, once per model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._suffix import first_affected, record_blocks
from ternary_probe.anatomy._taps import negate_inputs
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.anatomy._anatomy import Anatomy

_COLUMNS = 8  # flipped for the check: one alone may see only zeros, after a ReLU


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """A capability and whether it reproduced the plain way of computing.

    Attributes:
        name: The capability.
        passed: None if it could not be checked on this model.
        difference: Largest absolute difference of logits (entries for `undo`), or None.
        note: One sentence, where there is something to say.
    """

    name: str
    passed: bool | None
    difference: float | None
    note: str = ""


def run_checks(
    anatomy: Anatomy, input_ids: Tensor, logits: Tensor, forward: Callable[[Tensor], Tensor], tolerance: float
) -> dict[str, SelfCheck]:
    """Run every self-check.

    Args:
        anatomy: The anatomy, complete but for its checks.
        input_ids: The probe's tokens, ``[batch, tokens]``.
        logits: The clean logits on them, float.
        forward: Returns the model's logits on given tokens, float.
        tolerance: Relative difference that counts as rounding.

    Returns:
        The checks by name.
    """
    bound = tolerance * float(logits.abs().max())
    checks = [
        _repeatable(logits, forward(input_ids)),
        _chunked_head(anatomy, input_ids, logits, bound),
        *_negation_and_undo(anatomy, input_ids, logits, forward, bound),
        _causal(input_ids, logits, forward, bound),
        _suffix(anatomy, input_ids),
    ]
    return {check.name: check for check in checks}


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _repeatable(first: Tensor, again: Tensor) -> SelfCheck:
    difference = _difference(first, again)
    return SelfCheck(
        "repeatable", difference == 0, difference, "" if difference == 0 else "two forwards of the same tokens differ"
    )


def _chunked_head(anatomy: Anatomy, input_ids: Tensor, logits: Tensor, bound: float) -> SelfCheck:
    if anatomy.backbone is None:
        return SelfCheck("chunked_head", None, None, "the head cannot be told from the backbone")
    rows = anatomy.head.states(input_ids).flatten(0, 1)
    # Rolled, so that no chunk is one whole sequence: a head that mixes tokens must show.
    shift = rows.shape[0] // 4
    chunked = torch.cat([anatomy.head.logits(part).float() for part in torch.split(rows.roll(shift, 0), 16)]).roll(
        -shift, 0
    )
    if chunked.shape != logits.flatten(0, 1).shape:
        return SelfCheck(
            "chunked_head",
            False,
            None,
            f"the head returns {list(chunked.shape)} where the model returns {list(logits.shape)}",
        )
    difference = _difference(chunked, logits.flatten(0, 1))
    return SelfCheck("chunked_head", difference <= bound, difference)


def _negation_and_undo(
    anatomy: Anatomy, input_ids: Tensor, logits: Tensor, forward: Callable[[Tensor], Tensor], bound: float
) -> list[SelfCheck]:
    """Return both checks, on a matrix watched at its module and one watched at the product: negation against flip."""
    usable = [matrix for matrix in anatomy.matrices if not matrix.also_lookup and matrix.rows_seen]
    late = list(reversed(usable))
    chosen = [next((m for m in late if (m.module_name is None) is at_product), None) for at_product in (False, True)]
    matrices = [matrix for matrix in chosen if matrix is not None]
    if not matrices:
        why = "no matrix that is not also an embedding table"
        return [SelfCheck("negation", None, None, why), SelfCheck("undo", None, None, why)]
    columns = {m.name: m.view().abs().sum(0).topk(min(_COLUMNS, m.in_features)).indices for m in matrices}
    before = [_bits(matrix).clone() for matrix in matrices]
    entries = {m.name: _column_entries(m, columns[m.name]) for m in matrices}
    _flip(matrices, entries)
    try:
        flipped = forward(input_ids)
        changed = [not torch.equal(_bits(matrix), old) for matrix, old in zip(matrices, before, strict=True)]
    finally:
        _flip(matrices, entries)
    wrong = sum(int((_bits(matrix) != old).sum()) for matrix, old in zip(matrices, before, strict=True))
    with negate_inputs(anatomy, columns):
        negated = forward(input_ids)
    effect, difference = _difference(flipped, logits), _difference(flipped, negated)
    names = " and ".join(columns)
    negation = SelfCheck(
        "negation",
        None if effect == 0 else difference <= min(bound, 0.01 * effect),
        difference,
        f"flipping columns of {names} does not move the logits at this length" if effect == 0 else f"on {names}",
    )
    note = f"on {names}" if all(changed) else f"a flip of {names} changed nothing"
    return [negation, SelfCheck("undo", wrong == 0 and all(changed), float(wrong), note)]


def _suffix(anatomy: Anatomy, input_ids: Tensor) -> SelfCheck:
    """Compare a re-run of the later blocks with a full run, under a flip in a middle block and on the clean model."""
    if anatomy.backbone is None:
        return SelfCheck("suffix", None, None, "the head cannot be told from the backbone")
    middle = len(anatomy.blocks) // 2
    usable = [m for m in anatomy.block_matrices if not m.also_lookup and m.rows_seen]
    late = [m for m in usable if m.block is not None and m.block >= middle]
    if not late:
        return SelfCheck("suffix", None, None, "no matrix lies in the later blocks alone")
    matrix = late[0]
    start = first_affected(anatomy, [matrix])
    columns = matrix.view().abs().sum(0).topk(min(_COLUMNS, matrix.in_features)).indices
    entries = {matrix.name: _column_entries(matrix, columns)}
    try:
        recording = record_blocks(anatomy, input_ids)
        clean = _difference(recording.resume(start), recording.states)
        _flip([matrix], entries)
        try:
            full, again = anatomy.head.states(input_ids), recording.resume(start)
        finally:
            _flip([matrix], entries)
    except (ProbeError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return SelfCheck("suffix", False, None, f"its blocks cannot be answered from a recording: {why}")
    difference, effect = max(clean, _difference(full, again)), _difference(full, recording.states)
    if effect == 0:
        return SelfCheck("suffix", None, difference, f"flipping columns of {matrix.name} does not move the states")
    return SelfCheck("suffix", difference == 0, difference, f"from block {start} on, {matrix.name} flipped")


def _column_entries(matrix: WeightMatrix, columns: Tensor) -> Tensor:
    rows = torch.arange(matrix.out_features, device=columns.device)
    return (rows[:, None] * matrix.in_features + columns).flatten()


def _flip(matrices: list[WeightMatrix], entries: dict[str, Tensor]) -> None:
    for matrix in matrices:
        matrix.flip_signs(entries[matrix.name])


def _bits(matrix: WeightMatrix) -> Tensor:
    view = matrix.view()
    return view.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()])


def _causal(input_ids: Tensor, logits: Tensor, forward: Callable[[Tensor], Tensor], bound: float) -> SelfCheck:
    changed = input_ids.clone()
    changed[:, -1] = input_ids[:, 0]
    if torch.equal(changed, input_ids):
        return SelfCheck("causal", None, None, "the probe's first and last token are the same")
    difference = _difference(forward(changed)[:, :-1], logits[:, :-1])
    return SelfCheck(
        "causal", difference <= bound, difference, "" if difference <= bound else "a later token changes earlier logits"
    )
