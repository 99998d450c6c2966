"""Packed checkpoints in stock transformers: with the plugin the dense model, without it an error."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from ternary_probe_transformers import TernaryLinear
from tiny import SENTENCES, tiny_llama, tiny_tokenizer
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from ternary_probe import schemes
from ternary_probe.loading import wrap
from ternary_probe.perturb import Ternarize
from ternary_probe.saving import save_quantized
from ternary_probe.saving.packed import Layout, pack
from ternary_probe.ternary import quantize

SCHEMES = ["absmean", "sign@row", "optimal@g10", "planes:2@g16"]


def save(tmp_path: Path, name: str = "llama", scheme: str = "absmean", form: Any = "packed", **options: Any) -> Path:
    dtype = options.pop("dtype", torch.float32)
    loaded = wrap(zoo.build(name, dtype), tiny_tokenizer(), name=name)
    return save_quantized(loaded, Ternarize(scheme=scheme, **options), tmp_path / f"{form}-{scheme}", form)


def packed_linear(weight: torch.Tensor, scheme: str, bias: torch.Tensor | None) -> TernaryLinear:
    layer = TernaryLinear(Layout(schemes.parse(scheme), *weight.shape), bias=bias is not None, dtype=weight.dtype)
    packed = pack(quantize(weight, scheme), weight.dtype)
    state = {"weight": packed.weight, "weight_scale": packed.weight_scale}
    layer.load_state_dict(state if bias is None else {**state, "bias": bias})
    return layer


def logits(model: Any) -> torch.Tensor:
    return zoo.dense_logits(model, zoo.token_ids())


# ---- the layer


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_the_layer_is_a_linear_with_the_dense_weight(scheme, dtype, with_bias):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 33, generator=generator).to(dtype)
    bias = torch.randn(6, generator=generator).to(dtype) if with_bias else None
    inputs = torch.randn(2, 5, 33, generator=generator).to(dtype)
    dense = quantize(weight, scheme).dequantize(dtype)

    layer = packed_linear(weight, scheme, bias)

    assert torch.equal(layer(inputs), nn.functional.linear(inputs, dense, bias))
    assert f"scheme={schemes.parse(scheme)}" in repr(layer)


def test_casting_the_layer_casts_the_weight_and_keeps_the_codes():
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    layer = packed_linear(weight, "planes:2@g8", None)
    dense = layer.dense_weight()

    layer.to(torch.bfloat16)

    assert layer.weight.dtype == torch.uint8
    assert torch.equal(layer.dense_weight(), dense.bfloat16())


def test_the_layers_state_makes_the_round_trip():
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))
    layer = packed_linear(weight, "optimal@row", torch.ones(6))
    other = TernaryLinear(layer.layout, bias=True)
    other.load_state_dict(layer.state_dict())
    assert layer.state_dict().keys() == {"weight", "weight_scale", "bias"}
    assert torch.equal(other.dense_weight(), layer.dense_weight())
    assert not any(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_layer_unpacks_to_the_same_bits_on_cuda(scheme):
    layer = packed_linear(torch.randn(64, 130, generator=torch.Generator().manual_seed(6)), scheme, None)
    here = layer.dense_weight()
    assert torch.equal(layer.cuda().dense_weight().cpu(), here)
    assert layer(torch.ones(1, 130, device="cuda")).device.type == "cuda"


# ---- loading


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gpt_neox", "opt", "phi"])
@pytest.mark.parametrize("scheme", ["absmean@g10", "planes:2"])
def test_packed_and_dense_folders_are_one_model(tmp_path, name, scheme):
    packed = AutoModelForCausalLM.from_pretrained(save(tmp_path, name, scheme))
    dense = AutoModelForCausalLM.from_pretrained(save(tmp_path, name, scheme, "dense"))

    assert any(isinstance(module, TernaryLinear) for module in packed.modules())
    assert torch.equal(logits(packed), logits(dense))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(logits(packed.to(dtype)), logits(dense.to(dtype)))


def test_only_the_ternarized_modules_are_replaced(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path, roles=("up_proj",), blocks="1"))
    replaced = [name for name, module in model.named_modules() if isinstance(module, TernaryLinear)]
    assert replaced == ["model.layers.1.mlp.up_proj"]


def test_a_class_without_head_loads_it_too(tmp_path):
    path = save(tmp_path, include=("*up_proj*", "lm_head*"))
    whole, headless = AutoModelForCausalLM.from_pretrained(path), AutoModel.from_pretrained(path)
    ids = zoo.token_ids()
    assert isinstance(whole.lm_head, TernaryLinear)
    assert isinstance(headless.layers[0].mlp.up_proj, TernaryLinear)
    with torch.no_grad():
        assert torch.equal(headless(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_a_loaded_model_saves_itself_packed(tmp_path):
    first = AutoModelForCausalLM.from_pretrained(save(tmp_path, "llama_tied", "planes:2@g8"))
    first.save_pretrained(tmp_path / "again")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert isinstance(second.model.layers[0].mlp.up_proj, TernaryLinear)
    assert torch.equal(logits(second), logits(first))


def test_dequantizing_gives_plain_linears_of_the_same_values(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path, "qwen2", "optimal@g10", dtype=torch.bfloat16))
    before = logits(model)

    model.dequantize()

    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


# ---- what must not load


WITHOUT = """
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, "mismatch" in str(error).lower())
    else:
        print("loaded")
