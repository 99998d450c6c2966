"""A model's anatomy in words: what a perturbation would touch, and what it would not."""

from __future__ import annotations

from collections import defaultdict

from ternary_probe.records import CheckInfo, InspectRecord, MatrixInfo
from ternary_probe.reports.rounding import NOT_MEASURED, count, figure
from ternary_probe.reports.sheet import (
    Column,
    Fact,
    Sheet,
    Table,
    all_notes,
    environment_table,
    model_fact,
    model_table,
    status_fact,
)

_MOST_NAMES = 3


def inspect_sheet(record: InspectRecord) -> Sheet:
    """Say what a model is made of.

    Args:
        record: The anatomy.

    Returns:
        The sheet; matrices and norms are grouped, the record has every one.
    """
    tables = (
        _matrix_table(record),
        _norm_table(record),
        _check_table(record),
        _unhandled_table(record),
        model_table(record.model),
        environment_table(record.environment, record.timing),
    )
    blocks = f"{count(len(record.blocks))}" + (f", {_names(record.blocks)}" if record.blocks else "")
    facts = (
        *status_fact(record),
        model_fact(record.model),
        Fact("blocks", blocks),
        Fact("skip path", record.skip),
        Fact("backbone", record.backbone or "not found"),
        Fact("head", record.head or "not found"),
        Fact("final norm", record.final_norm or "not found"),
    )
    return Sheet(f"Anatomy: {record.model.name}", (_headline(record),), facts, tables, all_notes(record))


def _headline(record: InspectRecord) -> str:
    parameters = sum(m.out_features * m.in_features for m in record.matrices)
    inside = sum(m.block is not None for m in record.matrices)
    total = record.model.parameters
    share = f" ({_share(parameters / total)} of the model)" if total else ""
    accounted = _share(record.accounted)
    missing = len(record.unhandled)
    rest = f"; {count(missing)} cannot be handled, listed below" if missing else "; nothing is left out"
    return (
        f"{count(len(record.matrices))} weight matrices can be perturbed, {count(inside)} of them in "
        f"{count(len(record.blocks))} blocks: {count(parameters)} entries{share}. "
        f"{accounted} of all parameters are accounted for{rest}."
    )


def _share(share: float) -> str:
    # 99.96 % must not read as all of it.
    return "100 %" if share == 1 else f"{min(int(share * 1000) / 10, 99.9):.1f} %"


def _matrix_table(record: InspectRecord) -> Table:
    groups: dict[tuple[str, int, int, str], list[MatrixInfo]] = defaultdict(list)
    for matrix in record.matrices:
        groups[matrix.role, matrix.out_features, matrix.in_features, matrix.dtype].append(matrix)
    rows = []
    for (role, out_features, in_features, dtype), members in groups.items():
        shape = f"{count(out_features)} × {count(in_features)}"
        entries = count(len(members) * out_features * in_features)
        rows.append((role, count(len(members)), _blocks(members), shape, entries, dtype))
    tied = [f"{m.matrix} = {', '.join(m.aliases)}" for m in record.matrices if m.aliases]
    below = [f"One storage under several names, touched once: {'; '.join(tied[:_MOST_NAMES])}"] if tied else []
    if len(tied) > _MOST_NAMES:
        below[0] += f"; and {count(len(tied) - _MOST_NAMES)} more (in the record)"
    columns = (
        Column("role", "left"),
        Column("matrices"),
        Column("blocks", "left"),
        Column("out × in"),
        Column("entries"),
        Column("dtype", "left"),
    )
    return Table("Weight matrices", columns, tuple(rows), tuple(below))


def _blocks(members: list[MatrixInfo]) -> str:
    numbers = sorted({m.block for m in members if m.block is not None})
    outside = sum(m.block is None for m in members)
    if not numbers:
        return "outside"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}–{numbers[-1]}" if whole and len(numbers) > 1 else _names(tuple(map(str, numbers)))
    return f"{text}, outside" if outside else text


def _norm_table(record: InspectRecord) -> Table:
    groups = defaultdict(list)
    for norm in record.norms:
        groups[norm.kind, norm.position, norm.readers, norm.plantable].append(norm.norm)
    rows = tuple(
        (kind.replace("_", " "), position, count(len(names)), count(readers), "yes" if plantable else "no", names[0])
        for (kind, position, readers, plantable), names in groups.items()
    )
    columns = (
        Column("kind", "left"),
        Column("position", "left"),
        Column("norms"),
        Column("matrices\nreading each"),
        Column("outliers can\nbe planted", "left"),
        Column("first", "left"),
    )
    return Table("Norms, by probing", columns, rows)


def _check_table(record: InspectRecord) -> Table:
    rows = tuple((c.check, _verdict(c), figure(c.difference, 2), c.note) for c in record.checks)
    columns = (Column("self-check", "left"), Column("result", "left"), Column("difference"), Column("note", "left"))
    below = (
        [f"{NOT_MEASURED}: the check gives no difference, or was not run."]
        if any(row[2] == NOT_MEASURED for row in rows)
        else []
    )
    return Table("Self-checks on this model", columns, rows, tuple(below))


def _verdict(check: CheckInfo) -> str:
    return "not run" if check.passed is None else ("passed" if check.passed else "FAILED")


def _unhandled_table(record: InspectRecord) -> Table:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in record.unhandled.items():
        reasons[reason].append(name)
    rows = tuple((count(len(names)), _names(tuple(names)), reason) for reason, names in reasons.items())
    columns = (Column("count"), Column("names", "left"), Column("reason", "left"))
    return Table("Not handled", columns, rows)


def _names(names: tuple[str, ...]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} … {names[-1]}"
