"""Builders of tiny models, tokenizers and checkpoint folders that several test files share."""

from __future__ import annotations

import json
import string
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256
SENTENCES = (
    "The river bends twice before it reaches the mill.",
    "She counted nine lanterns along the harbour wall.",
    "A patient gardener waters the roots, not the leaves.",
    "Nobody had wound the tower clock since the spring of 1931.",
)


def tiny_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 256 entries over printable ASCII; other bytes become ``<unk>``."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*(string.ascii_letters + string.digits + string.punctuation), "Ġ", "Ċ"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 8, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def tiny_llama_config(**changes: object) -> LlamaConfig:
    """Two blocks of width 32 with grouped queries and an untied head."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(sizes | changes))


def tiny_llama(*, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random Llama in eval mode; the same weights for the same arguments, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_llama_config(**changes))
    return model.to(dtype).eval().requires_grad_(False)


def tiny_llama_folder(
    tmp_path: Path,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    *,
    name: str = "tiny-llama",
    tokenizer: bool = True,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Save `tiny_llama` with its tokenizer under ``tmp_path / name``, in one file or in exactly `shards` files."""
    folder = tmp_path / name
    tiny_llama(dtype=dtype, seed=seed, **changes).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    if shards > 1:
        split(folder, shards)
    return folder


def split(folder: Path, shards: int) -> None:
    """Replace a folder's single safetensors file by `shards` files and an index, tensors dealt out in turn."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    dealt: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for position, name in enumerate(sorted(tensors)):
        dealt[position % shards][name] = tensors[name]
    weight_map = {}
    for number, part in enumerate(dealt, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def tiny_gguf(file: Path, *, quantized: bool = True, seed: int = 0) -> Path:
    """Write a one-block Llama with a tied head as a GGUF, its matrices in Q4_1 blocks or in plain float32."""
    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * (len(tokens) - 3))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(tokens), 32), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    shapes |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32)}
    shapes |= {"blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    for name, shape in shapes.items():
        tensor = draw.standard_normal(shape).astype(np.float32)
        if quantized and len(shape) == 2:
            packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
