"""What stands in ``--model_args``: checked by name, and a recipe put together again.

lm-eval cuts ``perturb=sign_flip:rate=0.005,columns=outlier`` at its comma and guesses the type of each value, by one parser
on the command line and by another in ``simple_evaluate("…")``. So what looks like an option of a recipe is put back behind
``perturb``, in the order given, and values are cast here. ``;`` joins the options of a recipe, too, and is never cut.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import KINDS, Columns, Perturbation, from_description, parse
from ternary_probe.text import Bos

ProtocolChoice = Literal["rolling", "disjoint", "strided"]
Quant = Literal["nf4", "int8"]

HEAD_MIB = 40
_LOADING = ("dtype", "device", "device_map", "revision", "allow_pickle", "trust_remote_code", "tokenizer", "quant")
_PERTURBING = ("perturb", "seed", "calibration")
_SCORING = ("protocol", "bos", "window", "stride", "softmax_dtype", "head_mib")
_HARNESS = (  # handed on to HFLM as they are
    "batch_size",
    "max_batch_size",
    "max_length",
    "truncation",
    "mixed_precision_dtype",
    "add_bos_token",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)
_HARMLESS = {"backend": "causal", "logits_cache": True, "use_fast_tokenizer": True, "parallelize": False}
_INSTEAD = {
    "gguf_file": "give the .gguf file itself as pretrained=",
    "subfolder": "give the folder itself as pretrained=",
    "load_in_4bit": "use quant=nf4",
    "load_in_8bit": "use quant=int8",
    "quantization_config": "use quant=nf4 or quant=int8, or load the model in Python and wrap it with as_lm",
    "parallelize": "use device_map=auto",
    "max_memory_per_gpu": "use device_map=auto",
    "peft": "merge the adapter into the weights first",
    "delta": "add the delta to the weights first",
    "autogptq": "load the model in Python and wrap it with as_lm",
    "gptqmodel": "load the model in Python and wrap it with as_lm",
    "tp_plan": "use device_map=auto",
    "backend": "only causal language models are supported",
    "logits_cache": "equal contexts are always shared here",
}
_NEXT_PART = re.compile(rf"\+(?=(?:{'|'.join(KINDS)})(?:[:+]|$))")
_SEPARATOR = re.compile(r";(?=\s*[A-Za-z_]+=)")  # before name=; elsewhere it parts the items of a list


def recipe_options() -> frozenset[str]:
    """Return the names of all options a recipe string can have."""
    names = {name for kind in KINDS.values() for name in kind.model_fields} - {"kind", "counts", "parts"}
    return frozenset(names | {"columns"} | (set(Columns.model_fields) - {"select", "listed", "outlier"}))


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of the model.

    Attributes:
        recipe: What is done to the weights while anything is scored.
        calibration: Text file on which a recipe's outlier columns are measured; the sample text if None.
        protocol: How a document is cut into windows.
        bos: Where a BOS stands.
        window: Positions a window of a document; None for as many as the model takes.
        stride: New tokens a window under ``strided``.
        softmax_dtype: Least precision of the log-softmax; sums are float64. See `scoring` on what float32 costs.
        head_bytes: Upper bound for the logits held at a time.
        quant: Quantize while loading.
        loading: Arguments of `ternary_probe.loading.load`.
        tokenizer: Another tokenizer than the model's own, or None.
        harness: Arguments handed on to HFLM.
    """

    recipe: Perturbation | None = None
    calibration: str | None = None
    protocol: ProtocolChoice = "rolling"
    bos: Bos = "once"
    window: int | None = None
    stride: int | None = None
    softmax_dtype: str = "float32"
    head_bytes: int = HEAD_MIB << 20
    quant: Quant | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    harness: Mapping[str, Any] = field(default_factory=dict)


def read_arguments(options: Mapping[str, Any]) -> Arguments:
    """Check and cast the model's arguments.

    Args:
        options: Everything but ``pretrained``, in the order given.

    Returns:
        The arguments.

    Raises:
        ProbeError: If a name is unknown, a value does not fit, or two exclude each other.
    """
    fields = recipe_options()
    _refuse_unknown(options, fields)
    protocol, bos = _protocol(options)
    stride = _integer(options, "stride", least=1)
    if stride is not None and protocol != "strided":
        raise ProbeError(f"stride={stride} needs protocol=strided, not {protocol}")
    quant = options.get("quant")
    if quant is not None and quant not in get_args(Quant):
        raise ProbeError(f"quant={quant} is not known: choose one of {', '.join(get_args(Quant))}")
    head = _integer(options, "head_mib", least=1)
    harness = {name: options[name] for name in _HARNESS if options.get(name) is not None}
    for name, least in (("max_length", 1), ("max_batch_size", 1), ("prefix_token_id", 0)):
        if name in harness:
            harness[name] = _integer(options, name, least=least)
    return Arguments(
        recipe=_recipe(options, fields),
        calibration=None if options.get("calibration") is None else str(options["calibration"]),
        protocol=protocol,
        bos=bos,
        window=_integer(options, "window", least=2),
        stride=stride,
        softmax_dtype=str(options.get("softmax_dtype") or "float32").removeprefix("torch."),
        head_bytes=(head or HEAD_MIB) << 20,
        quant=cast("Quant | None", quant),
        loading=_loading(options),
        tokenizer=options.get("tokenizer"),
        harness=harness,
    )


