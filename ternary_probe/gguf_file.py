"""GGUF files: checked before loading, unpacked to plain weights, and honest about the grid those lie on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from ternary_probe.errors import ProbeError


class GgufError(ProbeError):
    """A GGUF file is damaged or cannot be unpacked."""


def unpacking() -> dict[str, Any]:
    """Arguments that make ``from_pretrained`` unpack a GGUF, where transformers could also keep the packed blocks.

    Returns:
        The arguments; none for a transformers that always unpacks.
    """
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def tensor_types(file: Path) -> Counter[str]:
    """Count the entries a GGUF stores in each of its types.

    Args:
        file: The file.

    Returns:
        Number of entries by type name (``Q4_1``, ``F32``, …).

    Raises:
        GgufError: If the file is empty, truncated or no GGUF.
    """
    from gguf import GGUFReader

    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        what = (
            "is empty"
            if not magic
            else "is a Git LFS pointer: fetch it with `git lfs pull`"
            if magic == b"vers"
            else "is not a GGUF file"
        )
        raise GgufError(f"{file} {what}")
    try:
        reader = GGUFReader(file)
    except Exception as error:  # the reader indexes past the end in as many ways as there are fields
        raise GgufError(f"{file} is truncated or damaged: download it again") from error
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    return types


def grid_note(file: Path) -> tuple[str, ...]:
    """Say on which grid the weights of a GGUF already lie: it is robust to the same grid for that reason alone.

    Args:
        file: The file.

    Returns:
        At most one note, none for a file of plain floats.
    """
    types = tensor_types(file)
    total = sum(types.values())
    bits = {name: int(match[1]) for name in types if (match := re.match(r"[A-Z]*Q(\d)", name))}
    if not bits:
        return ()
    packed = sorted(bits, key=lambda name: -types[name])
    shares = ", ".join(f"{name} ({types[name] / total:.0%} of the entries)" for name in packed)
    return (f"weights lie on a {bits[packed[0]]}-bit grid: from a GGUF with {shares}",)


def drop_quantization_claim(label: str, model: PreTrainedModel) -> None:
    """Make an unpacked model say that it is not quantized: transformers leaves the claim, and with it refuses to save.

    Args:
        label: The user's name for the file.
        model: The model.

    Raises:
        GgufError: If it still holds packed blocks.
    """
    packed = [name for name, parameter in model.named_parameters() if not parameter.is_floating_point()]
    if packed:
        raise GgufError(f"{label} was not unpacked: {packed[0]} is still in GGUF blocks")
    for holder, claim in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "quantization_method"),
    ):
        if claim in vars(holder):
            delattr(holder, claim)
    model.is_quantized = False