assert not any(name.startswith("ternary_probe") for name in sys.modules)
"""


def test_without_the_plugin_a_packed_folder_raises(tmp_path):
    paths = [save(tmp_path, scheme=scheme) for scheme in ("absmean", "planes:2")]
    paths += [save(tmp_path, scheme="sign", roles=("k_proj",))]  # one kind of module among many is enough
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RuntimeError True"] * 3


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_scale", None), ("weight", None), ("weight", torch.full((48, 8), 3, dtype=torch.uint8))],
    ids=["no scale", "no codes", "unused codes"],
)
def test_a_folder_without_its_codes_or_scales_raises(tmp_path, key, value):
    path = save(tmp_path)
    rewrite(path, **{f"model__layers__0__mlp__up_proj__{key}": value})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
        AutoModelForCausalLM.from_pretrained(path)


def test_ignoring_mismatched_sizes_does_not_make_random_codes(tmp_path):
    path = save(tmp_path)
    rewrite(path, model__layers__0__mlp__up_proj__weight=torch.zeros((48, 7), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"does not hold a fitting model\.layers\.0\.mlp\.up_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "needs a newer ternary_probe"),
        ({"rotation": "hadamard"}, "needs a newer ternary_probe: it is written with rotation"),
        ({"modules": ["model.layers.9.mlp.up_proj"]}, "which a LlamaForCausalLM does not have"),
        ({"modules": ["model.norm"]}, "which is a LlamaRMSNorm here"),
    ],
    ids=["version", "unknown key", "no such module", "no linear"],
)
def test_a_config_that_does_not_fit_raises(tmp_path, changes, message):
    file = save(tmp_path) / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(file.parent)


# ---- the harness


def test_the_evaluation_harness_scores_packed_like_dense(tmp_path):
    from lm_eval.models.huggingface import HFLM

    model = wrap(tiny_llama(), tiny_tokenizer())
    recipe = Ternarize(scheme="absmean@g16")
    scores = []
    for form in ("dense", "packed"):
        path = save_quantized(model, recipe, tmp_path / form, form)
        harness = HFLM(pretrained=str(path), device="cpu", batch_size=1, dtype="float32")
        requests = [lm_request(first, second) for first, second in itertools.pairwise(SENTENCES)]
        scores.append(harness.loglikelihood(requests, disable_tqdm=True))
    assert scores[0] == scores[1]
    assert all(value < 0 for value, _ in scores[0])


def lm_request(context: str, continuation: str) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", {}, (context, f" {continuation}"), 0)
