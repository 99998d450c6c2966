"""Where a model came from and what a reader of its report must know about it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from ternary_probe.checkpoint import Checkpoint
from ternary_probe.errors import ProbeError

STORED_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Kind = Literal["hub", "folder", "gguf", "demo", "memory"]

_INTEGERS = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model came from, as the record keeps it.

    Attributes:
        name: The name as the user gave it.
        kind: What that name turned out to be.
        path: The resolved folder or file, None for a model that was never on disk.
        revision: The commit on the Hub, None elsewhere.
        dtype: The dtype most of the weights have, for example ``bfloat16``.
        device: The device, or several joined by commas.
        config_sha256: SHA-256 of ``config.json``; where there is none, of the config as sorted JSON.
        notes: Sentences a reader of a report must know.
    """

    name: str
    kind: Kind
    path: str | None
    revision: str | None
    dtype: str
    device: str
    config_sha256: str
    notes: tuple[str, ...] = ()


def main_dtype(model: PreTrainedModel) -> str:
    """The floating dtype of most of the model's entries.

    Args:
        model: The model.

    Returns:
        Its name without ``torch.``; ``none`` for a model without floating parameters.
    """
    entries: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            entries[parameter.dtype] += parameter.numel()
    return str(entries.most_common(1)[0][0]).removeprefix("torch.") if entries else "none"


def devices(model: PreTrainedModel) -> str:
    """The devices a model lies on.

    Args:
        model: The model.

    Returns:
        Their names, sorted and joined by commas; accelerate's word (``cpu``, ``disk``) for offloaded parts.
    """
    places = getattr(model, "hf_device_map", None)
    if places:
        names = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values()}
    else:
        names = {str(parameter.device) for parameter in model.parameters()}
    return ",".join(sorted(names))


def config_object_digest(model: PreTrainedModel) -> str:
    """SHA-256 of a config that has no file: sorted JSON, without what differs from machine to machine.

    Args:
        model: The model.

    Returns:
        64 hexadecimal digits.
    """
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in {"_name_or_path", "transformers_version"}
    }
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def quantization_notes(model: PreTrainedModel) -> tuple[str, ...]:
    """Say that a model is held in quantized form.

    Args:
        model: The model.

    Returns:
        At most one note.
    """
    claim = getattr(model.config, "quantization_config", None)
    if claim is None:
        return ()
    method = claim.get("quant_method") if isinstance(claim, dict) else getattr(claim, "quant_method", None)
    return (f"the checkpoint is quantized: {getattr(method, 'value', method)}",)


def tie_notes(model: PreTrainedModel) -> tuple[str, ...]:
    """Say that a head which the config calls tied has weights of its own.

    Args:
        model: The model.

    Returns:
        At most one note.
    """
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return ()
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        return ()
    if embedding is None or head is None or embedding.weight is head.weight:
        return ()
    return (
        "the config says that head and embedding are tied, but the checkpoint holds two different matrices: kept apart",
    )


def dtype_notes(checkpoint: Checkpoint, model: PreTrainedModel) -> tuple[str, ...]:
    """Say that ``auto`` followed the config to another dtype than the weights are stored in.

    Args:
        checkpoint: The headers.
        model: The model loaded from it.

    Returns:
        At most one note.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return ()  # scales of another dtype belong to the format
    loaded = main_dtype(model)
    others = Counter(
        entry.dtype
        for entry in checkpoint.tensors.values()
        if entry.dtype in STORED_FLOATS and str(STORED_FLOATS[entry.dtype]) != f"torch.{loaded}"
    )
    if not others:
        return ()
    stored = ", ".join(f"{count} as {dtype}" for dtype, count in others.most_common())
    return (
        f"of {len(checkpoint.tensors)} tensors {stored} are stored, and loaded as {loaded} because the config says so",
    )


def refuse_stray_integers(checkpoint: Checkpoint, model: PreTrainedModel, label: str) -> None:
    """Refuse integers on disk where the model computes with floats and no quantization config says how to scale them.

    Args:
        checkpoint: The headers.
        model: The model loaded from it.
        label: The user's name for the checkpoint.

    Raises:
        ProbeError: If there is such a tensor; as a plain cast its values are off by an unknown factor.
    """
    if checkpoint.config.get("quantization_config") is not None:
        return
    floats = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    stray = sorted(n for n, e in checkpoint.tensors.items() if n in floats and e.dtype in _INTEGERS)
    if stray:
        raise ProbeError(
            f"{label} stores {stray[0]} as {checkpoint.tensors[stray[0]].dtype} ({len(stray)} such weights), and its config "
            "names no quantization: without the scale the values mean nothing, dequantize the checkpoint first"
        )


def eight_bit_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say that weights were read from fp8 without a scale.

    Args:
        checkpoint: The headers.

    Returns:
        At most one note.
    """
    if checkpoint.config.get("quantization_config") is not None:
        return ()
    count = sum(entry.dtype.startswith("F8") for entry in checkpoint.tensors.values())
    return (f"{count} tensors are stored as fp8 and were read without a scale: the config names none",) if count else ()


def zero_notes(label: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Look for weight matrices of nothing but zeros, as an interrupted download leaves them.

    Args:
        label: The user's name for the checkpoint.
        model: The model loaded from it.

    Returns:
        A note naming them, if any.

    Raises:
        ProbeError: If all of them are zero.
    """
    floats = {n: p for n, p in model.named_parameters() if p.ndim > 1 and p.is_floating_point() and not p.is_meta}
    # The first row is nearly always enough to tell.
    zero = [n for n, p in floats.items() if not bool(p[:1].any()) and not bool(p.any())]
    if floats and len(zero) == len(floats):
        raise ProbeError(
            f"every weight matrix of {label} is zero: its data were never written, fetch the checkpoint again"
        )
    return (f"{len(zero)} weight matrices are all zero: {zero[0]}",) if zero else ()
