"""Which ways lead from lm-eval to the plugin here. The plugin tries them in processes of its own: nothing is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

PLUGIN = "ternary_probe_lm_eval"
SCRIPT = "ternary-probe-lm-eval"
_PATIENCE = 300  # seconds
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def find_routes(*, attempt: bool = True) -> dict[str, Any]:
    """Find lm-eval, the hook YAML, and which routes work.

    Args:
        attempt: Try the routes, in two processes that start lm-eval.

    Returns:
        Name to what a reader sees; ``lm-eval routes`` maps each route to ``works`` or to why it does not.
    """
    spec = importlib.util.find_spec(PLUGIN)
    if spec is None or spec.origin is None:
        return {"lm-eval plugin": f"{PLUGIN} cannot be imported: reinstall ternary-probe"}
    plugin = Path(spec.origin).parent
    found: dict[str, Any] = {
        "lm-eval hook YAML": str(plugin / "ternary_probe.yaml"),
        "lm-eval tasks": str(plugin / "tasks"),
    }
    try:
        version = metadata.version("lm-eval")
    except metadata.PackageNotFoundError:
        return {"lm-eval": "not installed: pip install 'ternary-probe[lm-eval]'", **found}
    routes = _try_routes(Path(spec.origin).parent.parent) if attempt else {}
    return {"lm-eval": version, **found, "lm-eval routes": {f"lm-eval by {name}": how for name, how in routes.items()}}


def _try_routes(plugins: Path) -> dict[str, str]:
    library = Path(__file__).parents[2]
    paths = [str(plugins), str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **_OFFLINE, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    script = shutil.which(SCRIPT, path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
    plain, own = (
        _start([sys.executable, "-m", f"{PLUGIN}.routes", name], environment) for name in ("plain", "console")
    )
    routes = {**_read(plain, "entry point", "hook YAML"), **_read(own, "console script")}
    if routes["console script"] == "works" and script is None:
        routes["console script"] = f"works as python -m {PLUGIN}.console; {SCRIPT} itself is not on the PATH"
    return routes


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _read(process: subprocess.Popen[str], *routes: str) -> dict[str, str]:
    """Wait for the attempts of a process."""
    try:
        out, errors = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return dict.fromkeys(routes, f"no answer within {_PATIENCE} s")
    try:
        found = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return dict.fromkeys(routes, f"lm-eval does not start: {errors.strip().rpartition(chr(10))[2][:200]}")
    return {name: "works" if found[name] is None else found[name] for name in routes}
