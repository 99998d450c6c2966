"""The command group and its error policy: one sentence, exit code 2, no traceback unless ``--debug``."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ternary_probe.cli.demo import demo
from ternary_probe.cli.doctor import doctor
from ternary_probe.cli.gate import gate
from ternary_probe.cli.inspect import inspect
from ternary_probe.cli.leverage import leverage
from ternary_probe.cli.perplexity import perplexity
from ternary_probe.cli.quantize import quantize
from ternary_probe.cli.sensitivity import sensitivity
from ternary_probe.cli.theory import theory
from ternary_probe.errors import ProbeError

_INTERRUPTED = 130


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; typer would end it at Ctrl-C without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("ternary-probe: interrupted; with --out, finished cells are kept and a rerun continues\n")
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name="ternary-probe",
    help="How robust is a transformer to low-bit weights?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo, leverage, sensitivity, quantize, gate, perplexity, inspect, theory, doctor):
    app.command()(_command)

_state = {"debug": False}


def _version(wanted: bool) -> None:
    if wanted:
        from ternary_probe import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and log to stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version
    _state["debug"] = debug
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, stream=sys.stderr)


def main() -> None:
    """Run the command line. Exit codes: 0 done or pass, 1 fail, 2 bad usage or unreadable input, 3 inconclusive.

    Raises:
        ProbeError: Under ``--debug``, so that the traceback shows.
    """
    try:
        app()
    except ProbeError as error:
        if _state["debug"]:
            raise
        sys.stderr.write(f"ternary-probe: {' '.join(str(error).split())}\n")
        sys.exit(2)
