"""Where a text comes from: the sample, a file, or a data set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ternary_probe.data import sample_text
from ternary_probe.errors import ProbeError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["WIKITEXT_LABEL", "Text", "read_text"]

_WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
WIKITEXT_LABEL = f"{_WIKITEXT[0]}:{_WIKITEXT[1]}:test"
_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True)
class Text:
    """A text, its label, and how it was put together.

    Attributes:
        content: The characters.
        label: A file path, a data set, or ``sample``.
        joining: How the content was put together.
    """

    content: str
    label: str
    joining: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the content in UTF-8, hexadecimal."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(source: str | PathLike[str] | None = None, *, dataset: str | None = None) -> Text:
    """Read the sample text, a file or a data set.

    Args:
        source: Path of a UTF-8 file (``None`` or ``"sample"``: the sample text of the package). It is taken as it is,
            but for a byte order mark, which is dropped and mentioned.
        dataset: ``wikitext`` (WikiText-2 raw, test), a local JSON, JSON-lines, Parquet, CSV or text file, a local
            folder, or a hub id; it needs a ``text`` column, whose rows are joined by a blank line. The split ``test``
            is taken if there is one, else the only split. Needs the ``datasets`` package.

    Returns:
        The text, never empty.

    Raises:
        ProbeError: If the source cannot be read, is not UTF-8, holds no text, or both arguments are given.
    """
    if source is not None and dataset is not None:
        raise ProbeError(f"both a text file ({source}) and a data set ({dataset}) are given: pass only one of them")
    if dataset is not None:
        text = _read_dataset(dataset)
    elif source is None or source == "sample":
        text = Text(sample_text(), "sample", "as is")
    else:
        text = _read_file(Path(source))
    if not text.content.strip():
        raise ProbeError(f"text '{text.label}' is empty or only white space: give a text with words in it")
    return text


def _read_file(path: Path) -> Text:
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ProbeError(f"text file '{path}' cannot be read ({reason}): give the path of a UTF-8 text file") from error
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProbeError(
            f"text file '{path}' is not UTF-8 (byte {raw[error.start]:#04x} at byte offset {error.start}): "
            "convert it to UTF-8"
        ) from error
    bare = content.removeprefix("\ufeff")
    return Text(bare, str(path), "as is" if bare == content else "as is, byte order mark dropped")


def _read_dataset(name: str) -> Text:
    try:
        import datasets
    except ImportError as error:
        raise ProbeError(
            f"data set '{name}' needs the datasets package: pip install ternary-probe[datasets], "
            "or give a file with --text"
        ) from error
    path = Path(name)
    try:
        if name == "wikitext":
            label, rows = WIKITEXT_LABEL, datasets.load_dataset(*_WIKITEXT, split="test")
        else:
            if path.is_file() and path.suffix not in _LOADERS:
                raise ProbeError(f"data set file '{name}' has an unknown ending: use one of {', '.join(_LOADERS)}")
            if path.is_file():
                splits = datasets.load_dataset(_LOADERS[path.suffix], data_files=str(path))
            elif (path / "dataset_dict.json").is_file():
                splits = datasets.load_from_disk(name)
            elif (path / "state.json").is_file():
                splits = {"all": datasets.load_from_disk(name)}
            else:
                splits = datasets.load_dataset(name)
            split = _only_split(name, list(splits))
            label, rows = f"{name}:{split}", splits[split]
    except ProbeError:
        raise
    except Exception as error:  # the hub client, the file readers and the builders share no base class
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ProbeError(
            f"data set '{name}' cannot be loaded ({reason}): give a local file or folder, "
            "or check the name and the network"
        ) from error
    return Text(_join_rows(name, rows), label, "rows joined by a blank line")


def _only_split(name: str, splits: list[str]) -> str:
    if "test" in splits:
        return "test"
    if len(splits) != 1:
        raise ProbeError(
            f"data set '{name}' has no split 'test' but {', '.join(splits)}: give one of its files instead"
        )
    return splits[0]


def _join_rows(name: str, rows: Any) -> str:
    if "text" not in rows.column_names:
        raise ProbeError(
            f"data set '{name}' has no column 'text', only {', '.join(rows.column_names)}: rename the column"
        )
    lines = list(rows["text"])
    for index, line in enumerate(lines):
        if not isinstance(line, str):
            raise ProbeError(
                f"data set '{name}' holds a {type(line).__name__} in row {index} of column 'text': give only strings"
            )
    return "\n\n".join(lines)
