"""From a name to a model and its tokenizer: a hub id, a folder, a GGUF file, or ``demo``."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ternary_probe.checkpoint import Checkpoint, config_digest, open_checkpoint, pickle_files, read_config
from ternary_probe.demo_model import demo_notes, fetch_demo
from ternary_probe.gguf_file import drop_quantization_claim, grid_note, unpacking
from ternary_probe.hub_files import fetch_checkpoint
from ternary_probe.model_source import (
    Kind,
    ModelSource,
    config_object_digest,
    devices,
    dtype_notes,
    eight_bit_notes,
    main_dtype,
    quantization_notes,
    refuse_stray_integers,
    tie_notes,
    zero_notes,
)
from ternary_probe.pretrained import (
    LoadingError,
    Origin,
    Placement,
    load_model,
    load_tokenizer,
    parse_device,
    parse_dtype,
)

__all__ = ["LoadedModel", "LoadingError", "ModelSource", "fetch_demo", "load", "require_tokenizer", "wrap"]

logger = logging.getLogger(__name__)

DEMO = "demo"


@dataclass(slots=True)
class LoadedModel:
    """A model ready to be measured.

    Attributes:
        model: In eval mode, no parameter requires a gradient.
        tokenizer: None if there is none; see `require_tokenizer`.
        source: Where it came from.
        tokenizer_problem: Why there is no tokenizer, one sentence.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: ModelSource
    tokenizer_problem: str | None = None


