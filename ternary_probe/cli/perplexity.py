"""``ternary-probe perplexity``."""

from __future__ import annotations

from typing import Annotated

import typer

from ternary_probe.cli import options as opt
from ternary_probe.cli.session import LoadOptions, TextOptions, check_output, cut_text, load_model, publish, status


def perplexity(
    model: opt.ModelArgument,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    protocol: opt.ProtocolOption = opt.ProtocolChoice.disjoint,
    window: opt.WindowOption = None,
    windows: Annotated[
        int | None, typer.Option("--windows", help="Windows to score; all if absent.", rich_help_panel="Text")
    ] = None,
    stride: opt.StrideOption = None,
    bos: opt.BosOption = opt.BosChoice.none,
    perturb: Annotated[
        str | None, typer.Option("--perturb", help="Recipe applied while scoring: sign_flip:rate=0.005,seed=3.")
    ] = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    revision: opt.RevisionOption = None,
    allow_pickle: opt.PickleOption = False,
    trust_remote_code: opt.RemoteCodeOption = False,
    head_mib: opt.HeadOption = opt.HEAD_MIB,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Token, word and byte perplexity of MODEL on a text, with the protocol that made them."""
    from ternary_probe.reports.terminal import perplexity_view
    from ternary_probe.studies.perplexity import run_perplexity
    from ternary_probe.text import calibration_windows

    check_output(None, json)
    silent = quiet or json == "-"
    loading = LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code)
    loaded = load_model(model, loading, quiet=silent)
    cutting = TextOptions(text, dataset, protocol.value, window, stride, windows, bos.value)
    content, cut = cut_text(loaded, cutting)
    with status("scoring", quiet=silent):
        record = run_perplexity(
            loaded,
            cut,
            recipe=perturb,
            calibration=lambda: calibration_windows(content, loaded.tokenizer, cut),
            head_bytes=head_mib << 20,
        )
    publish(record, lambda: perplexity_view(record), json=json, quiet=quiet)
