"""Check ``tensors``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ternary_probe.gates._block_regularity import Irregularity, irregularities
from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread, worst_first
from ternary_probe.records import Finding, FindingStatus

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.gates._parameters import ParameterEvidence
    from ternary_probe.safetensors_header import TensorEntry

_NAME = "tensors"
# The config fields' usual names: transformers maps each architecture's own to one of these.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})


class TensorLimits(Limits):
    """What counts as an exception among blocks."""

    rare_share: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="share of blocks: a block short of tensors that the others have is at fault when at most this share of "
        "blocks look like it; architectures that share keys and values between blocks have more of them. Our choice",
    )


@check(_NAME, tier=Tier.PARAMETERS, limits=TensorLimits)
def tensors(evidence: Evidence, limits: TensorLimits) -> Iterable[Finding]:
    """Config and tensors must agree, and no block may lack what its like have.

    No table of architectures: blocks are compared with each other, and with what the config says of depth, width, vocabulary,
    tied embeddings and quantization. Where files are missing or broken this is left undecided: `files` names them.

    Yields:
        One finding per fault, or one that all is well.
    """
    found = evidence.subject.parameters
    if (nothing := unread(_NAME, found)) is not None:
        yield nothing
        return
    if found.incomplete:
        names = ", ".join(sorted({problem.file for problem in found.problems})[:3])
        yield fault(
            _NAME, "inconclusive", "", f"which tensors are missing cannot be told while files are broken: {names}"
        )
        return
    faults = [
        *_depth(found),
        *_regularity(found, limits.rare_share),
        *_vocabulary(found),
        *_width(found),
        *_stray_integers(found),
    ]
    yield from worst_first(faults)
    if not faults:
        stack = _main_stack(found)
        where = f" ({stack[0]}, {len(stack[1])} blocks)" if stack else ""
        message = f"{len(found.tensors)} tensors agree with the config and, block by block, with each other{where}"
        yield fault(_NAME, "pass", "", message, 0.0, 0.0, "faults")


def _depth(found: ParameterEvidence) -> Iterator[Finding]:
    depth, stack = _number(found.text_config, _LAYERS), _main_stack(found)
    if depth is None or stack is None:
        return
    prefix, numbers = stack
    measured = (float(len(numbers)), float(depth), "blocks")
    if missing := sorted(set(range(depth)) - set(numbers)):
        message = f"the config has {depth} blocks, and {prefix} lacks {_list(missing)}"
        yield fault(_NAME, "fail", prefix, message, *measured, missing=missing[:100])
    if surplus := sorted(number for number in numbers if number >= depth):
        ahead = _number(found.text_config, _AHEAD) or 0
        if len(surplus) > ahead:  # blocks that predict further tokens ahead are stored behind the last, and declared
            message = f"the config has {depth} blocks, and {prefix} also holds {_list(surplus)}, which a loader drops"
            yield fault(_NAME, "fail", prefix, message, *measured, surplus=surplus[:100])


def _regularity(found: ParameterEvidence, rare_share: float) -> Iterator[Finding]:
    depth, main = _number(found.text_config, _LAYERS), _main_stack(found)
    for prefix, numbers in found.blocks.items():
        last = depth if main is not None and prefix == main[0] else None
        kept = {number: block for number, block in numbers.items() if last is None or number < last}
        for one in irregularities(prefix, kept, rare_share):
            yield _irregular(one)


def _irregular(one: Irregularity) -> Finding:
    name = one.tensors[0]
    more = f" ({len(one.tensors)} such tensors)" if len(one.tensors) > 1 else ""
    status: FindingStatus = "fail" if one.certain else "warn"
    details: dict[str, Any] = {"tensors": list(one.tensors[:100])}
    if one.kind == "shape":
        return fault(_NAME, status, name, f"{name} has shape {one.detail}", **details)
    if one.kind == "adds":
        message = f"{name} is unexpected: no other block of its kind has one{more}"
    else:
        message = f"{name} is missing, which the other blocks have{more}"
    return fault(_NAME, status, one.where, message, float(len(one.tensors)), 0.0, "tensors", **details)


def _vocabulary(found: ParameterEvidence) -> Iterator[Finding]:
    size, width = _number(found.text_config, ("vocab_size",)), _number(found.text_config, _WIDTH)
    if size is None:
        return
    makes_logits = any(
        str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in found.config.get("architectures") or ()
    )
    tables = {name: entry for name, entry in found.tensors.items() if len(entry.shape) == 2 and size in entry.shape}
    if not tables:
        message = f"the config's vocabulary has {size} entries, and no matrix has an axis of that size"
        yield fault(_NAME, "fail" if makes_logits else "warn", "", message, 0.0, 1.0, "matrices")
        return
    if width is not None and not any(width in entry.shape for entry in tables.values()):
        name, entry = next(iter(tables.items()))
        message = f"the config's width is {width}, and the vocabulary matrix {name} is {list(entry.shape)}"
        yield fault(_NAME, "warn", name, message)  # some models project from a narrower embedding
    tied = found.text_config.get("tie_word_embeddings", found.config.get("tie_word_embeddings"))
    if tied is False and makes_logits and len(tables) == 1:
        message = (
            f"the config says that head and embedding are not tied, and {next(iter(tables))} is the only vocabulary matrix: "
            "the head would be drawn at random"
        )
        yield fault(_NAME, "fail", next(iter(tables)), message, 1.0, 2.0, "matrices")
    if tied is True and makes_logits:
        yield from _untied(found, [name for name, entry in tables.items() if width is None or width in entry.shape])


def _untied(found: ParameterEvidence, tables: list[str]) -> Iterator[Finding]:
    """Compare the first bytes of vocabulary matrices that the config calls one."""
    outside = [name for name in tables if not any(name.startswith(f"{prefix}.") for prefix in found.blocks)]
    alike = [name for name in outside if found.tensors[name].shape == found.tensors[outside[0]].shape]
    if len(alike) == 2:
        first, second = (found.read_bytes(name, 0, 4096) for name in alike)
        if first != second:
            message = (
                f"the config says that head and embedding are tied, and {alike[0]} and {alike[1]} differ: loaders disagree "
                "on which to keep"
            )
            yield fault(_NAME, "warn", alike[1], message, tensors=alike)


def _width(found: ParameterEvidence) -> Iterator[Finding]:
    width, stack = _number(found.text_config, _WIDTH), _main_stack(found)
    if width is None or stack is None:
        return
    axes = {extent for block in stack[1].values() for entry in block.values() for extent in entry.shape}
    if width not in axes:
        message = f"the config's width is {width}, and no tensor of {stack[0]} has an axis of that size"
        yield fault(_NAME, "fail", stack[0], message, unit="features")
        return
    lengths = {gain.stored.size for name, gain in found.gains.items() if name.startswith(f"{stack[0]}.")}
    if lengths and width not in lengths:
        message = f"the config's width is {width}, and norm gains of {stack[0]} have lengths {sorted(lengths)[:5]} only"
        yield fault(_NAME, "warn", stack[0], message)


def _stray_integers(found: ParameterEvidence) -> Iterator[Finding]:
    if found.config.get("quantization_config") is not None:
        return
    stray = [
        name
        for name, entry in found.tensors.items()
        if name.endswith(".weight") and len(entry.shape) > 1 and entry.dtype in _INTEGERS
    ]
    if stray:
        message = (
            f"{stray[0]} is stored as {found.tensors[stray[0]].dtype} ({len(stray)} such weights), and the config names no "
            "quantization: without the scale the values mean nothing"
        )
        yield fault(_NAME, "fail", stray[0], message, float(len(stray)), 0.0, "weights")


def _main_stack(found: ParameterEvidence) -> tuple[str, dict[int, dict[str, TensorEntry]]] | None:
    """Return the language model's blocks: of several stacks the one of the config's depth, else the one of most tensors."""
    stacks = found.blocks
    if not stacks:
        return None
    depth = _number(found.text_config, _LAYERS)
    prefix = max(stacks, key=lambda one: (len(stacks[one]) == depth, sum(map(len, stacks[one].values()))))
    return prefix, stacks[prefix]


def _number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    values = [config[name] for name in names if type(config.get(name)) is int]
    return values[0] if values else None


def _list(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"block{'s' if len(numbers) > 1 else ''} {shown}{' …' if len(numbers) > 5 else ''}"
