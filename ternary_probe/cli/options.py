"""Options that several commands share, each defined once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ternary_probe.errors import ProbeError


class ProtocolChoice(StrEnum):
    """How text is cut into windows."""

    disjoint = "disjoint"
    rolling = "rolling"
    strided = "strided"
    dong2026 = "dong2026"


class BosChoice(StrEnum):
    """Where a BOS token stands."""

    none = "none"
    once = "once"
    every_window = "every_window"


_LOADING, _TEXT, _OUTPUT = "Loading", "Text", "Output"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file, or 'demo'.", show_default=False)
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16, float16 or float64.", rich_help_panel=_LOADING)
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_LOADING)]
DeviceMapOption = Annotated[
    str | None, typer.Option("--device-map", help="accelerate's device map, such as auto.", rich_help_panel=_LOADING)
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.", rich_help_panel=_LOADING)
]
PickleOption = Annotated[
    bool, typer.Option("--allow-pickle", help="Read .bin weights; a pickle can run code.", rich_help_panel=_LOADING)
]
RemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code a checkpoint brings.", rich_help_panel=_LOADING)
]
TextOption = Annotated[
    str | None,
    typer.Option("--text", metavar="FILE", help="Text to score; the sample text if absent.", rich_help_panel=_TEXT),
]
DatasetOption = Annotated[
    str | None,
    typer.Option("--dataset", help="wikitext, or a local data set with a text column.", rich_help_panel=_TEXT),
]
ProtocolOption = Annotated[
    ProtocolChoice,
    typer.Option("--protocol", help="How text is cut; dong2026 is arXiv 2605.18933's exactly.", rich_help_panel=_TEXT),
]
WindowOption = Annotated[
    int | None, typer.Option("--window", help="Tokens a window (512; dong2026: 2048).", rich_help_panel=_TEXT)
]
StrideOption = Annotated[
    int | None, typer.Option("--stride", help="New tokens a window, for --protocol strided.", rich_help_panel=_TEXT)
]
BosOption = Annotated[BosChoice, typer.Option("--bos", help="Where a BOS token stands.", rich_help_panel=_TEXT)]
HeadOption = Annotated[
    int, typer.Option("--head-mib", min=1, help="Largest chunk of logits, MiB.", rich_help_panel=_LOADING)
]
HEAD_MIB = 48  # as measure.nll.HEAD_BYTES, whose import would load torch; a test compares them
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the record; '-' prints only JSON.", rich_help_panel=_OUTPUT),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.", rich_help_panel=_OUTPUT)]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="First seed.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Report folder; finished cells are kept there and a rerun continues.",
        rich_help_panel=_OUTPUT,
    ),
]


def split(text: str | None) -> tuple[str, ...]:
    """Split a comma- or semicolon-separated option.

    Args:
        text: The option, or ``None``.

    Returns:
        Its parts, without empty ones.
    """
    return tuple(part.strip() for part in (text or "").replace(";", ",").split(",") if part.strip())


def split_rates(text: str) -> tuple[float, ...]:
    """Read ``0.001,0.5%`` as rates.

    Args:
        text: The option.

    Returns:
        Shares; whether they make sense is the study's to say.

    Raises:
        ProbeError: If a part is no number.
    """
    rates = []
    for part in split(text):
        try:
            rates.append(float(part[:-1]) / 100 if part.endswith("%") else float(part))
        except ValueError:
            raise ProbeError(f"--rates {text}: {part!r} is not a number; use shares such as 0.001,0.005") from None
    return tuple(rates)


def split_numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Read ``1,2,4`` as numbers.

    Args:
        text: The option's text, or ``None``.
        option: The option's name, for the message.

    Returns:
        The numbers.

    Raises:
        ProbeError: If a part is no number.
    """
    try:
        return tuple(float(part) for part in split(text))
    except ValueError:
        raise ProbeError(f"{option} {text}: give numbers separated by commas, such as 1,2,4") from None
