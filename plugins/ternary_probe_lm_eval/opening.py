"""From ``pretrained=`` and the arguments to a loaded model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, load, wrap
from ternary_probe.pretrained import parse_dtype
from ternary_probe_lm_eval.arguments import Arguments
from ternary_probe_lm_eval.quantized import load_quantized


def open_model(pretrained: str | PreTrainedModel | LoadedModel, arguments: Arguments) -> LoadedModel:
    """Load a model by its name, or take the one in memory.

    Args:
        pretrained: ``demo``, a hub id, a folder, a ``.gguf`` file, or a model.
        arguments: The checked arguments.

    Returns:
        The loaded model, with the tokenizer asked for.

    Raises:
        ProbeError: If it cannot be loaded so, or arguments concern loading and there is nothing to load.
    """
    if isinstance(pretrained, str):
        loaded = (
            load(pretrained, **arguments.loading)
            if arguments.quant is None
            else load_quantized(pretrained, arguments.quant, **arguments.loading)
        )
        return loaded if arguments.tokenizer is None else _with_tokenizer(loaded, arguments.tokenizer)
    loading = dict(arguments.loading)
    loading.pop("device", None)  # lm-eval hands one on, whatever the model
    if arguments.quant is not None:
        loading["quant"] = arguments.quant
    if loading:
        raise ProbeError(f"{next(iter(loading))}= concerns loading, and this model is in memory already: leave it out")
    loaded = pretrained if isinstance(pretrained, LoadedModel) else wrap(pretrained)
    return loaded if arguments.tokenizer is None else _with_tokenizer(loaded, arguments.tokenizer)


def _with_tokenizer(loaded: LoadedModel, tokenizer: Any) -> LoadedModel:
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except Exception as error:  # transformers raises nearly every type there is
            raise ProbeError(f"tokenizer={tokenizer} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    return replace(loaded, tokenizer=tokenizer, tokenizer_problem=None)


def read_softmax_dtype(name: str) -> torch.dtype:
    """Read the dtype of the log-softmax.

    Args:
        name: Its name.

    Returns:
        The dtype.

    Raises:
        ProbeError: If it is none.
    """
    dtype = parse_dtype(name)
    if not isinstance(dtype, torch.dtype):
        raise ProbeError("softmax_dtype=auto means nothing: choose float32, float64, bfloat16 or float16")
    return dtype


def with_present_device(options: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Read lm-eval's default device, cuda:0, as "whatever there is": it hands it on even if nobody asked for it.

    Args:
        options: The model's arguments.
        notes: Told where there is no CUDA device.

    Returns:
        The arguments with a device that exists.
    """
    device = options.get("device")
    options = {name: value for name, value in options.items() if name != "device"}
    if options.get("device_map") is not None:
        return dict(options)
    if "LOCAL_RANK" in os.environ and str(device).partition(":")[0] == "cuda" and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if str(device) in {"cuda", "cuda:0"} and not torch.cuda.is_available():
        notes.append("this machine has no CUDA device, so that lm-eval's default device is the CPU here")
        device = "cpu"
    return options if device is None else {**options, "device": str(device)}
