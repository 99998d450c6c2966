"""What a report says, before anyone decides how it looks: sentences, facts and tables of finished text.

A record is turned into a `Sheet` once; the terminal and Markdown renderers only lay it out, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from ternary_probe.records import Environment, ModelInfo, ProtocolInfo, Record, Timing
from ternary_probe.reports.rounding import count, figure

Justify = Literal["left", "right"]


class Column(NamedTuple):
    """A column of a table: its header with the unit, a line break where a narrow layout may use one."""

    header: str
    justify: Justify = "right"


class Fact(NamedTuple):
    """A labelled line above the tables."""

    label: str
    text: str


@dataclass(frozen=True)
class Table:
    """A table of finished text.

    Attributes:
        title: What the rows are.
        columns: One for each cell of a row.
        rows: Cells, already rounded.
        below: Sentences that belong to the table: units of ±, reasons for what is missing.
        grouped: True where rows with the same first cell belong together.
        detail: True for tables of the written report only; they do not fit one screen.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    below: tuple[str, ...] = ()
    grouped: bool = False
    detail: bool = False

    @property
    def breaks(self) -> frozenset[int]:
        """Indices of rows after which the first cell changes: where a reader wants a gap."""
        if not self.grouped:
            return frozenset()
        return frozenset(i for i, (row, following) in enumerate(pairwise(self.rows)) if row[0] != following[0])


@dataclass(frozen=True)
class Sheet:
    """Everything one record has to say, in reading order.

    Attributes:
        title: Name of the report.
        headline: The answer, in plain words.
        facts: Model, text, baseline and the like.
        tables: The figures.
        notes: What must be known before a figure is quoted.
    """

    title: str
    headline: tuple[str, ...]
    facts: tuple[Fact, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def model_fact(model: ModelInfo) -> Fact:
    """Name the weights that were measured.

    Args:
        model: The record's model.

    Returns:
        One line: name, kind, parameters, dtype, device, revision.
    """
    revision = f", revision {model.revision}" if model.revision else ""
    where = "" if model.device == "none" else f" on {model.device}"  # files that no model was built from
    return Fact(
        "model", f"{model.name}{revision} ({model.kind}; {count(model.parameters)} parameters, {model.dtype}{where})"
    )


def protocol_fact(label: str, protocol: ProtocolInfo | None) -> Fact:
    """Say in one line how text became tokens.

    Args:
        label: ``text`` or ``calibration``.
        protocol: The protocol, or None where no text was used.

    Returns:
        One line: cutting rule, tokens scored and, where recorded, text, windows, stride and BOS.
    """
    if protocol is None:
        return Fact(label, "none")
    extra = protocol.model_extra or {}
    parts = [f"{extra['text']}," if "text" in extra else "", f"protocol {protocol.name}:"]
    if "windows" in extra and "window" in extra:
        parts.append(f"{extra['windows']} × {extra['window']} tokens,")
    parts.append(f"{count(protocol.tokens_scored)} scored")
    if "stride" in extra and extra.get("stride") != extra.get("window"):
        parts[-1] += f", stride {extra['stride']}"
    if "bos" in extra:
        parts[-1] += f", BOS {str(extra['bos']).replace('_', ' ')}"
    return Fact(label, " ".join(part for part in parts if part))


def protocol_table(title: str, protocol: ProtocolInfo) -> Table:
    """List every field of a protocol.

    Args:
        title: Title of the table.
        protocol: The protocol.

    Returns:
        A detail table of name and value; the protocol's notes stand below it.
    """
    fields = protocol.model_dump()
    notes = fields.pop("notes", ())
    rows = tuple((name, _plain(value)) for name, value in fields.items())
    below = tuple(str(note) for note in notes) if isinstance(notes, list | tuple) else (str(notes),)
    return Table(title, (Column("field", "left"), Column("value", "left")), rows, below, detail=True)


def environment_table(environment: Environment, timing: Timing | None) -> Table:
    """List where and how long it ran.

    Args:
        environment: The record's environment.
        timing: Its timing, where measured.

    Returns:
        A detail table of name and value.
    """
    rows = [
        ("ternary_probe", environment.ternary_probe),
        ("python", environment.python),
        ("platform", environment.platform),
        *environment.packages.items(),
    ]
    if environment.threads is not None:
        rows.append(("threads", str(environment.threads)))
    if timing is not None:
        rows.append(("seconds", figure(timing.seconds)))
        rows.append(("model evaluations", count(timing.evaluations)))
    return Table("Environment", (Column("what", "left"), Column("value", "left")), tuple(rows), detail=True)


def model_table(model: ModelInfo) -> Table:
    """List what identifies the weights.

    Args:
        model: The record's model.

    Returns:
        A detail table of name and value, hashes included.
    """
    fields = model.model_dump(exclude={"notes"}, exclude_none=True)
    rows = tuple((name, _plain(value)) for name, value in fields.items())
    return Table("Model", (Column("field", "left"), Column("value", "left")), rows, detail=True)


def status_fact(record: Record) -> tuple[Fact, ...]:
    """Say loudly that a record is not an ordinary success.

    Args:
        record: The record.

    Returns:
        Nothing for status ``ok``, else one line.
    """
    return () if record.status == "ok" else (Fact("status", record.status.replace("_", "-").upper()),)


def all_notes(record: Record) -> tuple[str, ...]:
    """Collect the notes of a record, its model and its protocol, each once.

    Args:
        record: The record.

    Returns:
        Sentences, in that order.
    """
    protocol = record.protocol.notes if record.protocol else ()
    lines = [*record.notes, *record.model.notes, *(protocol if isinstance(protocol, list | tuple) else [protocol])]
    return tuple(dict.fromkeys(str(line) for line in lines))


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return count(value)