def refuse_repeated(text: str) -> None:
    """Refuse a ``--model_args`` text that names an option twice: lm-eval would keep the last one and lose the other.

    Args:
        text: ``name=value`` pairs separated by commas.

    Raises:
        ProbeError: If a name occurs twice.
    """
    if text.lstrip().startswith("{"):
        return
    names = [piece.partition("=")[0].strip() for piece in text.split(",") if "=" in piece]
    for name in names:
        if names.count(name) > 1:
            raise ProbeError(
                f"{name}= stands twice in --model_args, and lm-eval keeps only the last: join the options of a recipe "
                "by ';', as in 'perturb=magnitude:rate=0.01;seed=1+sign_flip:rate=0.01;seed=2'"
            )


def command_line_text(argv: Sequence[str]) -> str:
    """Return the ``--model_args`` of a command line as one text.

    Args:
        argv: The command line.

    Returns:
        What followed ``--model_args`` (``-a``), joined by commas; empty without it.
    """
    found: list[str] = []
    inside = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            inside = name in {"--model_args", "-a"}
            found += [value] if inside and equals else []
        elif inside:
            found.append(argument)
    return ",".join(found)


def _refuse_unknown(options: Mapping[str, Any], fields: Iterable[str]) -> None:
    known = ["pretrained", *_LOADING, *_PERTURBING, *_SCORING, *_HARNESS]
    for name, value in options.items():
        if name in known or name in fields or (name in _HARMLESS and value == _HARMLESS[name]):
            continue
        if name in _INSTEAD:
            raise ProbeError(f"argument {name}={value} is not supported by this model: {_INSTEAD[name]}")
        close = difflib.get_close_matches(name, [*known, *fields], n=1)
        if close:
            raise ProbeError(f"unknown argument {name!r}: did you mean {close[0]}?")
        raise ProbeError(
            f"unknown argument {name!r}: known are {', '.join(known)}, and behind perturb= the options of a recipe, whose "
            "lists are separated by ';'"
        )


def _recipe(options: Mapping[str, Any], fields: Iterable[str]) -> Perturbation | None:
    given = options.get("perturb")
    loose = {name: value for name, value in options.items() if name in fields and name != "seed" and value is not None}
    if given is None or given == "":
        stray = next(iter(loose), "seed" if options.get("seed") is not None else None)
        if stray is not None:
            raise ProbeError(f"{stray}={options[stray]} is an option of a recipe: give perturb=, or leave it out")
        return None
    seed = _integer(options, "seed", least=0)
    if isinstance(given, Perturbation | Mapping):
        if loose:
            raise ProbeError(
                f"{next(iter(loose))}= and a recipe that is not text exclude each other: put it in the recipe"
            )
        recipe = given if isinstance(given, Perturbation) else from_description(given)
        return recipe if seed is None else recipe.model_copy(update={"seed": seed})
    names = list(options)
    place = names.index("perturb")
    text = str(given)
    for name in [*(n for n in names[:place] if n in loose), *(n for n in names[place:] if n in loose or n == "seed")]:
        if options[name] is not None:
            last = _NEXT_PART.split(text)[-1]
            text += f"{',' if ':' in last else ':'}{name}={_text(options[name])}"
    if seed is not None and names.index("seed") < place:
        text = _seeded(text, seed)
    return read_recipe(text)


def read_recipe(recipe: str | Mapping[str, Any] | Perturbation) -> Perturbation:
    """Read a recipe in any of the forms a user may hold it in.

    Args:
        recipe: A recipe, its string with options joined by ``,`` or ``;``, or its JSON.

    Returns:
        The recipe.
    """
    if isinstance(recipe, Perturbation):
        return recipe
    if isinstance(recipe, Mapping):
        return from_description(recipe)
    return parse(_SEPARATOR.sub(",", recipe))


def _seeded(text: str, seed: int) -> str:
    """Give the seed to every part of a recipe that has none of its own."""
    return "+".join(
        part if re.search(r"[:,;]\s*seed=", part) else f"{part}{',' if ':' in part else ':'}seed={seed}"
        for part in _NEXT_PART.split(text)
    )


def _protocol(options: Mapping[str, Any]) -> tuple[ProtocolChoice, Bos]:
    bos = options.get("bos", "once" if "bos" not in options else None)
    bos = "none" if bos is None else str(bos)  # the harness reads bos=none as None on one of its routes
    if bos not in get_args(Bos):
        raise ProbeError(f"bos={bos} is not known: choose one of {', '.join(get_args(Bos))}")
    protocol = options.get("protocol")
    if protocol is None:
        protocol = "strided" if options.get("stride") is not None else ("rolling" if bos == "once" else "disjoint")
    if protocol not in get_args(ProtocolChoice):
        raise ProbeError(f"protocol={protocol} is not known: choose one of {', '.join(get_args(ProtocolChoice))}")
    if protocol != "rolling" and "bos" not in options:
        bos = "none"
    if protocol == "rolling" and bos != "once":
        raise ProbeError(
            f"protocol=rolling has one prefix token before each document: bos={bos} needs protocol=disjoint"
        )
    return cast("ProtocolChoice", protocol), cast("Bos", bos)


def _loading(options: Mapping[str, Any]) -> dict[str, Any]:
    names = ("dtype", "device", "device_map", "revision")
    loading: dict[str, Any] = {n: str(options[n]).removeprefix("torch.") for n in names if options.get(n) is not None}
    for name in ("allow_pickle", "trust_remote_code"):
        value = options.get(name)
        if value is not None:
            if not isinstance(value, bool):
                raise ProbeError(f"{name}={value} is neither True nor False")
            loading[name] = value
    return loading


def _integer(options: Mapping[str, Any], name: str, *, least: int) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not number.is_integer() or number < least:
        raise ProbeError(f"{name}={value} is no whole number of at least {least}")
    return int(number)


def _text(value: Any) -> str:
    """Write a value as a recipe string has it."""
    if isinstance(value, list | tuple):
        return ";".join(map(_text, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
