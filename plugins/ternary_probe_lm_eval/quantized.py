"""``quant=nf4|int8``: bitsandbytes while loading; and what must not be done to the packed weights it leaves."""

from __future__ import annotations

import fnmatch
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ternary_probe.errors import ProbeError
from ternary_probe.hub_files import fetch_checkpoint
from ternary_probe.loading import LoadedModel, assemble, classify, fetch_demo, open_or_unpickle
from ternary_probe.perturb import Composed, Perturbation
from ternary_probe.pretrained import Origin, parse_device, parse_dtype
from ternary_probe_lm_eval.arguments import Quant


def load_quantized(
    source: str,
    quant: Quant,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model as `ternary_probe.loading.load` does, its linear layers quantized by bitsandbytes.

    Args:
        source: ``demo``, a folder or a hub id.
        quant: ``nf4`` (4 bits, blocks of 64) or ``int8`` (LLM.int8()).
        dtype: Of everything that is not quantized, and of the arithmetic.
        device: As in `load`.
        device_map: As in `load`.
        revision: As in `load`.
        allow_pickle: As in `load`.
        trust_remote_code: As in `load`.

    Returns:
        The loaded model; a note says how it is quantized.

    Raises:
        ProbeError: If bitsandbytes is absent, or the source is a GGUF file or quantized already.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ProbeError(f"quant={quant} needs bitsandbytes: pip install 'ternary-probe[bnb]'")
    kind = classify(source)
    if kind == "gguf":
        raise ProbeError(f"quant={quant} needs a folder or hub id with safetensors, and {source} is a GGUF file")
    placement = parse_device(device, device_map)
    folder = {"demo": fetch_demo, "folder": lambda: Path(source).expanduser()}.get(
        kind, lambda: fetch_checkpoint(source, revision)
    )()
    checkpoint = open_or_unpickle(folder, source, allow_pickle=allow_pickle, on_hub=kind == "hub")
    if checkpoint is not None and checkpoint.config.get("quantization_config") is not None:
        raise ProbeError(f"{source} is quantized already: leave quant= out")
    location, where = (source, {"revision": folder.name}) if kind == "hub" else (str(folder), {})
    how = {"use_safetensors": checkpoint is not None, "quantization_config": _config(quant, parse_dtype(dtype))}
    origin = Origin(source, location, folder, where, how, trust_remote_code)
    return assemble(origin, kind, parse_dtype(dtype), placement, checkpoint, (f"quantized while loading: {quant}",))


def _config(quant: Quant, dtype: torch.dtype | str) -> Any:
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = {"bnb_4bit_compute_dtype": dtype} if isinstance(dtype, torch.dtype) else {}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **compute)


def packed_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of weights stored as integers: an edit of theirs would be nonsense without an error.

    Args:
        model: The model.

    Returns:
        Qualified names of the parameters, in the model's order.
    """
    return tuple(name for name, p in model.named_parameters() if not p.is_floating_point() and not p.is_complex())


def refuse_packed(recipe: Perturbation, packed: tuple[str, ...]) -> None:
    """Refuse a recipe that would have to touch packed weights.

    Args:
        recipe: The recipe.
        packed: Names of the packed weights.

    Raises:
        ProbeError: If its patterns match one.
    """
    if not packed:
        return
    for part in recipe.parts if isinstance(recipe, Composed) else (recipe,):
        names = {name for full in packed for name in (full, full.removesuffix(".weight"))}
        hit = {n for n in names if not part.include or any(fnmatch.fnmatchcase(n, pattern) for pattern in part.include)}
        hit = {n for n in hit if not any(fnmatch.fnmatchcase(n, pattern) for pattern in part.exclude)}
        if hit:
            raise ProbeError(
                f"recipe {part} would touch {min(hit)} and others, whose weights are stored packed ({len(packed)} matrices): "
                "name floating-point matrices with include=, or perturb the model before it is quantized"
            )
