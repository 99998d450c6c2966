"""Checkpoint folders made without a model: any tensors, whole or damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ternary_probe.gates import Evidence, GateOptions, Subject, all_checks, load_policy
from ternary_probe.records import Finding

WIDTH, VOCABULARY, DEPTH = 8, 12, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}


def tensors(*, bias: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """A small decoder's tensors: gains around 1, Gaussian matrices."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    def gain() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(WIDTH, generator=generator)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH), "model.norm.weight": gain()}
    for block in range(DEPTH):
        prefix = f"model.layers.{block}"
        found[f"{prefix}.input_layernorm.weight"] = gain()
        if bias:
            found[f"{prefix}.input_layernorm.bias"] = torch.zeros(WIDTH)
        found[f"{prefix}.mlp.up_proj.weight"] = matrix(2 * WIDTH, WIDTH)
        found[f"{prefix}.mlp.down_proj.weight"] = matrix(WIDTH, 2 * WIDTH)
    return found


def write(folder: Path, content: dict[str, torch.Tensor], *, shards: int = 1, **config: Any) -> Path:
    """Write a checkpoint folder, in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    names = sorted(content)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: content[name] for name in names[number::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def sparse_shard(file: Path, layout: dict[str, tuple[str, tuple[int, ...], int]], real: dict[str, bytes]) -> None:
    """Write a shard whose tensors are holes, but for those given: ``name -> (dtype, shape, bytes an entry)``."""
    header, offset = {}, 0
    for name, (dtype, shape, size) in layout.items():
        length = size
        for extent in shape:
            length *= extent
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + offset)
        for name, data in real.items():
            stream.seek(8 + len(raw) + header[name]["data_offsets"][0])
            stream.write(data)


def judge(check: str, folder: Path | str, base: Path | str | None = None, **limits: Any) -> list[Finding]:
    """Run one check on files."""
    options = GateOptions()
    subject = Subject(str(folder), options)
    evidence = Evidence(subject, None if base is None else Subject(str(base), options), options)
    default = load_policy().checks[check].limits
    return list(all_checks()[check].body(evidence, default.model_copy(update=limits)))
