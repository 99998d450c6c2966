"""``ternary-probe doctor``."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import Annotated, Any

import typer

from ternary_probe.cli import options as opt


def doctor(
    lm_eval: Annotated[
        bool,
        typer.Option("--lm-eval/--no-lm-eval", help="Try the routes from lm-eval to the plugin (some ten seconds)."),
    ] = True,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Versions, devices, caches, and which ways lead from lm-eval to the plugin: what this environment can do."""
    from ternary_probe.cli.lm_eval_routes import find_routes
    from ternary_probe.cli.session import check_output, status
    from ternary_probe.records import Environment, write_atomically

    check_output(None, json)
    with status("trying lm-eval's routes to the plugin", quiet=quiet or json == "-" or not lm_eval):
        routes = find_routes(attempt=lm_eval)
    found = {**Environment.here().model_dump(), **_devices(), **_demo_model(), **routes}
    if json == "-":
        sys.stdout.write(jsonlib.dumps(found, indent=2) + "\n")
        return
    if json is not None:
        from pathlib import Path

        write_atomically(Path(json), jsonlib.dumps(found, indent=2) + "\n")
    if not quiet:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        table = Table(show_header=False, box=None)
        paths = [
            (label, found.pop(name, None))
            for name, label in (
                ("lm-eval hook YAML", "HOOK.yaml, for --tasks TASK,HOOK.yaml"),
                ("lm-eval tasks", "TASKS, for --include_path TASKS"),
            )
        ]
        for name, value in found.items():
            rows = value.items() if isinstance(value, dict) else [(name, value)]
            for key, shown in rows:
                table.add_row(str(key), str(shown))
        console.print(table)
        for label, path in paths:
            if path is not None:  # on a line of its own, to be copied whole
                console.print(f"\nlm-eval: {label}:\n{path}", highlight=False, soft_wrap=True)


def _devices() -> dict[str, Any]:
    import torch

    devices = ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))]
    return {"threads": torch.get_num_threads(), "devices": ", ".join(devices)}


def _demo_model() -> dict[str, Any]:
    from ternary_probe.demo_model import FOLDER, cache_folder

    folder = cache_folder() / FOLDER
    return {"demo model": f"{folder} ({'ready' if (folder / 'config.json').is_file() else 'not fetched yet'})"}
