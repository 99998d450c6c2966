"""The files of a checkpoint, in a folder or on the Hub, read by ranges and counted; nothing is downloaded whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ternary_probe.errors import ProbeError

_HEAD = 32 << 10  # bytes of a hub file fetched at once: most shards' headers fit
_CONNECTIONS = 8


class Range(NamedTuple):
    """Bytes ``begin`` to ``end`` (exclusive) of a file."""

    file: str
    begin: int
    end: int


class Files(Protocol):
    """A set of files that can be read by ranges.

    Attributes:
        label: What messages call the place.
        bytes_read: Bytes of file content fetched so far.
    """

    label: str
    bytes_read: int

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every file in bytes, by name."""

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Fetch the bytes of a file from one position up to another; fewer where the file ends."""

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Fetch several ranges, in their order."""

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        """Fill a buffer from a position on and return the number of bytes written, fewer where the file ends."""

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch the beginnings of files that will be read next, where that saves time."""


class FolderFiles:
    """Files of a local folder.

    Args:
        folder: The folder.
        label: What messages call it; the folder itself if None.
    """

    def __init__(self, folder: Path, label: str | None = None) -> None:
        self.label = label or str(folder)
        self.bytes_read = 0
        self._folder = folder

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Length of every file in bytes, by name."""
        return {path.name: path.stat().st_size for path in sorted(self._folder.iterdir()) if path.is_file()}

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Read a range.

        Args:
            name: File name.
            begin: First byte.
            end: One past the last.

        Returns:
            The bytes; fewer where the file ends.
        """
        buffer = bytearray(max(0, min(end, self.sizes.get(name, end)) - begin))
        return bytes(buffer[: self.read_into(name, begin, memoryview(buffer))])

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read several ranges.

        Args:
            ranges: What to read.

        Returns:
            The bytes of each.
        """
        return [self.read(*one) for one in ranges]

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        """Fill a buffer.

        Args:
            name: File name.
            begin: First byte.
            buffer: Where to.

        Returns:
            Bytes written.

        Raises:
            ProbeError: If the file cannot be read.
        """
        done = 0
        try:
            with (self._folder / name).open("rb", buffering=0) as stream:  # a buffer would read more than was asked for
                stream.seek(begin)
                while done < len(buffer) and (count := stream.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise ProbeError(f"{self._folder / name} cannot be read: {error.strerror or error}") from error
        self.bytes_read += done
        return done

    def prefetch(self, names: Iterable[str]) -> None:
        """Do nothing: the disk is near.

        Args:
            names: File names.
        """


class HubFiles:
    """Files of a repository on the Hugging Face Hub, pinned to one commit, read by HTTP ranges.

    Args:
        repository: The hub id.
        revision: Branch, tag or commit; None for the default branch.
    """

    def __init__(self, repository: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self.label = repository
        self.bytes_read = 0
        self._heads: dict[str, bytes] = {}
        self._lock = threading.Lock()
        with _hub_errors(repository, revision):
            api = HfApi()
            self.commit = str(api.model_info(repository, revision=revision).sha)
            listed = api.list_repo_tree(repository, revision=self.commit)
            self.sizes: dict[str, int] = {entry.path: entry.size for entry in listed if hasattr(entry, "size")}

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Fetch a range, or cut it out of the beginning of the file where that was fetched already.

        Args:
            name: File name.
            begin: First byte.
            end: One past the last.

        Returns:
            The bytes; fewer where the file ends.
        """
        end = min(end, self.sizes.get(name, end))
        if begin >= end:
            return b""
        head = self._heads.get(name, b"")
        if end <= len(head):
            return head[begin:end]
        if begin == 0 and end < _HEAD and name not in self._heads:
            self.prefetch([name])
            return self.read(name, begin, end)
        kept = head[begin:]
        return kept + self._fetch(name, begin + len(kept), end)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Fetch several ranges, a few at a time.

        Args:
            ranges: What to read.

        Returns:
            The bytes of each.
        """
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(lambda one: self.read(*one), ranges))

    def read_into(self, name: str, begin: int, buffer: memoryview) -> int:
        """Fill a buffer.

        Args:
            name: File name.
            begin: First byte.
            buffer: Where to.

        Returns:
            Bytes written.
        """
        data = self.read(name, begin, begin + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch the beginnings of files, a few at a time.

        Args:
            names: File names.
        """
        wanted = [name for name in names if name in self.sizes and name not in self._heads]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            heads = pool.map(lambda name: self._fetch(name, 0, min(_HEAD, self.sizes[name])), wanted)
            self._heads.update(zip(wanted, heads, strict=True))

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, http_stream_backoff  # type: ignore[attr-defined]

        if begin >= end:
            return b""
        headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.label, name, revision=self.commit)
        # Streamed, so that a server which ignores the range is noticed before it has sent gigabytes.
        stream = http_stream_backoff("GET", url, headers=headers, follow_redirects=True)
        with _hub_errors(self.label, self.commit), stream as answer:
            self._require_range(answer, name, whole=begin == 0 and end == self.sizes.get(name))
            data = b"".join(answer.iter_bytes())
        with self._lock:
            self.bytes_read += len(data)
        if len(data) != end - begin:
            raise ProbeError(
                f"the server sent {len(data)} bytes of {self.label}/{name} where {end - begin} were asked for: try again"
            )
        return data

    def _require_range(self, answer: Any, name: str, *, whole: bool) -> None:
        if answer.status_code == 206 or (whole and answer.status_code == 200):
            return
        why = "it ignores ranges" if answer.status_code == 200 else f"status {answer.status_code}"
        raise ProbeError(
            f"the server does not give parts of {self.label}/{name} ({why}): download it and pass the folder"
        )


def open_files(source: str, revision: str | None) -> Files:
    """Open what MODEL names, without downloading or building anything but the demo model.

    Args:
        source: ``demo``, a folder, or a hub id; with ``HF_HUB_OFFLINE`` set its snapshot in the local cache is read.
        revision: Branch, tag or commit of a hub id.

    Returns:
        Its files.

    Raises:
        ProbeError: If there is no such folder or repository, or a revision is given for something else.
    """
    path = Path(source).expanduser()
    on_hub = source != "demo" and not path.exists()
    if revision is not None and not on_hub:
        raise ProbeError(f"a revision needs a model on the Hub, and {source} is not one: drop --revision")
    if source == "demo":
        from ternary_probe.demo_model import fetch_demo  # brings in torch, which converts it the first time

        return FolderFiles(fetch_demo())
    if path.is_dir():
        return FolderFiles(path)
    if path.exists():
        raise ProbeError(f"{source} is a file: give the folder that holds it, or a .gguf file")
    if not source.strip() or source.startswith((".", "~", "/")) or source.count("/") > 1 or "\\" in source:
        raise ProbeError(f"there is no folder {source!r}")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        from ternary_probe.hub_files import fetch_checkpoint

        return FolderFiles(fetch_checkpoint(source, revision), source)
    return HubFiles(source, revision)


def require_present(source: str, revision: str | None) -> None:
    """Refuse what names nothing, before any check runs: a mistyped name is bad input, not an open question.

    Args:
        source: MODEL as the user gave it.
        revision: Branch, tag or commit of a hub id.

    Raises:
        ProbeError: If there is no such folder, file or repository.
    """
    if source != "demo" and not Path(source).expanduser().exists():
        open_files(source, revision)


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    from ternary_probe.hub_files import HubError, named_errors

    try:
        with named_errors(repository, revision):
            yield
    except ProbeError:
        raise
    except Exception as error:  # the HTTP library's own classes, which differ between its versions
        short = " ".join(str(error).split())[:200] or type(error).__name__
        raise HubError(f"{repository} cannot be read from the Hub: {short}") from error
