"""``ternary-probe leverage``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel
    from ternary_probe.perturb import OutlierColumns
    from ternary_probe.perturb.columns import SelectBy
    from ternary_probe.records import LeverageRecord
    from ternary_probe.studies.plan import LeverageOptions
    from ternary_probe.text import Text, Windows

DEFAULT_WINDOWS = 4
_STUDY = "Study"


def leverage(
    model: opt.ModelArgument,
    rates: Annotated[
        str | None,
        typer.Option("--rates", help="Flip rates, shares or %. [default: 0.001,0.005]", rich_help_panel=_STUDY),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds.", rich_help_panel=_STUDY)] = 8,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="outlier, other, all, magnitude_outlier, magnitude_other, magnitude_all.",
            rich_help_panel=_STUDY,
        ),
    ] = "outlier,other,all",
    matching: Annotated[
        str, typer.Option("--matching", help="count, rate, energy; several by comma.", rich_help_panel=_STUDY)
    ] = "count",
    fraction: Annotated[
        float, typer.Option("--fraction", help="Share of columns that are outliers.", rich_help_panel=_STUDY)
    ] = 0.05,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="Rank columns by energy or mean_abs. [default: energy; dong2026: mean_abs]",
            rich_help_panel=_STUDY,
        ),
    ] = None,
    include: Annotated[
        str | None, typer.Option("--include", help="Matrix name patterns, by comma.", rich_help_panel=_STUDY)
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", help="Patterns to leave out, by comma.", rich_help_panel=_STUDY)
    ] = None,
    plant: Annotated[
        str | None,
        typer.Option(
            "--plant", help="Plant first: outlier_columns:k=8,number=8,mode=preserving.", rich_help_panel=_STUDY
        ),
    ] = None,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Text to choose outlier columns on; the part after the scored text if absent.",
            rich_help_panel="Text",
        ),
    ] = None,
    protocol: opt.ProtocolOption = opt.ProtocolChoice.disjoint,
    window: opt.WindowOption = None,
    windows: Annotated[
        int | None,
        typer.Option("--windows", help="Windows to score. [default: 4; dong2026: 10]", rich_help_panel="Text"),
    ] = None,
    stride: opt.StrideOption = None,
    bos: opt.BosOption = opt.BosChoice.none,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    revision: opt.RevisionOption = None,
    allow_pickle: opt.PickleOption = False,
    trust_remote_code: opt.RemoteCodeOption = False,
    head_mib: opt.HeadOption = opt.HEAD_MIB,
    seed: opt.SeedOption = 0,
    out: opt.OutOption = None,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Flip signs in outlier and in other input columns of MODEL: how much more do the outliers hurt?"""
    from ternary_probe.studies.plan import LeverageOptions
    from ternary_probe.studies.published import DONG2026_RATES

    paper = protocol is opt.ProtocolChoice.dong2026
    chosen = LeverageOptions(
        rates=opt.split_rates(rates) if rates is not None else (DONG2026_RATES if paper else (0.001, 0.005)),
        seeds=tuple(range(seed, seed + seeds)),
        arms=opt.split(arms),
        matchings=opt.split(matching),  # type: ignore[arg-type]  # checked by the options themselves
        fraction=fraction,
        by=_ranking(by, paper=paper),
        include=opt.split(include),
        exclude=opt.split(exclude),
        plant=_planting(plant),
        paper_counts=paper,
        head_bytes=head_mib << 20,
    )
    if windows is None and not paper:
        windows = DEFAULT_WINDOWS
    cutting = TextOptions(text, dataset, protocol.value, window, stride, windows, bos.value)
    loading = LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code)
    check_output(out, json)
    silent = quiet or json == "-"
    record = run(load_model(model, loading, quiet=silent), cutting, calibration, chosen, out, quiet=silent)
    show(record, out, json=json, quiet=quiet)


def run(
    loaded: LoadedModel,
    cutting: TextOptions,
    calibration: str | None,
    options: LeverageOptions,
    out: Path | None,
    *,
    quiet: bool,
    command: str = "leverage",
) -> LeverageRecord:
    """Cut the texts, run the study, write the report folder.

    Args:
        loaded: The model.
        cutting: How to cut the scored text.
        calibration: A text file to choose outlier columns on.
        options: What to run.
        out: Report folder.
        quiet: No progress bar.
        command: For the record.

    Returns:
        The record.
    """
    from ternary_probe.studies.leverage import run_leverage

    text, windows = cut_text(loaded, cutting)
    with progress_bar(quiet=quiet) as progress:
        record = run_leverage(
            loaded,
            windows,
            calibration_of(loaded, text, windows, calibration),
            options,
            out=out,
            command=command,
            progress=progress,
        )
    if out is not None:
        from ternary_probe.reports.folder import write_report

        write_report(record, out)
    return record


def show(record: LeverageRecord, out: Path | None, *, json: str | None, quiet: bool) -> None:
    """Print the table and where the report lies.

    Args:
        record: The result.
        out: Report folder.
        json: Record file, or ``-``.
        quiet: No table.

    Raises:
        Exit: With code 3 when no leverage is conclusive.
    """
    from ternary_probe.reports.terminal import leverage_view

    closing = f"report: {out / 'report.md'}   record: {out / 'record.json'}" if out is not None else ""
    publish(record, lambda: leverage_view(record), json=json, quiet=quiet, closing=closing)
    if record.status == "inconclusive":
        raise typer.Exit(3)


def calibration_of(loaded: LoadedModel, text: Text, windows: Windows, file: str | None) -> Windows:
    """Cut the text on which outlier columns are chosen: never the scored one, save under the paper's protocol, which did so.

    Args:
        loaded: The model.
        text: The scored text.
        windows: What of it is scored.
        file: Another text, or ``None`` for the part after the scored one.

    Returns:
        As many windows as are scored.

    Raises:
        ProbeError: If the file is the scored text.
    """
    from ternary_probe.loading import require_tokenizer, vocabulary_size
    from ternary_probe.text import calibration_windows, make_windows, read_text

    tokenizer, vocabulary = require_tokenizer(loaded), vocabulary_size(loaded.model)
    if file is not None:
        other = read_text(file)
        if other.sha256 == text.sha256:
            raise ProbeError(f"--calibration {file} is the scored text itself: drop the option or name another text")
        length = windows.protocol.window
        return make_windows(other, tokenizer, window=length, windows=len(windows.inputs), vocab_size=vocabulary)
    if windows.protocol.name == "dong2026":
        return windows
    return calibration_windows(text, tokenizer, windows, vocab_size=vocabulary)


def _ranking(by: str | None, *, paper: bool) -> SelectBy:
    rankings: dict[str, SelectBy] = {"energy": "energy", "mean_abs": "mean_abs"}
    chosen = by if by is not None else ("mean_abs" if paper else "energy")
    if chosen not in rankings:
        raise ProbeError(f"--by {by}: choose energy or mean_abs")
    return rankings[chosen]


def _planting(text: str | None) -> OutlierColumns | None:
    from ternary_probe.perturb import OutlierColumns, parse

    if text is None:
        return None
    recipe = parse(text)
    if not isinstance(recipe, OutlierColumns):
        raise ProbeError(f"--plant {text}: only outlier_columns can be planted")
    return recipe
