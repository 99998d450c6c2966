"""What every command does around its work: load, report progress, publish the record."""

from __future__ import annotations

import contextlib
import sys
import tempfile
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
    return text, _with_notes(loaded, windows)


def _with_notes(loaded: LoadedModel, windows: Windows) -> Windows:
    """Note what a reader of the figure would not expect of this model on these windows."""
    from ternary_probe.loading import require_tokenizer, vocabulary_size

    notes = list(windows.protocol.notes)
    length = int(windows.inputs.shape[1])
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        notes.append(f"a window of {length} tokens is more than the {limit} positions the model was made for")
    padding = vocabulary_size(loaded.model) - len(require_tokenizer(loaded))
    if padding > 0:
        notes.append(f"the vocabulary has {padding} entries no token uses; they take part in the softmax")
    return replace(windows, protocol=windows.protocol.model_copy(update={"notes": tuple(notes)}))


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


def check_save(folder: Path | None) -> None:
    """Find out before any work whether a checkpoint can be saved where the user wants it.

    Args:
        folder: The folder to make, or ``None``.

    Raises:
        ProbeError: If it exists and is not empty, or cannot be made.
    """
    if folder is None:
        return
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ProbeError(f"--save {folder} exists and is not empty: choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise ProbeError(
            f"cannot write to {folder.parent}: {(error.strerror or str(error)).lower()}; choose another --save"
        ) from error


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
