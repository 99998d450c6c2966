"""One checked call of ``from_pretrained``: no weight is drawn at random, none is dropped unsaid."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ternary_probe.errors import ProbeError

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    **dict.fromkeys(("float64", "fp64"), torch.float64),
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.*",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "*.bpe.model",
)


PACKED_METHOD = "ternary_probe"
PACKED_PLUGIN = "ternary_probe_transformers"


class LoadingError(ProbeError):
    """A checkpoint was found but does not make a usable model."""


class Placement(NamedTuple):
    """Where the weights go.

    Attributes:
        device_map: What transformers is given, None for the CPU.
        spread: Whether accelerate decides, so that weights may be offloaded.
    """

    device_map: str | dict[str, str] | None
    spread: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """What ``from_pretrained`` is pointed at.

    Attributes:
        label: The user's name for it, for messages.
        location: Folder or hub id.
        folder: Where the files lie on this machine.
        where: Arguments that say which files are meant (``revision``, ``gguf_file``).
        how: Arguments that say how to read the weights (``use_safetensors``, ``quantization_config``).
        trust_remote_code: Whether code of the checkpoint may run.
    """

    label: str
    location: str
    folder: Path
    where: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def parse_dtype(name: str) -> torch.dtype | str:
    """Turn a dtype's name into what ``from_pretrained`` takes.

    Args:
        name: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16``, ``float16``, ``float64`` or a short form.

    Returns:
        The torch dtype, or ``"auto"``.

    Raises:
        LoadingError: If the name is not known.
    """
    if name not in DTYPES:
        raise LoadingError(f"dtype {name!r} is not known: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(device: str, device_map: str | None) -> Placement:
    """Decide where the weights go.

    Args:
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        device_map: An accelerate device map, which then decides alone; or None.

    Returns:
        The placement.

    Raises:
        LoadingError: If the device is unknown or absent, or both arguments name one.
    """
    if device_map is not None:
        if device != "auto":
            raise LoadingError(f"device {device!r} and device map {device_map!r} exclude each other: give one of them")
        return Placement(device_map, spread=True)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise LoadingError(f"device {device!r} is not known: choose auto, cpu, cuda or cuda:N") from error
    if parsed.type == "cpu":
        return Placement(None, spread=False)
    if parsed.type != "cuda":
        raise LoadingError(f"device {device!r} is not supported: choose auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = parsed.index or 0
    if index >= count:
        have = (
            f"this machine has {count} CUDA device{'s' * (count != 1)}" if count else "this machine has no CUDA device"
        )
        raise LoadingError(f"device {device!r} cannot be used: {have}; choose cpu or another index")
    return Placement({"": f"cuda:{index}"}, spread=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and reports off the terminal, unless this package logs at debug level.

    Yields:
        Nothing. What the silenced reports would say is checked by `check_weights`.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    settings = transformers.utils.logging
    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    chatter = io.StringIO()
    try:
        # some bars, and code of a checkpoint, ask nobody's settings
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()


def load_model(
    origin: Origin, dtype: torch.dtype | str, placement: Placement
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Build the model and make sure that all of it came from the checkpoint.

    Args:
        origin: What to load.
        dtype: A torch dtype or ``"auto"``, applied while loading (a later cast would also cast what must stay fp32).
        placement: Where to.

    Returns:
        The model in eval mode without gradients, and notes for the record.

    Raises:
        LoadingError: If transformers cannot build it, or weights are missing, misshapen, dropped or on the meta device.
    """
    packed = prepare_packed(origin)
    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                origin.location,
                dtype=dtype,
                device_map=placement.device_map,
                trust_remote_code=origin.trust_remote_code,
                ignore_mismatched_sizes=True,  # reported by name and shape in `check_weights`, which raises
                output_loading_info=True,
                **origin.where,
                **origin.how,
            )
    except torch.OutOfMemoryError as error:
        raise LoadingError(
            f"{origin.label} does not fit on the device: try --device-map auto or a smaller --dtype"
        ) from error
    except Exception as error:  # transformers raises nearly every type there is; --debug shows the chain
        raise LoadingError(explain(origin, error)) from error
    notes = check_weights(origin.label, model, info) + check_places(origin.label, model, placement)
    if packed:
        notes += unpack_weights(origin.label, model)
    return model.eval().requires_grad_(False), notes


def prepare_packed(origin: Origin) -> bool:
    """Register the quantizer of our packed checkpoints with transformers, if this is one.

    Args:
        origin: What will be loaded.

    Returns:
        Whether it is one.

    Raises:
        LoadingError: If it is and the plugin is not installed.
    """
    file = origin.folder / "config.json"
    if "gguf_file" in origin.where or not file.is_file():
        return False
    claim = json.loads(file.read_bytes()).get("quantization_config")
    if not isinstance(claim, dict) or claim.get("quant_method") != PACKED_METHOD:
        return False
    try:
        importlib.import_module(PACKED_PLUGIN)
    except ImportError as error:
        raise LoadingError(
            f"{origin.label} is packed by ternary_probe and {PACKED_PLUGIN}, which reads it, cannot be imported: "
            "reinstall ternary-probe"
        ) from error
    return True


def unpack_weights(label: str, model: PreTrainedModel) -> tuple[str, ...]:
    """Turn a packed model into the dense one it stands for, bit for bit: every study needs weights it can see and edit.

    Args:
        label: The user's name for it.
        model: The model as loaded.

    Returns:
        A note for the record.

    Raises:
        LoadingError: If packed weights are offloaded.
    """
    scheme = model.config.quantization_config.scheme
    try:
        model.dequantize()
    except ValueError as error:
        raise LoadingError(f"{label} cannot be unpacked: {error}") from error
    return (f"unpacked from a packed ternary checkpoint of scheme {scheme}: the weights lie on that grid",)


