"""``ternary-probe sensitivity``."""

from __future__ import annotations

from typing import Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.leverage import calibration_of
from ternary_probe.cli.session import (
    LoadOptions,
    TextOptions,
    check_output,
    cut_text,
    load_model,
    progress_bar,
    publish,
)

_PREDICT, _MEASURE = "Prediction", "Measurement"


def sensitivity(
    model: opt.ModelArgument,
    draws: Annotated[
        int, typer.Option("--draws", help="Label draws of the Fisher pass.", rich_help_panel=_PREDICT)
    ] = 8,
    bound: Annotated[
        float,
        typer.Option(
            "--bound",
            help="Predicted nats of one flip from which a weight is measured alone.",
            rich_help_panel=_PREDICT,
        ),
    ] = 0.02,
    rates: Annotated[
        str, typer.Option("--rates", help="Flip rates of the bulk samples, shares or %.", rich_help_panel=_MEASURE)
    ] = "0.0003,0.001",
    pools: Annotated[
        str, typer.Option("--pools", help="outlier, other, all columns.", rich_help_panel=_MEASURE)
    ] = "outlier,other",
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds; of the first look.", rich_help_panel=_MEASURE)] = 8,
    per: Annotated[
        str, typer.Option("--per", help="Flip in each block, each matrix, or none.", rich_help_panel=_MEASURE)
    ] = "block",
    unit_rate: Annotated[
        float, typer.Option("--unit-rate", help="Flip rate within it.", rich_help_panel=_MEASURE)
    ] = 0.003,
    controls: Annotated[
        int, typer.Option("--controls", help="Seeds of sign-preserving noise.", rich_help_panel=_MEASURE)
    ] = 2,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision", help="Relative half-width to reach, looking at up to 128 seeds.", rich_help_panel=_MEASURE
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="Minutes after which no further look begins.", rich_help_panel=_MEASURE),
    ] = None,
    singles: Annotated[
        int, typer.Option("--singles", help="Single weights to measure, at most.", rich_help_panel=_MEASURE)
    ] = 24,
    super_bound: Annotated[
        float, typer.Option("--super-bound", help="Measured nats of a super weight.", rich_help_panel=_MEASURE)
    ] = 0.1,
    columns: Annotated[
        int, typer.Option("--columns", help="Columns each screen nominates.", rich_help_panel=_MEASURE)
    ] = 8,
    random_columns: Annotated[
        int, typer.Option("--random-columns", help="Random columns beside them.", rich_help_panel=_MEASURE)
    ] = 16,
    worst: Annotated[int, typer.Option("--worst", help="Flips of the worst case.", rich_help_panel=_MEASURE)] = 3,
    plan: Annotated[
        float | None,
        typer.Option(
            "--plan", help="Share of the ternary damage to avoid by keeping matrices.", rich_help_panel=_MEASURE
        ),
    ] = None,
    scheme: Annotated[
        str, typer.Option("--scheme", help="Ternary scheme of the plan.", rich_help_panel=_MEASURE)
    ] = "absmean@g128",
    fraction: Annotated[
        float, typer.Option("--fraction", help="Share of columns that are outliers.", rich_help_panel=_MEASURE)
    ] = 0.05,
    include: Annotated[
        str | None, typer.Option("--include", help="Matrix name patterns, by comma.", rich_help_panel=_MEASURE)
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", help="Patterns to leave out, by comma.", rich_help_panel=_MEASURE)
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
    head_mib: opt.HeadOption = opt.HEAD_MIB,
    seed: opt.SeedOption = 0,
    out: opt.OutOption = None,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Predict the damage of every column of MODEL from one Fisher pass, measure what matters, name its super weights."""
    from ternary_probe.studies.sensitivity_options import SensitivityOptions

    chosen = SensitivityOptions(
        draws=draws,
        rates=opt.split_rates(rates),
        pools=opt.split(pools),
        seeds=seeds,
        seed=seed,
        per=per,  # type: ignore[arg-type]  # checked by the options themselves
        unit_rate=unit_rate,
        controls=controls,
        precision=precision,
        budget=budget,
        singles=singles,
        bound=bound,
        super_bound=super_bound,
        columns=columns,
        random_columns=random_columns,
        worst=worst,
        plan=plan,
        scheme=scheme,
        fraction=fraction,
        include=opt.split(include),
        exclude=opt.split(exclude),
        head_bytes=head_mib << 20,
    )
    check_output(out, json)
    silent = quiet or json == "-"
    loaded = load_model(
        model, LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code), quiet=silent
    )
    cutting = TextOptions(text, dataset, protocol.value, window, stride, 4 if windows is None else windows, bos.value)
    scored_text, scored = cut_text(loaded, cutting)

    from ternary_probe.reports.terminal import sensitivity_view
    from ternary_probe.studies.sensitivity import run_sensitivity

    with progress_bar(quiet=silent) as progress:
        record = run_sensitivity(
            loaded, scored, calibration_of(loaded, scored_text, scored, calibration), chosen, out=out, progress=progress
        )
    closing = ""
    if out is not None:
        from ternary_probe.reports.folder import write_report

        write_report(record, out)
        closing = f"report: {out / 'report.md'}   record: {out / 'record.json'}"
    publish(record, lambda: sensitivity_view(record), json=json, quiet=quiet, closing=closing)
