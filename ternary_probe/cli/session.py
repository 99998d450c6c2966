"""What every command does around its work: load, report progress, publish the record."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ternary_probe.loading import LoadedModel
    from ternary_probe.records import Record
    from ternary_probe.text import Text, Windows


class LoadOptions(NamedTuple):
    """How a command loads its model."""

    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False


class TextOptions(NamedTuple):
    """How a command cuts its text."""

    text: str | None = None
    dataset: str | None = None
    protocol: str = "disjoint"
    window: int | None = None
    stride: int | None = None
    windows: int | None = None
    bos: str = "none"


def load_model(model: str, options: LoadOptions, *, quiet: bool) -> LoadedModel:
    """Load a model with a note on stderr, since that can take a while.

    Args:
        model: As given on the command line.
        options: How.
        quiet: No note.

    Returns:
        The loaded model.
    """
    with status(f"loading {model}", quiet=quiet):
        from ternary_probe.loading import load

        return load(model, **options._asdict())


def cut_text(loaded: LoadedModel, options: TextOptions) -> tuple[Text, Windows]:
    """Read and cut the text a command scores.

    Args:
        loaded: The model, for its tokenizer and vocabulary.
        options: How.

    Returns:
        The text and its windows.
    """
    from ternary_probe.loading import require_tokenizer, vocabulary_size
    from ternary_probe.text import make_windows, read_text

    text = read_text(options.text, dataset=options.dataset)
    windows = make_windows(
        text,
        require_tokenizer(loaded),
        protocol=options.protocol,  # type: ignore[arg-type]  # an enum's value
        window=options.window,
        stride=options.stride,
        windows=options.windows,
        bos=options.bos,  # type: ignore[arg-type]
        vocab_size=vocabulary_size(loaded.model),
    )
    return text, _checked_length(loaded, windows)


def _checked_length(loaded: LoadedModel, windows: Windows) -> Windows:
    """Refuse windows beyond a table of learned positions; note those beyond what the model was made for."""
    from torch import nn

    length = int(windows.inputs.shape[1])
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or length <= limit:
        return windows
    words = loaded.model.get_input_embeddings()
    tables = [m.num_embeddings for m in loaded.model.modules() if isinstance(m, nn.Embedding) and m is not words]
    if any(limit <= rows < length for rows in tables):  # some tables hold a few rows more than positions
        raise ProbeError(
            f"a window of {length} tokens does not fit {loaded.source.name}, which has {limit} positions: "
            f"use --window {limit} or less"
        )
    note = f"a window of {length} tokens is more than the {limit} positions the model was made for"
    protocol = windows.protocol.model_copy(update={"notes": (*windows.protocol.notes, note)})
    return replace(windows, protocol=protocol)


@contextlib.contextmanager
def status(label: str, *, quiet: bool) -> Iterator[None]:
    """Show a spinner on stderr while the body runs.

    Args:
        label: What is going on.
        quiet: Show nothing.

    Yields:
        Nothing.
    """
    if quiet:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield


@contextlib.contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar with the remaining time on stderr.

    Args:
        quiet: Show nothing.

    Yields:
        A function of (done, total, label).
    """
    if quiet:
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def check_output(out: Path | None, json: str | None) -> None:
    """Find out before any work whether results can be written where the user wants them.

    Args:
        out: Report folder.
        json: Record file, or ``-``.

    Raises:
        ProbeError: If a folder cannot be made or written to.
    """
    import tempfile

    targets = [(out, "--out")] if out is not None else []
    if json is not None and json != "-":
        if Path(json).is_dir():
            raise ProbeError(f"--json {json} is a folder: name a file in it")
        targets.append((Path(json).parent, "--json"))
    for folder, option in targets:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ProbeError(f"cannot write to {folder}: {reason}; choose another folder with {option}") from error


def publish(
    record: Record, view: Callable[[], RenderableType], *, json: str | None, quiet: bool, closing: str = ""
) -> None:
    """Print the table and write the record.

    Args:
        record: The result.
        view: Makes the table.
        json: Record file, ``-`` for stdout, or ``None``.
        quiet: No table.
        closing: A last line.
    """
    if json == "-":
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
        return
    if json is not None:
        record.save(Path(json))
    if not quiet:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:  # piped: no wrapping at an imagined terminal's 80 columns
            console = Console(width=120)
        console.print(view())
        if closing:
            console.print(closing, highlight=False, soft_wrap=True)
