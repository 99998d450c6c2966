"""What a checkpoint's files say by themselves: config, headers, faults, norm gains. No model is built, torch not imported."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ternary_probe.checkpoint import CONFIG, INDEX, PICKLE_PATTERNS, SINGLE
from ternary_probe.errors import ProbeError
from ternary_probe.gates._block_regularity import stacks
from ternary_probe.gates._file_access import Files, Range, open_files
from ternary_probe.gates._file_faults import Problem, read_headers
from ternary_probe.gates._stored_numbers import FLOATS, Vector, decode
from ternary_probe.safetensors_header import TensorEntry

GAIN_NAMES = frozenset({"weight", "gamma", "scale"})
BIAS_NAMES = ("bias", "beta")
_NOT_POSITIVE = 0.1
_NEAR_ZERO = 0.5


@dataclass(frozen=True)
class NormGain:
    """A norm's gain, as it lies on disk and as it is read.

    Attributes:
        name: Of its tensor.
        stored: ``w``, fp64 ``[d]``.
        offset: 0 where the gain is read as ``w``, 1 where as ``1 + w``.
        has_bias: Whether a bias lies beside it, as only a LayerNorm has.
    """

    name: str
    stored: Vector
    offset: float
    has_bias: bool

    @property
    def effective(self) -> Vector:
        """The gain under the reading chosen, fp64 ``[d]``."""
        return self.stored + self.offset

    @property
    def reading(self) -> str:
        """``w`` or ``1 + w``."""
        return "1 + w" if self.offset else "w"


@dataclass
class ParameterEvidence:
    """A checkpoint's files.

    Attributes:
        files: Where they are.
        config: ``config.json``, empty where it cannot be read.
        tensors: Where each tensor lies.
        problems: What is wrong with the files, all of it.
        duplicates: Tensors that lie in more than one file, with those files.
        shards: Entries by file, of every file with a readable header.
        unread: Why these files are not read at all (GGUF, pickles), or empty.
    """

    files: Files | None
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    duplicates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shards: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    unread: str = ""

    @property
    def bytes_read(self) -> int:
        """Bytes of file content read so far."""
        return 0 if self.files is None else self.files.bytes_read

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    def read_bytes(self, name: str, first: int = 0, count: int | None = None) -> bytes:
        """Read a stretch of a tensor's bytes.

        Args:
            name: The tensor.
            first: First byte within the tensor.
            count: Number of bytes; to its end if None.

        Returns:
            The bytes.

        Raises:
            ProbeError: If the file is shorter than its header says.
        """
        entry = self.tensors[name]
        begin = entry.begin + first
        end = entry.end if count is None else min(entry.end, begin + count)
        data = b"" if self.files is None else self.files.read(entry.file.name, begin, end)
        if len(data) != end - begin:
            raise ProbeError(f"{entry.file} ended while {name} was read: has it changed?")
        return data

    def read(self, name: str, first_rows: int | None = None) -> Vector:
        """Read a tensor, or its first rows, as numbers.

        Args:
            name: The tensor.
            first_rows: Rows of its first axis; all if None.

        Returns:
            fp64, in its shape; eight-bit floats without their scale.
        """
        entry = self.tensors[name]
        shape = list(entry.shape)
        count = None
        if first_rows is not None and shape:
            rows = min(first_rows, shape[0])
            count = (entry.end - entry.begin) // max(1, shape[0]) * rows
            shape[0] = rows
        return decode(self.read_bytes(name, 0, count), entry.dtype, name).reshape(shape)

    @cached_property
    def gains(self) -> dict[str, NormGain]:
        """Every gain of a norm on disk, by name: a floating vector that is the ``weight`` of something.

        A linear map's weight has two axes, so a vector of that name is a gain; biases and quantizers' scales have names of
        their own. Whether a module computes ``w`` or ``1 + w`` is not in the files (the checks that run the model find it
        out by probing), so it is read off the values [our reading]: ``1 + w`` where, of the gains of one length, most have
        a tenth or more of their entries at or below 0 and the typical median is nearer to 0 than to 1. Trained gains
        read as ``w`` are positive but for a few entries: of SmolLM2's 61 norms one breaks that rule, of a ``1 + w`` model
        most do.
        """
        names = [name for name in self.tensors if self._is_gain(name)]
        if self.files is None or not names:
            return {}
        entries = [self.tensors[name] for name in names]
        raw = self.files.read_many([Range(entry.file.name, entry.begin, entry.end) for entry in entries])
        stored = {n: decode(data, entry.dtype, n) for n, data, entry in zip(names, raw, entries, strict=True)}
        by_width: dict[int, list[Vector]] = defaultdict(list)
        for gain in stored.values():
            by_width[gain.size].append(gain)
        offsets = {width: _offset(alike) for width, alike in by_width.items()}
        return {n: NormGain(n, gain, offsets[gain.size], self._has_bias(n)) for n, gain in stored.items()}

    def _is_gain(self, name: str) -> bool:
        entry, (prefix, _, last) = self.tensors[name], name.rpartition(".")
        if len(entry.shape) != 1 or entry.shape[0] < 2 or last not in GAIN_NAMES or entry.dtype not in FLOATS:
            return False
        if last != "weight" and f"{prefix}.weight" in self.tensors:  # the scale of a quantized weight
            return False
        return last != "gamma" or f"{prefix}.beta" in self.tensors  # a gamma alone scales a branch, not a norm

    def _has_bias(self, name: str) -> bool:
        prefix = name.rpartition(".")[0]
        siblings = [self.tensors.get(f"{prefix}.{bias}") for bias in BIAS_NAMES]
        return any(one is not None and one.shape == self.tensors[name].shape for one in siblings)

    @cached_property
    def blocks(self) -> dict[str, dict[int, dict[str, TensorEntry]]]:
        """Tensors of numbered blocks: stack's prefix, block number, name within the block.

        A stack is what the *first* number of a name counts: ``model.layers`` in ``model.layers.3.mlp.experts.7.w1``.
        """
        return stacks(self.tensors)

    @property
    def incomplete(self) -> bool:
        """Whether a file could not be read, so that tensors may be absent for that reason alone."""
        return any(problem.fault not in {"index", "config", "stale", "trailing"} for problem in self.problems)


def _offset(gains: list[Vector]) -> float:
    """Return 1 where the gains of one length are stored around 0, as ``1 + w`` norms are, else 0."""
    finite = [kept for gain in gains if (kept := gain[np.isfinite(gain)]).size]
    if not finite:
        return 0.0
    below = sum(bool((gain <= 0).mean() >= _NOT_POSITIVE) for gain in finite)
    typical = float(np.median([abs(float(np.median(gain))) for gain in finite]))
    return 1.0 if below > len(finite) / 2 and typical < _NEAR_ZERO else 0.0


def read_parameters(source: str, *, revision: str | None = None) -> ParameterEvidence:
    """Read config, index and every header; whatever is wrong is collected, not raised.

    Args:
        source: A folder, ``demo``, a hub id (read by HTTP ranges, not downloaded), or a GGUF file, which is not read.
        revision: Branch, tag or commit of a hub id.

    Returns:
        The evidence.

    Raises:
        ProbeError: If there is no such folder or repository, or neither config nor weights are in it.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ProbeError(f"there is no file {source}")
        return ParameterEvidence(None, unread="it is a GGUF file, and these checks read safetensors")
    files = open_files(source, revision)
    sizes = files.sizes
    has_safetensors = any(name.startswith("model") and name.endswith((".safetensors", INDEX)) for name in sizes)
    if not has_safetensors and any(name in sizes for name in PICKLE_PATTERNS):
        return ParameterEvidence(files, unread="its weights are a PyTorch pickle, and these checks read safetensors")
    if CONFIG not in sizes and not has_safetensors:
        adapter = " (it holds a PEFT adapter: merge that into its base model)" if "adapter_config.json" in sizes else ""
        raise ProbeError(
            f"{files.label} is not a checkpoint: it has neither {CONFIG} nor {SINGLE} nor {INDEX}{adapter}"
        )
    found = read_headers(files)
    return ParameterEvidence(files, found.config, found.tensors, tuple(found.problems), found.duplicates, found.shards)
