"""``ternary-probe theory``."""

from __future__ import annotations

from typing import Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.session import (
    LoadOptions,
    TextOptions,
    check_output,
    cut_text,
    load_model,
    progress_bar,
    publish,
)
from ternary_probe.errors import ProbeError

_STUDY, _MODEL = "Study", "Real model"
EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}


def theory(
    rates: Annotated[
        str, typer.Option("--rates", help="Flip rates, shares or %.", rich_help_panel=_STUDY)
    ] = "0.001,0.01,0.02,0.05,0.1",
    width: Annotated[
        int, typer.Option("--width", help="Width of every layer; 2048 is the paper's.", rich_help_panel=_STUDY)
    ] = 512,
    inputs: Annotated[int, typer.Option("--inputs", help="Input vectors per seed.", rich_help_panel=_STUDY)] = 256,
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds.", rich_help_panel=_STUDY)] = 32,
    depth: Annotated[
        bool, typer.Option("--depth/--no-depth", help="Stacks of 1 to 6 layers as well.", rich_help_panel=_STUDY)
    ] = True,
    confidence: Annotated[
        float, typer.Option("--confidence", help="Of the intervals shown, not of the verdict.", rich_help_panel=_STUDY)
    ] = 0.95,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Stack this model's own matrices too, on its text.", rich_help_panel=_MODEL),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            "--role", help="Role of those matrices. [default: the widest reader of the stream]", rich_help_panel=_MODEL
        ),
    ] = None,
    text: opt.TextOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    seed: opt.SeedOption = 0,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Closed forms against simulation, beside the published figures. Exit code 1 when a form is missed, 3 when untested."""
    from ternary_probe.reports.terminal import theory_view
    from ternary_probe.studies.theory import TheoryOptions, run_theory

    if model is None and (role is not None or text is not None):
        raise ProbeError(f"--{'role' if role is not None else 'text'} is about a real model: name it with --model")
    if model is not None and not depth:
        raise ProbeError("--model adds its matrices to the depth experiment: drop --no-depth")
    if seeds < 1:
        raise ProbeError(f"--seeds {seeds}: use 1 or more")
    options = TheoryOptions(
        rates=opt.split_rates(rates),
        width=width,
        inputs=inputs,
        seeds=tuple(range(seed, seed + seeds)),
        depth=depth,
        device=_device(device),
        confidence=confidence,
    )
    check_output(None, json)
    silent = quiet or json == "-"
    loaded = windows = None
    if model is not None:
        loaded = load_model(model, LoadOptions(dtype, device), quiet=silent)
        _, windows = cut_text(loaded, TextOptions(text=text, window=max(2, inputs), windows=1))
    with progress_bar(quiet=silent) as progress:
        record = run_theory(options, loaded=loaded, windows=windows, role=role, progress=progress)
    publish(record, lambda: theory_view(record), json=json, quiet=quiet)
    if EXIT_CODES[record.verdict]:
        raise typer.Exit(EXIT_CODES[record.verdict])


def _device(name: str) -> str:
    import torch

    from ternary_probe.pretrained import parse_device

    parse_device(name, None)  # refuses what is unknown or absent
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
