"""``ternary-probe doctor``."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import Any

from ternary_probe.cli import options as opt


def doctor(json: opt.JsonOption = None, quiet: opt.QuietOption = False) -> None:
    """Versions, devices, caches: what this environment can do."""
    from ternary_probe.records import Environment, write_atomically

    found = {**Environment.here().model_dump(), **_devices(), **_demo_model()}
    if json == "-":
        sys.stdout.write(jsonlib.dumps(found, indent=2) + "\n")
        return
    if json is not None:
        from pathlib import Path

        write_atomically(Path(json), jsonlib.dumps(found, indent=2) + "\n")
    if not quiet:
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None)
        for name, value in found.items():
            rows = value.items() if isinstance(value, dict) else [(name, value)]
            for key, shown in rows:
                table.add_row(str(key), str(shown))
        Console().print(table)


def _devices() -> dict[str, Any]:
    import torch

    devices = ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))]
    return {"threads": torch.get_num_threads(), "devices": ", ".join(devices)}


def _demo_model() -> dict[str, Any]:
    from ternary_probe.demo_model import FOLDER, cache_folder

    folder = cache_folder() / FOLDER
    return {"demo model": f"{folder} ({'ready' if (folder / 'config.json').is_file() else 'not fetched yet'})"}
