"""``ternary-probe-lm-eval``: lm-eval's own command line, with the model and the plugin's tasks known to it."""

from __future__ import annotations

import sys
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
_NO_LM_EVAL = "ternary-probe-lm-eval: lm-eval is not installed: pip install 'ternary-probe[lm-eval]'\n"


def main() -> None:
    """Run lm-eval's command line. Exit code 2 and one sentence for an error of the user's."""
    try:
        from lm_eval.__main__ import cli_evaluate

        from ternary_probe.errors import ProbeError
        from ternary_probe_lm_eval.registration import register
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        sys.stderr.write(_NO_LM_EVAL)
        sys.exit(2)
    try:
        register()
        sys.argv[1:] = with_own_tasks(sys.argv[1:])
        cli_evaluate()
    except ProbeError as error:
        sys.stderr.write(f"ternary-probe-lm-eval: {' '.join(str(error).split())}\n")
        sys.exit(2)


def with_own_tasks(arguments: list[str]) -> list[str]:
    """Let lm-eval find the plugin's tasks by name, where it runs tasks and was not given a folder of its own.

    Args:
        arguments: The command line.

    Returns:
        The command line to use.
    """
    runs = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("--"))
    asks = any(argument in {"-h", "--help"} for argument in arguments)
    given = any(argument.partition("=")[0] == "--include_path" for argument in arguments)
    if not runs or asks or given or not TASKS.is_dir():
        return arguments
    return [*arguments, "--include_path", str(TASKS)]


if __name__ == "__main__":
    main()
