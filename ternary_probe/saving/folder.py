"""A checkpoint folder that appears whole or not at all, its tensors written shard by shard."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from ternary_probe.checkpoint import INDEX, SINGLE
from ternary_probe.errors import ProbeError


class SavingError(ProbeError):
    """A model cannot be saved as asked."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a hidden sibling to write to, and rename it once everything is written.

    Args:
        folder: The folder to make: absent or empty.

    Yields:
        The sibling. It is removed if the body raises, Ctrl-C included; after a `kill -9` it remains, and `folder` is as
        it was.

    Raises:
        SavingError: If the folder holds something, or cannot be written.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise SavingError(f"{folder} exists and is not an empty folder: save to another, or remove it first")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.replace(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, safetensors.SafetensorError)):
            reason = getattr(error, "strerror", None) or str(error)
            raise SavingError(f"{folder} cannot be written: {reason}") from error
        raise


class ShardWriter:
    """Collect tensors and write a shard whenever the next one would make it too large.

    At most one shard of new tensors is held (untouched ones are only referred to), and one tensor larger than the limit
    gets a shard of its own.
    """

    def __init__(self, folder: Path, max_shard_size: int) -> None:
        self._folder, self._limit = folder, max_shard_size
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._size = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it must not change before `finish`.

        Args:
            name: Its name in the checkpoint.
            tensor: Its values, on any device.
        """
        if self._pending and self._size + tensor.nbytes > self._limit:
            self._flush()
        dense = tensor.detach().cpu().contiguous()
        # a view would drag its whole storage into the file, or collide with another view of it
        self._pending[name] = dense if dense.untyped_storage().nbytes() == dense.nbytes else dense.clone()
        self._size += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, name the shards by their number, and write the index if there is more than one."""
        self._flush()
        count = len(self._shards)
        names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        weight_map: dict[str, str] = {}
        for (file, tensors), name in zip(self._shards, names, strict=True):
            file.replace(self._folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        file = self._folder / f"shard-{len(self._shards)}"
        save_file(self._pending, file, metadata={"format": "pt"})
        file.chmod(self._folder.stat().st_mode & 0o666)  # safetensors makes its files private
        self._shards.append((file, list(self._pending)))
        self._pending, self._size = {}, 0
