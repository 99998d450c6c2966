"""Records as rich renderables: one screen, aligned, nothing said by colour alone."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ternary_probe.records import (
    GateRecord,
    InspectRecord,
    LeverageRecord,
    PerplexityRecord,
    QuantizeRecord,
    TheoryRecord,
)
from ternary_probe.reports.gate_sheet import gate_sheet
from ternary_probe.reports.inspect_sheet import inspect_sheet
from ternary_probe.reports.leverage_sheet import leverage_sheet
from ternary_probe.reports.perplexity_sheet import perplexity_sheet
from ternary_probe.reports.quantize_sheet import quantize_sheet
from ternary_probe.reports.sensitivity_sheet import sensitivity_sheet
from ternary_probe.reports.sheet import Fact, Sheet, Table
from ternary_probe.reports.theory_sheet import theory_sheet
from ternary_probe.sensitivity_record import SensitivityRecord


def leverage_view(record: LeverageRecord) -> RenderableType:
    """Lay out a leverage study for a terminal.

    Args:
        record: The study.

    Returns:
        Something rich can print; complete at 80 columns, at its best from 100.
    """
    return _render(leverage_sheet(record))


def perplexity_view(record: PerplexityRecord) -> RenderableType:
    """Lay out a perplexity for a terminal.

    Args:
        record: The measurement.

    Returns:
        Something rich can print.
    """
    return _render(perplexity_sheet(record))


def inspect_view(record: InspectRecord) -> RenderableType:
    """Lay out a model's anatomy for a terminal.

    Args:
        record: The anatomy.

    Returns:
        Something rich can print.
    """
    return _render(inspect_sheet(record))


def quantize_view(record: QuantizeRecord) -> RenderableType:
    """Lay out a quantizer study for a terminal.

    Args:
        record: The study.

    Returns:
        Something rich can print.
    """
    return _render(quantize_sheet(record))


def sensitivity_view(record: SensitivityRecord) -> RenderableType:
    """Lay out a sensitivity study for a terminal.

    Args:
        record: The study.

    Returns:
        Something rich can print.
    """
    return _render(sensitivity_sheet(record))


def theory_view(record: TheoryRecord) -> RenderableType:
    """Lay out closed forms beside simulation for a terminal.

    Args:
        record: The study.

    Returns:
        Something rich can print.
    """
    return _render(theory_sheet(record))


def gate_view(record: GateRecord) -> RenderableType:
    """Lay out a gate's verdict and findings for a terminal.

    Args:
        record: The gate.

    Returns:
        Something rich can print.
    """
    return _render(gate_sheet(record))


def _render(sheet: Sheet) -> Group:
    parts: list[RenderableType] = [Text(sheet.headline[0], style="bold")]
    parts += [Text(sentence) for sentence in sheet.headline[1:]]
    parts += [Text(), _facts(sheet.facts)]
    for table in sheet.tables:
        if not table.detail:
            parts += [Text(), *_table(table)]
    if sheet.notes:
        parts += [Text(), Text("Notes", style="bold"), *(_bullet(note) for note in sheet.notes)]
    return Group(*parts)


def _facts(facts: tuple[Fact, ...]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in facts:
        grid.add_row(Text(label, style="dim"), Text(text))
    return grid


def _table(table: Table) -> list[RenderableType]:
    # Text, never markup: "[20, 41]" must not be read as a style.
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0))
    height = max(column.header.count("\n") for column in table.columns)
    for column in table.columns:
        # Headers stand on the rule, cells at the top of their row.
        header = "\n" * (height - column.header.count("\n")) + column.header
        shown.add_column(Text(header), justify=column.justify, overflow="fold")
    breaks = table.breaks if len(table.rows) > 4 else frozenset()
    for index, row in enumerate(table.rows):
        shown.add_row(*(Text(cell) for cell in row), end_section=index in breaks)
    if not table.rows:
        return [Text(f"{table.title}: none"), *(_below(line) for line in table.below)]
    return [Text(table.title, style="bold"), shown, *(_below(line) for line in table.below)]


def _below(line: str) -> RenderableType:
    return Padding(Text(line, style="dim"), (0, 0, 0, 2))


def _bullet(line: str) -> RenderableType:
    grid = RichTable.grid(padding=(0, 1))
    grid.add_row(Text("-"), Text(line))
    return grid
