"""``ternary-probe demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.leverage import DEFAULT_WINDOWS, run, show
from ternary_probe.cli.session import LoadOptions, TextOptions, check_output, load_model, progress_bar, publish

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Report folder.")] = Path("demo-report"),
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Fetch SmolLM2-135M, run the leverage study and the gates on the sample text, write a report (7 minutes on 2 cores)."""
    from ternary_probe.studies.plan import LeverageOptions

    check_output(out, json)
    silent = quiet or json == "-"
    loaded = load_model("demo", LoadOptions(dtype="float32"), quiet=silent)
    cutting = TextOptions(windows=DEFAULT_WINDOWS)
    record = run(loaded, cutting, None, LeverageOptions(), out, quiet=silent, command="demo")
    try:
        show(record, out, json=json, quiet=quiet)
    finally:  # an inconclusive study leaves with an exit code of its own
        gate(loaded, out, quiet=silent)


def gate(loaded: LoadedModel, out: Path, *, quiet: bool) -> None:
    """Gate the demo model by what its files and one forward pass show, and write the findings beside the report.

    Args:
        loaded: The demo model.
        out: Report folder.
        quiet: Print nothing.
    """
    from ternary_probe.gates import Tier, run_gate
    from ternary_probe.records import write_atomically
    from ternary_probe.reports.markdown import to_markdown
    from ternary_probe.reports.terminal import gate_view

    with progress_bar(quiet=quiet) as progress:
        record = run_gate(loaded, tiers=(Tier.PARAMETERS, Tier.FORWARD), progress=progress)
    command = "ternary-probe gate demo --dtype float32 --skip-response"
    write_atomically(out / "gate.md", to_markdown(record, command_line=command))
    closing = f"gate: {out / 'gate.md'}   record: {out / 'gate.json'}"
    publish(record, lambda: gate_view(record), json=str(out / "gate.json"), quiet=quiet, closing=closing)
