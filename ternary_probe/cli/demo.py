"""``ternary-probe demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.leverage import DEFAULT_WINDOWS, run, show
from ternary_probe.cli.session import LoadOptions, TextOptions, check_output, load_model


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Report folder.")] = Path("demo-report"),
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Fetch SmolLM2-135M, run the leverage study on the sample text, write a report (5 to 7 minutes on 2 cores)."""
    from ternary_probe.studies.plan import LeverageOptions

    check_output(out, json)
    silent = quiet or json == "-"
    loaded = load_model("demo", LoadOptions(dtype="float32"), quiet=silent)
    cutting = TextOptions(windows=DEFAULT_WINDOWS)
    record = run(loaded, cutting, None, LeverageOptions(), out, quiet=silent, command="demo")
    show(record, out, json=json, quiet=quiet)
