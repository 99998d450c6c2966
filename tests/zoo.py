"""Tiny random models of many architectures: the anatomy must serve each without knowing its name.

Every parameter carries noise and neutral multipliers are set to something else, so that an ignored factor shows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from ternary_probe import anatomy

VOCABULARY = 256
WIDTH = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 8}
_GEMMA = {**_HEAD, "hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 12}

# Name -> model class, config class, changes to the common sizes; None removes a size the config does not know.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEAD),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GEMMA, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, **_CAPS, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GEMMA, **_CAPS, "tie_word_embeddings": True}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "logits_scaling": 0.75,
            "residual_multiplier": 0.75,
            "embedding_multiplier": 0.75,
            "attention_multiplier": 0.5,
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.75}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "intermediate_size": None, "num_key_value_heads": None},
    ),
    "opt_post": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "ffn_dim": 48,
            "word_embed_proj_dim": WIDTH,
            "do_layer_norm_before": False,
            "intermediate_size": None,
            "num_key_value_heads": None,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_inner": 48, "intermediate_size": None, "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_key_value_heads": None, "use_parallel_residual": True}),
    "gpt_neox_serial": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"num_key_value_heads": None, "use_parallel_residual": False},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"intermediate_size": None, "num_key_value_heads": None, "max_position_embeddings": None},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

NAMES = tuple(_KINDS)
"""Every model that `build` knows."""

SPARSE = ("mixtral", "gpt_oss")
"""Those with experts in fused 3-D parameters."""


def build(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any) -> Any:
    """Build a tiny random model in eval mode: the same weights for the same arguments, whatever was drawn before.

    Args:
        name: One of `NAMES`.
        dtype: Dtype of the parameters.
        seed: Seed of the weights.
        **overrides: Config fields.
    """
    model_class, config_class, changes = _KINDS[name]
    fields = {key: value for key, value in (_COMMON | changes | overrides).items() if value is not None}
    config = getattr(transformers, config_class)(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)._from_config(config, dtype=dtype)
    add_noise(model, seed)
    return model.eval().requires_grad_(False)


@cache
def examined(name: str, dtype: torch.dtype = torch.float32) -> anatomy.Anatomy:
    """The anatomy of a model of the zoo, shared by all tests: whoever edits the model builds one of their own."""
    return anatomy.examine(build(name, dtype))


@torch.no_grad()
def add_noise(model: nn.Module, seed: int) -> None:
    """Move every parameter off its initial value: gains off one, biases off zero, and matrices large enough to matter."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.dim() > 1 else 0.2)
        parameter += noise.to(parameter.dtype)


def token_ids(batch: int = 2, tokens: int = 24, *, seed: int = 7) -> torch.Tensor:
    """Random token ids ``[batch, tokens]``."""
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def dense_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own logits, the plain way, ``[batch, tokens, vocabulary]``, float32."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits.float()
