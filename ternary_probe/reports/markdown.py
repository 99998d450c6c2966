"""Records as Markdown that GitHub renders: ``report.md``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from ternary_probe.errors import ProbeError
from ternary_probe.records import (
    GateRecord,
    InspectRecord,
    LeverageRecord,
    PerplexityRecord,
    QuantizeRecord,
    Record,
    TheoryRecord,
)
from ternary_probe.reports.gate_sheet import gate_sheet
from ternary_probe.reports.inspect_sheet import inspect_sheet
from ternary_probe.reports.leverage_sheet import leverage_sheet
from ternary_probe.reports.perplexity_sheet import perplexity_sheet
from ternary_probe.reports.quantize_sheet import quantize_sheet
from ternary_probe.reports.sensitivity_sheet import sensitivity_sheet
from ternary_probe.reports.sheet import Sheet, Table
from ternary_probe.reports.theory_sheet import theory_sheet
from ternary_probe.sensitivity_record import SensitivityRecord

CAPTIONS = {
    "response_curve": (
        "Mean damage of each arm against the share of entries flipped, with intervals over seeds. "
        "A line parallel to the dashed one is proportional to the number of flips; inside the shaded band nothing can "
        "be told from noise."
    ),
    "amplitude_profile": (
        "Amplitude α of a matrix's inputs, largest first: the median over the matrices of a role, the band from lowest "
        "to highest. A steep start means that few columns carry most of the input."
    ),
    "predicted_leverage": (
        "What input amplitude alone predicts for the leverage of outlier columns over all columns, matrix by matrix. "
        "Right: the leverage measured, where the study has it."
    ),
    "sensitivity_map": (
        "Predicted damage of random flips, a cell for each block and kind of matrix, on logarithmic colours. A cross marks "
        "a super weight that was measured there."
    ),
    "prediction_against_measurement": (
        "What one Fisher pass predicts against what was measured. On the dashed line they are equal."
    ),
    "sorted_columns": "Damage of flipping one whole input column, worst first; hollow points were drawn at random.",
}

_SPECIAL = re.compile(r"([\\`*_|<>~$])")


def to_markdown(
    record: Record,
    figures: dict[str, Path] | None = None,
    command_line: str | None = None,
    folder: Path | None = None,
) -> str:
    """Write a record as a Markdown report with the figures of the terminal view, and the protocol in full.

    Args:
        record: A record of any command.
        figures: Figure name to image file, as `ternary_probe.reports.figures.draw` returns.
        command_line: The exact command that made the record, for the section on reproduction.
        folder: Folder the report will lie in; links are relative to it. Default: that of the figures.

    Returns:
        The report, ending in a newline.
    """
    sheet = _sheet(record)
    lines = [f"# {escape(sheet.title)}", ""]
    lines += [f"**{escape(sheet.headline[0])}**", *(escape(sentence) for sentence in sheet.headline[1:]), ""]
    lines += [f"- **{escape(fact.label)}**: {escape(fact.text)}" for fact in sheet.facts]
    for table in sheet.tables:
        if not table.detail:
            lines += _table(table)
    if figures:
        lines += ["", "## Figures"]
        for name, path in figures.items():
            title = name.replace("_", " ").capitalize()
            caption = CAPTIONS.get(name)
            lines += ["", f"![{escape(title)}]({_link(path, folder)})"]
            lines += ["", f"*{title}.* {escape(caption)}"] if caption else []
    if sheet.notes:
        lines += ["", "## Notes", "", *(f"- {escape(note)}" for note in sheet.notes)]
    lines += ["", "## How to reproduce", ""]
    if command_line:
        lines += [_code_block(command_line)]
    lines += [_replay(record)]
    for table in sheet.tables:
        if table.detail:
            lines += _table(table)
    return "\n".join(lines).rstrip("\n") + "\n"


def escape(text: str) -> str:
    """Make a text show as it is, in a paragraph and in a table cell.

    Args:
        text: Any text; line breaks become spaces.

    Returns:
        Markdown without active characters.
    """
    text = " ".join(text.split()).replace("&", "&amp;")
    text = _SPECIAL.sub(r"\\\1", text).replace("](", r"]\(")
    # A cell or paragraph that starts like a list, heading or quote must not become one.
    return re.sub(r"^([-+#])(?=\s|$|#)|^(\d+)([.)])(?=\s)", lambda m: f"\\{m[1]}" if m[1] else f"{m[2]}\\{m[3]}", text)


def _sheet(record: Record) -> Sheet:
    if isinstance(record, LeverageRecord):
        return leverage_sheet(record)
    if isinstance(record, PerplexityRecord):
        return perplexity_sheet(record)
    if isinstance(record, InspectRecord):
        return inspect_sheet(record)
    if isinstance(record, QuantizeRecord):
        return quantize_sheet(record)
    if isinstance(record, TheoryRecord):
        return theory_sheet(record)
    if isinstance(record, GateRecord):
        return gate_sheet(record)
    if isinstance(record, SensitivityRecord):
        return sensitivity_sheet(record)
    raise ProbeError(f"no report is written for a record of command {record.command!r}; use its JSON")


def _table(table: Table) -> list[str]:
    lines = ["", f"## {escape(table.title)}", ""]
    if table.rows:
        lines.append(_row([escape(column.header) for column in table.columns]))
        lines.append(_row(["---:" if column.justify == "right" else "---" for column in table.columns]))
        lines += [_row([escape(cell.replace("\n", ", ")) for cell in row]) for row in table.rows]
    else:
        lines.append("none")
    for sentence in table.below:
        lines += ["", escape(sentence)]
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(path: Path, folder: Path | None) -> str:
    if folder is not None:
        path = Path(os.path.relpath(path.absolute(), folder.absolute()))
    elif path.is_absolute():
        path = Path(path.name)
    return quote(path.as_posix())


def _code_block(command_line: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", command_line)), default=0))
    return f"{fence}sh\n{command_line}\n{fence}\n"


def _replay(record: Record) -> str:
    text = (
        f"Made by ternary_probe {escape(record.environment.ternary_probe)}, record schema {record.schema_version}. "
        "The same weights, text and packages give the same record; environment and timing may differ."
    )
    if isinstance(record, LeverageRecord):
        text += (
            " Every arm's `recipe` in the JSON record, with its `outlier_columns`, flips the same entries again in any "
            "dtype and on any device."
        )
    return text
