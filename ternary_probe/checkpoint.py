"""What is on disk: config, safetensors headers, and single tensors on request. No model is built."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ternary_probe.errors import ProbeError
from ternary_probe.safetensors_header import BrokenFileError, TensorEntry, read_header

if TYPE_CHECKING:
    import torch

__all__ = [
    "BrokenFileError",
    "Checkpoint",
    "CheckpointError",
    "TensorEntry",
    "config_digest",
    "open_checkpoint",
    "pickle_files",
    "read_config",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_PATTERN = "model-*-of-*.safetensors"
PICKLE_PATTERNS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointError(ProbeError):
    """A checkpoint folder is incomplete or contradicts itself."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder whose headers have been read and found sane.

    Attributes:
        folder: The folder.
        config: The content of ``config.json``.
        files: The safetensors files that together hold the weights, sorted by name.
        tensors: Where each tensor lies, by name. Tied weights that were saved once appear once.
    """

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, and only its bytes.

        Args:
            name: A key of `tensors`.

        Returns:
            The tensor on the CPU, in its stored dtype: fp8 stays fp8, to be upcast before arithmetic and
            multiplied by its companion scale.

        Raises:
            CheckpointError: If there is no such tensor.
        """
        from safetensors import safe_open  # brings in torch, which headers do without

        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        with safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the config and every safetensors header of a folder, and check them against each other.

    Args:
        path: A folder with ``config.json`` and either ``model.safetensors`` or an index with its shards.

    Returns:
        The checkpoint. Only headers are read: kilobytes, whatever the model's size.

    Raises:
        CheckpointError: If the folder, its config or its weights are missing, or index and shards disagree.
            A damaged safetensors file raises `BrokenFileError`, which says what is wrong with it.
    """
    config = read_config(path)
    single, index = path / SINGLE, path / INDEX
    if index.is_file():
        weight_map = read_index(index)
        if single.is_file() and SINGLE not in weight_map.values():
            raise CheckpointError(
                f"{path} holds both {SINGLE} and {INDEX}, which names other files: remove the stale one"
            )
        tensors = read_shards(path, weight_map)
    elif single.is_file():
        tensors = read_header(single)
    else:
        raise CheckpointError(no_weights(path))
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors: its safetensors header is empty")
    return Checkpoint(path, config, tuple(sorted({entry.file for entry in tensors.values()})), tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Args:
        folder: The checkpoint folder.

    Returns:
        Its content.

    Raises:
        CheckpointError: If folder or file are missing, or it is not a JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    file = folder / CONFIG
    if not file.is_file():
        adapter = (
            " (it holds a PEFT adapter: merge that into its base model and save the result)"
            if (folder / "adapter_config.json").is_file()
            else ""
        )
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {CONFIG}{adapter}")
    return read_object(file)


def config_digest(folder: Path) -> str:
    """SHA-256 of ``config.json``, byte for byte.

    Args:
        folder: The checkpoint folder.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Args:
        file: The file.

    Returns:
        The object.

    Raises:
        CheckpointError: If it cannot be read, is not JSON, or is not an object.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def read_index(file: Path) -> dict[str, str]:
    """Read the weight map of a sharded checkpoint.

    Args:
        file: The index file.

    Returns:
        Shard file name by tensor name, not empty.

    Raises:
        CheckpointError: If the map is missing, empty, or names something that is no plain file name.
    """
    weight_map = read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map")
    for name, shard in weight_map.items():
        # a shard in another folder is never written by a library, and may point anywhere on the machine
        if not isinstance(shard, str) or shard in {"", ".", ".."} or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{file} maps {name!r} to {shard!r}, which is not a file name")
    return weight_map


def read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    """Read the shards an index names, and check index and headers against each other, both ways.

    Args:
        folder: The checkpoint folder.
        weight_map: Shard file name by tensor name.

    Returns:
        The entries by tensor name.

    Raises:
        CheckpointError: If a shard is missing or unlisted, a tensor is not where the index says, or a shard holds
            one that the index does not place there.
    """
    index = folder / INDEX
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard}, which is missing")
    unlisted = sorted(
        file.name for file in folder.iterdir() if fnmatch.fnmatch(file.name, SHARD_PATTERN) and file.name not in shards
    )
    if unlisted:
        raise CheckpointError(f"{folder} holds the shard {unlisted[0]}, which {INDEX} does not list")
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            elsewhere = next((other for other in shards if name in headers[other]), None)
            where = f"it is in {elsewhere}" if elsewhere else "no shard holds it"
            raise CheckpointError(f"{index} places {name!r} in {shard}, but {where}")
    for shard, header in headers.items():
        for name in header:
            if weight_map.get(name) != shard:
                listed = f"places in {weight_map[name]}" if name in weight_map else "does not list"
                raise CheckpointError(f"{folder / shard} holds {name!r}, which {INDEX} {listed}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def pickle_files(folder: Path) -> tuple[Path, ...]:
    """The PyTorch pickle files a folder holds its weights in.

    Args:
        folder: The checkpoint folder.

    Returns:
        The files transformers would read, empty if there are none.
    """
    return tuple(folder / name for name in PICKLE_PATTERNS if (folder / name).is_file())


def no_weights(folder: Path) -> str:
    """Say what a folder holds in place of the weights it should hold.

    Args:
        folder: The checkpoint folder.

    Returns:
        One sentence.
    """
    if pickles := pickle_files(folder):
        return (
            f"{folder} holds its weights as a pickle ({pickles[0].name}), which can run code when read: "
            f"pass --allow-pickle if you trust it, or save it as safetensors"
        )
    others = sorted(
        file.name for file in folder.iterdir() if file.suffix in {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
    )
    seen = f" (it does hold {', '.join(others[:3])})" if others else ""
    return f"{folder} holds no weights: neither {SINGLE} nor {INDEX}{seen}"