def explain(origin: Origin, error: Exception) -> str:
    """Turn what transformers raised into one sentence.

    Args:
        origin: What was loaded.
        error: The exception.

    Returns:
        The sentence, naming the input.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return f"{origin.label} needs code from its own repository: read it, then pass --trust-remote-code"
    if text.startswith("Unrecognized configuration class"):
        return f"{origin.label} is not a causal language model that transformers {transformers.__version__} knows"
    sentence = text.split(". ")[0].rstrip(".")
    return f"{origin.label} cannot be loaded: {sentence if len(sentence) <= 300 else sentence[:297] + '...'}"


def check_weights(label: str, model: PreTrainedModel, info: dict[str, Any]) -> tuple[str, ...]:
    """Compare what the model wanted with what the checkpoint gave.

    Args:
        label: The user's name for the checkpoint.
        model: The model.
        info: transformers' loading info; tied weights are already taken out of its missing keys.

    Returns:
        A note for each kind of harmless surplus.

    Raises:
        LoadingError: If a weight would be random, has another shape, or belongs to a layer without a place for it.
    """
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, wanted = mismatched[0][:3]
        more = f" ({len(mismatched)} such weights)" if len(mismatched) > 1 else ""
        raise LoadingError(
            f"{label} does not fit its config: {name} is {list(stored)} on disk and {list(wanted)} in the model{more}"
        )
    missing = sorted(set(info["missing_keys"]) - shared_names(model, set(info["missing_keys"])))
    if missing:
        raise LoadingError(
            f"{label} lacks {len(missing)} weights of the model, which would be random: {first(missing)}"
        )
    unexpected = sorted(info["unexpected_keys"])
    # A weight that differs from one of the model's in nothing but numbers belongs to a layer the config leaves out.
    places = {re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()}
    dropped = [
        name
        for name in unexpected
        if owns_parameters(model, name.rpartition(".")[0]) or re.sub(r"\d+", "*", name) in places
    ]
    if dropped:
        raise LoadingError(
            f"{label} holds {len(dropped)} weights that its config leaves no place for: {first(dropped)}"
        )
    if unexpected:
        logger.warning("%s holds %d weights that the model does not use: %s", label, len(unexpected), first(unexpected))
        return (f"{len(unexpected)} tensors on disk are not part of the model: {first(unexpected)}",)
    return ()


def shared_names(model: PreTrainedModel, names: set[str]) -> set[str]:
    """The names among `names` whose storage also goes by a name outside them: tied, hence loaded.

    Args:
        model: The model.
        names: Names of parameters or buffers.

    Returns:
        A subset of `names`.
    """
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }
    loaded = {tensor.untyped_storage().data_ptr() for name, tensor in state.items() if name not in names}
    return {name for name in names if name in state and state[name].untyped_storage().data_ptr() in loaded}


def owns_parameters(model: PreTrainedModel, module_name: str) -> bool:
    """Whether a module of that name exists and has parameters of its own.

    Args:
        model: The model.
        module_name: A dotted name, with or without the base model's prefix.

    Returns:
        The answer.
    """
    for name in (module_name, f"{model.base_model_prefix}.{module_name}"):
        try:
            return next(model.get_submodule(name).parameters(recurse=False), None) is not None
        except AttributeError:
            continue
    return False


def check_places(label: str, model: PreTrainedModel, placement: Placement) -> tuple[str, ...]:
    """Look for parameters without data.

    Args:
        label: The user's name for the checkpoint.
        model: The model.
        placement: What was asked for.

    Returns:
        A note on offloaded parameters, if a device map was asked for.

    Raises:
        LoadingError: If parameters are on the meta device though nothing may be offloaded.
    """
    absent = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if not absent:
        return ()
    if not placement.spread:
        raise LoadingError(f"{label} left {len(absent)} parameters on the meta device, without data: {first(absent)}")
    return (f"{len(absent)} parameters are offloaded by the device map: {first(absent)}",)


def load_tokenizer(origin: Origin) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Load the tokenizer, if there is one.

    Args:
        origin: What to load.

    Returns:
        The tokenizer and None, or None and one sentence on why there is none.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                origin.location, trust_remote_code=origin.trust_remote_code, **origin.where
            )
    except Exception as error:  # kept for `require_tokenizer`: parameters can be studied without
        if not tokenizer_files(origin):
            return None, f"{origin.label} has no tokenizer: save one beside the weights"
        return None, f"the tokenizer of {explain(origin, error)}"
    if not tokenizer_files(origin):  # transformers makes up an empty tokenizer for some architectures
        return None, f"{origin.label} has no tokenizer: save one beside the weights"
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        return None, f"the tokenizer of {origin.label} has no vocabulary: its files are incomplete"
    return tokenizer, None


def tokenizer_files(origin: Origin) -> list[Path]:
    """The files a tokenizer could be in.

    Args:
        origin: The checkpoint.

    Returns:
        Those that exist; for a GGUF the file itself.
    """
    if gguf_file := origin.where.get("gguf_file"):
        return [origin.folder / gguf_file]
    return [file for pattern in TOKENIZER_FILES for file in origin.folder.glob(pattern)]


def first(names: list[str], count: int = 3) -> str:
    """The first few names of a list, for a message.

    Args:
        names: The names.
        count: How many.

    Returns:
        The names with commas, and an ellipsis if there are more.
    """
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")
