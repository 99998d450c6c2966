"""The kind of a norm: over architectures as their classes draw them, against config, policy and base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo
from gates.forward_cases import OPTIONS, built, random_windows, run_check, subject, with_windows
from torch import nn

from ternary_probe.anatomy import examine
from ternary_probe.gates import GateOptions
from ternary_probe.gates._forward import observe_forward
from ternary_probe.measure.norm_kernel import NormKernel, observe_norm

WIDTH, TOKENS, VOCABULARY = 256, 1280, 1024

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FFN = {"intermediate_size": 384}
_HEADS = {"num_key_value_heads": 2}

LAYER_NORM = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_inner": 384}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _FFN),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 384, "word_embed_proj_dim": WIDTH}),
    "phi": ("PhiForCausalLM", "PhiConfig", _FFN),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _FFN),
}
RMS_NORM = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_FFN, **_HEADS}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_FFN, **_HEADS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_FFN, **_HEADS, "head_dim": 64}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_FFN, **_HEADS}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_FFN, **_HEADS, "head_dim": 64}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_FFN, **_HEADS, "head_dim": 64}),
}


def kernel_at_random_init(model_class: str, config_class: str, changes: dict[str, Any]) -> NormKernel:
    model = built(model_class, config_class, **(_SIZES | changes))
    return observe_forward(examine(model), random_windows(TOKENS, VOCABULARY)).kernel


@pytest.mark.parametrize("name", LAYER_NORM)
def test_layer_norm_models_have_their_kernel_at_random_init(name: str) -> None:
    kernel = kernel_at_random_init(*LAYER_NORM[name])
    assert kernel.kind == kernel.classify() == "layer_norm"
    assert kernel.cosine >= 1 - 1e-8
    assert kernel.energy < 1e-12
    assert kernel.other_directions == 0


@pytest.mark.parametrize("name", RMS_NORM)
def test_rms_norm_models_have_none_at_random_init(name: str) -> None:
    kernel = kernel_at_random_init(*RMS_NORM[name])
    assert kernel.kind == kernel.classify() == "rms_norm"
    assert kernel.cosine < 4 / WIDTH**0.5
    assert kernel.whitened_cosine < 4 / WIDTH**0.5
    assert kernel.energy > 1e-2
    assert kernel.directions() == 0
    assert bool((kernel.gain == 1).all())  # of the 1 + w norms too


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_encoders_and_vision_towers_are_measured_by_the_same_function(kind: str) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384}
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        model = built("ViTModel", "ViTConfig", **sizes, image_size=64, patch_size=8)
        images = torch.randn(24, 3, 64, 64, generator=generator)
        kernel = observe_norm(model.layernorm, lambda: model(images), name="layernorm")
    else:
        model = built("BertModel", "BertConfig", **sizes, vocab_size=VOCABULARY)
        ids = torch.randint(0, VOCABULARY, (20, 64), generator=generator)
        last = [m for m in model.modules() if isinstance(m, nn.LayerNorm)][-1]
        kernel = observe_norm(last, lambda: model(ids), name="last norm")
    assert kernel.tokens >= 4 * WIDTH
    assert kernel.kind == kernel.classify() == "layer_norm"
    assert kernel.cosine >= 1 - 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma3", "olmo"])
def test_half_precision_checkpoints_are_told_like_full_ones(name: str, dtype: torch.dtype) -> None:
    forward = subject(zoo.build(name, dtype)).forward
    kernel = forward.kernel
    expected = "layer_norm" if name in {"gpt_neox", "olmo"} else "rms_norm"
    assert kernel.dtype == dtype
    assert kernel.kind == kernel.classify() == expected
    assert kernel.disagreement < kernel.tolerance
    assert kernel.other_directions == 0
    if expected == "layer_norm":
        assert kernel.cosine >= 1 - 1e-8


def test_the_finding_gives_both_witnesses() -> None:
    final, declared = run_check("norm-kind", zoo.build("llama"))
    assert final.status == declared.status == "pass"
    assert "model.norm is an RMSNorm, by probing and by its output" in final.message
    assert final.measured < final.threshold
    assert final.details["kind_by_probing"] == final.details["kind_by_covariance"] == "rms_norm"
    assert declared.message == (
        "all 5 norms that can be set against each other are of the kind they are as its config declares it"
    )


def swapped(name: str = "model.layers.1.input_layernorm") -> Any:
    """A Llama of which one norm became a LayerNorm with the same gain."""
    model = zoo.build("llama")
    parent = model.get_submodule(name.rpartition(".")[0])
    new = nn.LayerNorm(zoo.WIDTH)
    with torch.no_grad():
        new.weight.copy_(model.get_submodule(name).weight)
    setattr(parent, name.rpartition(".")[2], new)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm", "model.norm"])
def test_a_swapped_norm_fails_against_what_the_config_declares(name: str) -> None:
    found = [one for one in run_check("norm-kind", swapped(name)) if one.status == "fail"]
    assert [one.subject for one in found] == [name]
    assert found[0].message == f"norm {name} is a LayerNorm; as its config declares it it is an RMSNorm"


def test_a_swapped_norm_fails_against_the_base() -> None:
    found = [one for one in run_check("norm-kind", swapped(), zoo.build("llama")) if one.status == "fail"]
    assert [one.message.split("; ")[1] for one in found] == [
        "as its config declares it it is an RMSNorm",
        "in the base base it is an RMSNorm",
    ]


def test_a_policy_may_declare_the_kind_of_the_final_norm() -> None:
    found = run_check("norm-kind", zoo.build("llama"), declared="layer_norm")
    assert [one.status for one in found] == ["pass", "fail", "pass"]
    assert "the policy declares a LayerNorm" in found[1].message
    assert {one.status for one in run_check("norm-kind", zoo.build("olmo"), declared="layer_norm")} == {"pass"}


def test_an_rms_norm_that_replaced_a_layer_norm_on_a_mean_free_stream_only_warns() -> None:
    """Rotation methods make such models: every writer to the stream is centred, so both norms compute the same."""
    base = zoo.build("gpt_neox")
    model = zoo.build("gpt_neox").double()
    centre = torch.eye(zoo.WIDTH, dtype=torch.float64) - 1 / zoo.WIDTH
    with torch.no_grad():
        model.gpt_neox.embed_in.weight.copy_(model.gpt_neox.embed_in.weight @ centre)
        for layer in model.gpt_neox.layers:
            for writer in (layer.attention.dense, layer.mlp.dense_4h_to_h):
                writer.weight.copy_(centre @ writer.weight)
                writer.bias.copy_(centre @ writer.bias)
    new = nn.RMSNorm(zoo.WIDTH, eps=1e-5, dtype=torch.float64)
    new.weight = model.gpt_neox.final_layer_norm.weight
    model.gpt_neox.final_layer_norm = new
    found = run_check("norm-kind", model, base)
    assert [one.status for one in found] == ["pass", "warn", "warn"]
    assert "mean-free, it acts as a LayerNorm" in found[0].message
    assert found[1].message.endswith("the stream is mean-free, where both compute the same")


def test_too_little_text_is_undecided_and_says_how_much_is_needed() -> None:
    final, declared = run_check("norm-kind", zoo.build("llama"), options=GateOptions(window=16, windows=2))
    assert final.status == "inconclusive"
    assert "32 tokens cannot span 32 dimensions: give more than 32, 128 to be useful" in final.message
    assert declared.status == "pass"


def test_random_init_figures_stand_beside_the_trained_ones() -> None:
    options = GateOptions(window=64, windows=8, random_init=True)
    final = run_check("norm-kind", zoo.build("gpt2"), options=options)[0]
    assert "random init: |cos| 1," in final.message
    fresh = final.details["random_init"]
    assert fresh["kind_by_covariance"] == "layer_norm"
    assert fresh["participation_of_v"] == pytest.approx(zoo.WIDTH)  # gains of one
    assert final.details["participation_of_v"] < 0.95 * zoo.WIDTH


def test_a_module_that_is_not_what_its_law_says_is_undecided() -> None:
    model = zoo.build("llama")
    made = subject(model)
    _ = made.anatomy
    model.model.norm.register_forward_hook(lambda _module, _args, output: 1.5 * output)
    assert run_check("norm-kind", made)[0].status == "inconclusive"


def test_only_models_with_a_config_have_declared_kinds() -> None:
    class Bare(transformers.LlamaForCausalLM):
        @classmethod
        def _from_config(cls, *_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError("no")

    model = zoo.build("llama")
    model.__class__ = Bare
    found = run_check("norm-kind", model)
    assert found[-1].status == "not_applicable"
    assert "cannot be built without weights (RuntimeError)" in found[-1].message


def test_a_vocabulary_wider_than_the_text_needs_no_more_text() -> None:
    made = with_windows(
        built(*RMS_NORM["llama"][:2], **(_SIZES | RMS_NORM["llama"][2])), random_windows(TOKENS, 900), OPTIONS
    )
    assert {one.status for one in run_check("norm-kind", made)} == {"pass"}
