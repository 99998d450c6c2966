"""A gate's verdict in words, and its findings as a table."""

from __future__ import annotations

from collections import Counter

from ternary_probe.records import Finding, FindingStatus, GateRecord
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
    protocol_fact,
    protocol_table,
)

# The word carries the meaning; the mark lets an eye running down the column stop at what matters.
STATUS_WORDS = {
    "pass": "pass",
    "warn": "! warn",
    "fail": "✗ FAIL",
    "inconclusive": "? undecided",
    "not_applicable": "- n/a",
}
_ORDER: tuple[FindingStatus, ...] = ("fail", "inconclusive", "warn", "pass", "not_applicable")
_HEADLINES = {
    "pass": "PASS: nothing under this policy speaks against {what}.",
    "fail": "FAIL: {what} does not pass this policy.",
    "inconclusive": "INCONCLUSIVE: nothing failed, but {what} was not shown to pass.",
}


def gate_sheet(record: GateRecord) -> Sheet:
    """Say what was decided and on what evidence.

    Args:
        record: The gate's record.

    Returns:
        The sheet; findings that decide come first.
    """
    what = record.model.name if record.base is None else f"{record.model.name} as a release of {record.base.name}"
    tables = [_findings(record), _evidence(record), model_table(record.model)]
    facts = [model_fact(record.model)]
    if record.base is not None:
        facts.append(Fact("base", model_fact(record.base).text))
    if record.protocol is not None:
        facts.append(protocol_fact("text", record.protocol))
        tables.append(protocol_table("Protocol", record.protocol))
    facts.append(Fact("policy", f"{record.policy} (sha256 {record.policy_sha256[:12]})"))
    facts.append(Fact("checked", _checked(record)))
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title=f"Gate: {record.model.name}",
        headline=(_HEADLINES[record.verdict].format(what=what), f"{record.reason[:1].upper()}{record.reason[1:]}."),
        facts=tuple(facts),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def _checked(record: GateRecord) -> str:
    counted = Counter(finding.status for finding in record.findings)
    parts = [f"{counted[status]} {status.replace('_', ' ')}" for status in _ORDER if counted[status]]
    read = "" if record.bytes_read is None else f"; {count(record.bytes_read)} bytes of checkpoint files read"
    return f"{', '.join(record.tiers)}; findings: {', '.join(parts) or 'none'}{read}"


def _findings(record: GateRecord) -> Table:
    ordered = sorted(record.findings, key=lambda finding: _ORDER.index(finding.status))
    rows = tuple(
        (
            STATUS_WORDS[finding.status],
            finding.check,
            figure(finding.measured),
            figure(finding.threshold),
            finding.unit or NOT_MEASURED,
            _where(finding) + finding.message,
        )
        for finding in ordered
    )
    columns = (
        Column("status", "left"),
        Column("check", "left"),
        Column("measured"),
        Column("threshold"),
        Column("unit", "left"),
        Column("what it means", "left"),
    )
    return Table("Findings", columns, rows, ("Compared unrounded; the record has every digit.",) if rows else ())


def _where(finding: Finding) -> str:
    """Name the place, unless the message does so itself."""
    return "" if not finding.subject or finding.subject in finding.message else f"{finding.subject}: "


def _evidence(record: GateRecord) -> Table:
    rows = tuple(
        (finding.check, finding.subject, name, str(value))
        for finding in record.findings
        for name, value in finding.details.items()
    )
    columns = (Column("check", "left"), Column("where", "left"), Column("evidence", "left"), Column("value", "left"))
    return Table("Evidence", columns, rows, grouped=True, detail=True)
