"""``ternary-probe inspect``."""

from __future__ import annotations

from ternary_probe.cli import options as opt
from ternary_probe.cli.session import LoadOptions, check_output, load_model, publish


def inspect(
    model: opt.ModelArgument,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    device_map: opt.DeviceMapOption = None,
    revision: opt.RevisionOption = None,
    allow_pickle: opt.PickleOption = False,
    trust_remote_code: opt.RemoteCodeOption = False,
    json: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """The anatomy of MODEL: what perturbations would touch, and what they would not, with the reason."""
    from ternary_probe.reports.terminal import inspect_view
    from ternary_probe.studies.inspection import run_inspection

    check_output(None, json)
    silent = quiet or json == "-"
    loading = LoadOptions(dtype, device, device_map, revision, allow_pickle, trust_remote_code)
    record = run_inspection(load_model(model, loading, quiet=silent))
    publish(record, lambda: inspect_view(record), json=json, quiet=quiet)
