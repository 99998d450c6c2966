"""Which ways lead from lm-eval's command line to the model, found by taking them.

``python -m ternary_probe_lm_eval.routes plain`` tries the two of plain ``lm_eval``, ``… console`` that of the console script;
both print JSON. Each attempt is a run with a model that does not exist: the route works where the model's own complaint
about that comes back. lm-eval's own tasks, which play no part, are not indexed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

HOOK_YAML = Path(__file__).parent / "ternary_probe.yaml"
MISSING = "/no/such/model/of/ternary_probe"  # a path, so that nobody looks for it on the Hub
EMPTY = "group: ternary_probe_doctor\ntask: []\nmetadata: {version: 0}\n"


def command(tasks: str) -> list[str]:
    """Return lm-eval arguments that get as far as the model.

    Args:
        tasks: What stands behind ``--tasks``.

    Returns:
        The arguments.
    """
    return ["--model", "ternary_probe", "--model_args", f"pretrained={MISSING}", "--tasks", tasks]


def try_plain() -> dict[str, str | None]:
    """Run plain ``lm_eval`` in this process, first without the hook, then with it, which registers the model for good.

    Returns:
        By route, None where it works, or why it does not.
    """
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.yaml"
        empty.write_text(EMPTY, encoding="utf-8")
        return {
            "entry point": _attempt("lm_eval.__main__:cli_evaluate", str(empty)),
            "hook YAML": _attempt("lm_eval.__main__:cli_evaluate", str(HOOK_YAML)),
        }


def try_console() -> dict[str, str | None]:
    """Run what the console script runs.

    Returns:
        As `try_plain`.
    """
    return {"console script": _attempt("ternary_probe_lm_eval.console:main", "ternary_probe_nll")}


def _attempt(program: str, tasks: str) -> str | None:
    # Imported by name: a release without it is an answer, too.
    module, _, name = program.partition(":")
    try:
        main = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    said = io.StringIO()
    before, sys.argv = sys.argv, ["lm_eval", *command(tasks)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except (Exception, SystemExit) as error:  # whatever it raises is why the route does not work
        complaint = said.getvalue() if isinstance(error, SystemExit) else str(error)
        return (
            None
            if f"there is no folder {MISSING}" in complaint
            else re.split(r"(?<=[.!])\s", (complaint or repr(error)).strip())[0][:200]
        )
    finally:
        sys.argv = before
    return "lm-eval ran without a model"


def main() -> None:
    """Print the outcome of the attempts named on the command line."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, AttributeError):
        tasks = importlib.import_module("lm_eval.tasks")
        tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)  # type: ignore[attr-defined]
    attempts = {"plain": try_plain, "console": try_console}
    sys.stdout.write(json.dumps(attempts[sys.argv[1]]()) + "\n")


if __name__ == "__main__":
    main()