def load(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        source: ``demo``, an existing folder, the path of a ``.gguf`` file, or a hub id; a folder wins over a hub id.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16``, ``float16``, ``float64``, or
            ``fp32``, ``bf16``, ….
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        device_map: An accelerate device map such as ``auto``, instead of a device.
        revision: Branch, tag or commit of a hub id.
        allow_pickle: Read ``pytorch_model.bin`` where there are no safetensors (torch's filter is then
            all that keeps it from executing code).
        trust_remote_code: Run the code a checkpoint brings along.

    Returns:
        The model in eval mode without gradients, tokenizer and source.

    Raises:
        LoadingError: If the source does not exist or does not yield every weight. A damaged one raises another
            `ProbeError`; one sentence says what is wrong and how to mend it.
    """
    wanted, placement = parse_dtype(dtype), parse_device(device, device_map)
    kind = classify(source)
    if revision is not None and kind != "hub":
        raise LoadingError(f"a revision needs a model on the Hub, and {source} is not one: drop --revision")
    path = Path(source).expanduser()
    if kind == "demo":
        folder = fetch_demo()
        origin = Origin(source, str(folder), folder, how={"use_safetensors": True})
        return assemble(origin, "demo", wanted, placement, open_checkpoint(folder), demo_notes(folder))
    if kind == "gguf":
        notes = grid_note(path)
        origin = Origin(source, str(path.parent), path.parent, {"gguf_file": path.name}, unpacking(), trust_remote_code)
        return assemble(origin, "gguf", wanted, placement, None, notes)
    folder = path if kind == "folder" else fetch_checkpoint(source, revision)
    checkpoint = open_or_unpickle(folder, source, allow_pickle=allow_pickle, on_hub=kind == "hub")
    location, where = (str(path), {}) if kind == "folder" else (source, {"revision": folder.name})
    origin = Origin(source, location, folder, where, {"use_safetensors": checkpoint is not None}, trust_remote_code)
    return assemble(origin, kind, wanted, placement, checkpoint, ())


def classify(source: str) -> Kind:
    """Decide what a name means, without looking further than the file system.

    Args:
        source: The name.

    Returns:
        Its kind, never ``memory``.

    Raises:
        LoadingError: If it is empty, a path that does not exist, or a file that is no model.
    """
    if not source.strip():
        raise LoadingError("the model's name is empty: give a hub id, a folder, a .gguf file or 'demo'")
    if source == DEMO:
        return "demo"
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise LoadingError(f"there is no file {source}")
        return "gguf"
    if path.is_file():
        raise LoadingError(f"{source} is a file: give the folder that holds it, or a .gguf file")
    if source.startswith((".", "~", os.sep)) or source.endswith(os.sep) or source.count("/") > 1 or "\\" in source:
        raise LoadingError(f"there is no folder {source}")
    return "hub"


def open_or_unpickle(folder: Path, label: str, *, allow_pickle: bool, on_hub: bool) -> Checkpoint | None:
    """Check the safetensors of a folder, or make sure the user allows its pickle.

    Args:
        folder: A checkpoint folder, or a snapshot of which only config and safetensors were fetched.
        label: The user's name for it.
        allow_pickle: Whether the user allows pickles.
        on_hub: Whether the folder is a snapshot.

    Returns:
        The checkpoint, or None if there are only pickles and they are allowed.

    Raises:
        LoadingError: If there are no safetensors, and on the Hub pickles are not allowed.
    """
    read_config(folder)
    if (folder / "adapter_config.json").is_file():
        raise LoadingError(
            f"{label} holds a PEFT adapter (adapter_config.json) beside a model: merge it into the weights, or remove it"
        )
    if any(folder.glob("model*.safetensors*")):
        return open_checkpoint(folder)
    if allow_pickle and (on_hub or pickle_files(folder)):
        return None
    if on_hub:
        raise LoadingError(f"{label} on the Hub has no safetensors: if you trust its pickle, pass --allow-pickle")
    return open_checkpoint(folder)  # raises, and says what the folder holds instead


def assemble(
    origin: Origin,
    kind: Kind,
    dtype: torch.dtype | str,
    placement: Placement,
    checkpoint: Checkpoint | None,
    notes: tuple[str, ...],
) -> LoadedModel:
    """Load model and tokenizer and describe them.

    Args:
        origin: What to load.
        kind: Its kind.
        dtype: A torch dtype or ``"auto"``.
        placement: Where to.
        checkpoint: The headers, None for a GGUF or a pickle.
        notes: What is known beforehand.

    Returns:
        The loaded model.
    """
    model, loading_notes = load_model(origin, dtype, placement)
    gguf_file = origin.where.get("gguf_file")
    if gguf_file:
        drop_quantization_claim(origin.label, model)
    tokenizer, problem = load_tokenizer(origin)
    notes += loading_notes + quantization_notes(model) + tie_notes(model)
    if checkpoint is not None:
        refuse_stray_integers(checkpoint, model, origin.label)
        notes += eight_bit_notes(checkpoint)
        if dtype == "auto":
            notes += dtype_notes(checkpoint, model)
    notes += zero_notes(origin.label, model)
    described = ModelSource(
        name=origin.label,
        kind=kind,
        path=str((origin.folder / (gguf_file or "")).resolve()),
        revision=origin.where.get("revision"),
        dtype=main_dtype(model),
        device=devices(model),
        config_sha256=config_object_digest(model) if gguf_file else config_digest(origin.folder),
        notes=notes,
    )
    return LoadedModel(model, tokenizer, described, problem)


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str = "model in memory"
) -> LoadedModel:
    """Describe a model that is already in memory; it is put in eval mode and its gradients are switched off.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if any.
        name: What reports call it.

    Returns:
        The loaded model, of kind ``memory``.

    Raises:
        LoadingError: If parameters are on the meta device, unless accelerate put them there.
    """
    absent = [parameter_name for parameter_name, parameter in model.named_parameters() if parameter.is_meta]
    if absent and not getattr(model, "hf_device_map", None):
        raise LoadingError(
            f"{name} has {len(absent)} parameters on the meta device, without data: load its weights first"
        )
    model.eval().requires_grad_(False)
    notes = quantization_notes(model) + tie_notes(model)
    if absent:
        notes += (f"{len(absent)} parameters are offloaded by the device map",)
    source = ModelSource(
        name, "memory", None, None, main_dtype(model), devices(model), config_object_digest(model), notes
    )
    return LoadedModel(
        model, tokenizer, source, None if tokenizer is not None else f"{name} came without a tokenizer: pass one"
    )


def require_tokenizer(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer, for work that needs text.

    Added tokens beyond the vocabulary are tolerated: fine-tunes add padding without an embedding, and transformers
    adds a made-up ``<|endoftext|>`` to GGUF tokenizers. Only text that spells them out meets them.

    Args:
        loaded: A loaded model.

    Returns:
        The tokenizer. The model has an embedding for every id that plain text, BOS and EOS become, and may have more.

    Raises:
        LoadingError: If there is none, or its own vocabulary, BOS or EOS goes beyond the model's.
    """
    name, tokenizer = loaded.source.name, loaded.tokenizer
    if tokenizer is None:
        raise LoadingError(loaded.tokenizer_problem or f"{name} has no tokenizer: save one beside the weights")
    rows = vocabulary_size(loaded.model)
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    optional = set(tokenizer.added_tokens_decoder) - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if needed := sorted(beyond.keys() - optional):
        raise LoadingError(
            f"the tokenizer of {name} is another model's: its token {beyond[needed[-1]]!r} has id {needed[-1]}, "
            f"and the vocabulary ends at {rows - 1}; save the model's own beside the weights"
        )
    if beyond:
        logger.info("%s has no embedding for its tokens %s", name, sorted(beyond.values()))
    return tokenizer


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the input embedding, the config's figure where the model does not name its embedding.

    Args:
        model: The model.

    Returns:
        The number of ids the model accepts.
    """
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return int(model.config.get_text_config().vocab_size)
