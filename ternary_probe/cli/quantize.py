"""``ternary-probe quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.session import (
    LoadOptions,
    TextOptions,
    check_output,
    check_save,
    cut_text,
    load_model,
    progress_bar,
    publish,
    status,
)
from ternary_probe.errors import ProbeError

_STUDY = "Study"


def quantize(
    model: opt.ModelArgument,
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            help="METHOD[+ls][@row|@tensor|@g128], METHOD of sign, absmean, twn, optimal, planes:2; several by comma.",
            rich_help_panel=_STUDY,
        ),
    ] = "absmean",
    include: Annotated[
        str | None, typer.Option("--include", help="Matrix name patterns, by comma.", rich_help_panel=_STUDY)
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", help="Patterns to leave out, by comma.", rich_help_panel=_STUDY)
    ] = None,
    blocks: Annotated[
        str | None, typer.Option("--blocks", help="Blocks to ternarize: 0-3;7.", rich_help_panel=_STUDY)
    ] = None,
    roles: Annotated[
        str | None, typer.Option("--roles", help="Roles to ternarize: down_proj,up_proj.", rich_help_panel=_STUDY)
    ] = None,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=0, help="Seeds of the controls of equal norm; 0: none.", rich_help_panel=_STUDY),
    ] = 4,
    plant_outliers: Annotated[
        str | None,
        typer.Option(
            "--plant-outliers", help="Strengths of planted outlier columns: 1,2,4,8,16.", rich_help_panel=_STUDY
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Save the quantized checkpoint (one scheme).")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="dense or packed, for --save.")] = "dense",  # noqa: A002
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run the study; off: only save.", rich_help_panel=_STUDY)
    ] = True,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    protocol: opt.ProtocolOption = opt.ProtocolChoice.disjoint,
    window: opt.WindowOption = None,
    windows: Annotated[
        int | None, typer.Option("--windows", help="Windows to score. [default: 4]", rich_help_panel="Text")
    ] = None,
    stride: opt.StrideOption = None,
    bos: opt.BosOption = opt.BosChoice.none,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    revision: opt.RevisionOption = None,
    allow_pickle: opt.PickleOption = False,
    trust_remote_code: opt.RemoteCodeOption = False,
    seed: opt.SeedOption = 0,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Ternarize MODEL: error figures per matrix, damage beside harmless and harmful noise of equal norm, and a checkpoint."""
    from ternary_probe.studies.quantizers import QuantizeOptions, run_quantizers

    options = QuantizeOptions(
        schemes=opt.split(scheme),
        seeds=tuple(range(seed, seed + seeds)),
        include=opt.split(include),
        exclude=opt.split(exclude),
        blocks=blocks,
        roles=opt.split(roles),
        plant=opt.split_numbers(plant_outliers, "--plant-outliers"),
    )
    if save is not None and len(options.schemes) != 1:
        raise ProbeError(f"--save keeps one scheme, and --scheme names {len(options.schemes)}: name one")
    if format not in {"dense", "packed"}:
        raise ProbeError(f"--format {format}: choose dense or packed")
    if not measure and save is None:
        raise ProbeError("--no-measure without --save would do nothing: give --save DIR")
    check_output(None, json)
    check_save(save)
    silent = quiet or json == "-"
    loading = LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code)
    loaded = load_model(model, loading, quiet=silent)
    saved = None
    if save is not None:
        from ternary_probe.saving import save_quantized

        if measure:
            from ternary_probe.anatomy import examine
            from ternary_probe.studies.quantizers import require_measurable

            require_measurable(examine(loaded.model), options)

        with status(f"saving to {save}", quiet=silent):
            saved = save_quantized(loaded, options.recipe(options.schemes[0]), save, format=format)  # type: ignore[arg-type]
    if not measure:
        if not silent:
            typer.echo(f"saved {saved}")
        return
    from ternary_probe.reports.terminal import quantize_view

    _, cut = cut_text(
        loaded, TextOptions(text, dataset, protocol.value, window, stride, 4 if windows is None else windows, bos.value)
    )
    with progress_bar(quiet=silent) as progress:
        record = run_quantizers(loaded, cut, options, progress=progress)
    record = record.model_copy(update={"saved": None if saved is None else str(saved)})
    closing = f"saved: {saved}" if saved is not None else ""
    publish(record, lambda: quantize_view(record), json=json, quiet=quiet, closing=closing)
