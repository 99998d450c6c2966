"""``ternary-probe gate``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.session import LoadOptions, check_output, progress_bar, publish
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from ternary_probe.gates import Check, GateOptions, Tier
    from ternary_probe.records import GateRecord

_CHECKS, _REPORTS = "Checks", "Output"


def gate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file, or 'demo'; the base with --candidate."),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option("--candidate", metavar="MODEL", help="Judge this quantized model against MODEL."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy", metavar="FILE", help="Policy (TOML); the default one if absent.", rich_help_panel=_CHECKS
        ),
    ] = None,
    parameters_only: Annotated[
        bool,
        typer.Option(
            "--parameters-only", help="Headers and norm gains only: no model is built.", rich_help_panel=_CHECKS
        ),
    ] = False,
    scan_weights: Annotated[
        bool, typer.Option("--scan-weights", help="Also read every weight once.", rich_help_panel=_CHECKS)
    ] = False,
    skip_response: Annotated[
        bool,
        typer.Option("--skip-response", help="Leave out what perturbs or compares models.", rich_help_panel=_CHECKS),
    ] = False,
    random_init: Annotated[
        bool,
        typer.Option(
            "--random-init", help="Show fresh weights of the same config beside the trained.", rich_help_panel=_CHECKS
        ),
    ] = False,
    samples: Annotated[
        str | None,
        typer.Option(
            "--samples",
            metavar="BASE,CANDIDATE",
            help="Folders of lm-eval --log_samples output, for the task checks.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List the checks and their thresholds.", rich_help_panel=_CHECKS)
    ] = False,
    print_policy: Annotated[
        bool, typer.Option("--print-policy", help="Print the default policy, explained.", rich_help_panel=_CHECKS)
    ] = False,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    protocol: opt.ProtocolOption = opt.ProtocolChoice.disjoint,
    window: opt.WindowOption = None,
    windows: Annotated[
        int | None,
        typer.Option("--windows", help="Windows to read. [default: 4,096 tokens' worth]", rich_help_panel="Text"),
    ] = None,
    bos: opt.BosOption = opt.BosChoice.none,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    revision: opt.RevisionOption = None,
    allow_pickle: opt.PickleOption = False,
    trust_remote_code: opt.RemoteCodeOption = False,
    head_mib: opt.HeadOption = opt.HEAD_MIB,
    seed: opt.SeedOption = 0,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write findings as JUnit XML.", rich_help_panel=_REPORTS),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown.", rich_help_panel=_REPORTS),
    ] = None,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """May MODEL be quantized, may its CANDIDATE be released? Exit code 0 pass, 1 fail, 2 bad input, 3 inconclusive."""
    from ternary_probe.gates import EXIT_CODES, all_checks, default_policy_text, load_policy, run_gate

    if print_policy:
        typer.echo(default_policy_text(), nl=False)
        return
    if list_checks:
        typer.echo("\n".join(_listing(all_checks().values())))
        return
    if model is None:
        raise ProbeError("gate needs a MODEL: a hub id, a folder, a .gguf file or 'demo'")
    check_output(None, json)
    for path, option in ((junit, "--junit"), (markdown, "--markdown")):
        _check_file(path, option)
    silent = quiet or json == "-"
    loading = LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code)._asdict()
    options = _options(
        loading, text, dataset, protocol.value, window, windows, bos.value, seed, random_init, head_mib, samples
    )
    chosen = load_policy(policy)
    with progress_bar(quiet=silent) as progress:
        record = run_gate(
            model,
            candidate,
            policy=chosen,
            tiers=_tiers(parameters_only=parameters_only, scan=scan_weights, response=not skip_response),
            options=options,
            progress=progress,
        )
    _write(record, junit, markdown)
    from ternary_probe.reports.terminal import gate_view

    publish(record, lambda: gate_view(record), json=json, quiet=quiet)
    code = EXIT_CODES[record.verdict]
    if code:
        raise typer.Exit(code)


def _options(
    loading: dict[str, object],
    text: str | None,
    dataset: str | None,
    protocol: str,
    window: int | None,
    windows: int | None,
    bos: str,
    seed: int,
    random_init: bool,
    head_mib: int,
    samples: str | None,
) -> GateOptions:
    from ternary_probe.gates import GateOptions

    return GateOptions(
        loading=loading,
        text=text,
        dataset=dataset,
        protocol=protocol,
        window=window,
        windows=windows,
        bos=bos,
        seed=seed,
        random_init=random_init,
        head_bytes=head_mib << 20,
        sample_logs=_sample_logs(samples),
    )


def _tiers(*, parameters_only: bool, scan: bool, response: bool) -> list[Tier]:
    from ternary_probe.gates import Tier

    tiers = [Tier.PARAMETERS]
    if scan:
        tiers.append(Tier.SCAN)
    if not parameters_only:
        tiers.append(Tier.FORWARD)
        if response:
            tiers.append(Tier.RESPONSE)
    return tiers


def _sample_logs(samples: str | None) -> tuple[Path, Path] | None:
    if samples is None:
        return None
    parts = [Path(part) for part in opt.split(samples)]
    if len(parts) != 2:
        raise ProbeError(f"--samples {samples}: give two folders, BASE,CANDIDATE, written by lm_eval --log_samples")
    return parts[0], parts[1]


def _check_file(path: Path | None, option: str) -> None:
    if path is not None and path.is_dir():
        raise ProbeError(f"{option} {path} is a folder: name a file in it")
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ProbeError(f"cannot write to {path}: {reason}; choose another file with {option}") from error


def _write(record: GateRecord, junit: Path | None, markdown: Path | None) -> None:
    if junit is not None:
        from ternary_probe.reports.junit import write_junit

        write_junit(record, junit)
    if markdown is not None:
        import shlex
        import sys

        from ternary_probe.records import write_atomically
        from ternary_probe.reports.markdown import to_markdown

        write_atomically(markdown, to_markdown(record, command_line=shlex.join(["ternary-probe", *sys.argv[1:]])))


def _listing(checks: Iterable[Check]) -> list[str]:
    lines: list[str] = []
    for check in checks:
        against = ", needs --candidate" if check.compares else ""
        lines += [f"{check.name}  ({check.tier.value}{against}; severity {check.severity})", f"    {check.summary}"]
        for name, field in check.limits.model_fields.items():
            lines.append(f"    {name} = {field.default}: {field.description}")
    return lines
