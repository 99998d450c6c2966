"""The report folder of a study: record, Markdown report, figures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ternary_probe.records import LeverageRecord, write_atomically
from ternary_probe.reports.figures import draw
from ternary_probe.reports.markdown import to_markdown
from ternary_probe.reports.sensitivity_figures import draw_sensitivity
from ternary_probe.sensitivity_record import SensitivityRecord


def write_report(record: LeverageRecord | SensitivityRecord, folder: Path, command_line: str | None = None) -> Path:
    """Write ``record.json``, ``report.md`` and ``figures/``; the record first, so that it is safe whatever follows.

    Args:
        record: The result.
        folder: Target folder.
        command_line: What reproduces it; this process's own command line if absent.

    Returns:
        Path of the report.
    """
    record.save(folder / "record.json")
    draws = draw_sensitivity if isinstance(record, SensitivityRecord) else draw
    figures = draws(record, folder / "figures")  # type: ignore[arg-type]
    relative = {name: path.relative_to(folder) for name, path in figures.items()}
    command = command_line or shlex.join(["ternary-probe", *sys.argv[1:]])
    return write_atomically(folder / "report.md", to_markdown(record, relative, command_line=command))
