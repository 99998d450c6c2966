"""Norms: kind, effective gain and position against the known models, and readers proven by behaviour."""

from __future__ import annotations

import pytest
import torch
import zoo
from made_models import IDS, Stack, seeded
from torch import nn

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError

ONE_PLUS = {"gemma", "gemma2", "gemma3"}
LAYER = {"bloom", "phi", "olmo", "opt", "opt_post", "gpt2", "gpt_neox", "gpt_neox_serial", "cohere"}
WITHOUT_AFFINE = {"olmo"}
POSITIONS = {
    "llama": "pre pre pre pre final",
    "qwen3": "pre qk qk pre pre qk qk pre final",
    "gemma": "pre pre pre pre final",
    "gemma2": "pre sandwich pre sandwich pre sandwich pre sandwich final",
    "gemma3": "pre qk qk sandwich pre sandwich pre qk qk sandwich pre sandwich final",
    "olmo": "pre pre pre pre final",
    "olmo2": "qk qk sandwich sandwich qk qk sandwich sandwich final",
    "phi": "pre pre final",
    "opt": "pre pre pre pre final",
    "opt_post": "post post post post",
    "gpt2": "pre pre pre pre final",
    "gpt_neox": "pre pre pre pre final",
    "bloom": "embedding pre pre pre pre final",
    "mixtral": "pre pre pre pre final",
}
FINAL = {
    "phi": "model.final_layernorm",
    "opt": "model.decoder.final_layer_norm",
    "opt_post": "model.decoder.layers.1.final_layer_norm",
    "gpt2": "transformer.ln_f",
    "bloom": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "gpt_neox_serial": "gpt_neox.final_layer_norm",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_kind_and_effective_gain_agree_with_the_parameters(name, dtype):
    found = zoo.examined(name, dtype)
    assert found.norms
    for site in found.norms:
        assert site.kind == ("layer_norm" if name in LAYER else "rms_norm"), site.name
        assert site.gain.dtype == torch.float64
        if name in WITHOUT_AFFINE:
            assert torch.allclose(site.gain, torch.ones(zoo.WIDTH, dtype=torch.float64), atol=1e-6)
            assert site.bias is None
            continue
        weight = site.module.weight.double().flatten()
        assert torch.equal(site.gain, 1 + weight if name in ONE_PLUS else weight), site.name
        bias = getattr(site.module, "bias", None)
        assert (site.bias is None) == (bias is None)
        if bias is not None:
            assert torch.equal(site.bias, bias.double())


@pytest.mark.parametrize("name", zoo.NAMES)
def test_eps_is_the_modules_own(name):
    for site in zoo.examined(name).norms:
        own = [getattr(site.module, key) for key in ("eps", "variance_epsilon") if hasattr(site.module, key)]
        assert site.eps == pytest.approx(own[0] if own else 1e-5, rel=0.01)


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_by_data_flow(name):
    found = zoo.examined(name)
    assert " ".join(site.position for site in found.norms) == POSITIONS[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_final_norm_is_the_last_before_the_head(name, dtype):
    assert zoo.examined(name, dtype).final_norm.name == FINAL.get(name, "model.norm")


def test_readers_of_a_llama_are_the_matrices_its_code_feeds():
    found = anatomy.examine(zoo.build("llama"))
    attention = found.norm("model.layers.1.input_layernorm")
    assert attention.readers == tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    assert attention.block == 1
    mlp = found.norm("model.layers.1.post_attention_layernorm")
    assert mlp.readers == tuple(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    assert found.final_norm.readers == ("lm_head.weight",)
    assert found.final_norm.block is None
    assert all(site.readers_complete for site in found.norms)


def test_readers_of_a_sparse_block_include_router_and_every_expert():
    site = anatomy.examine(zoo.build("mixtral")).norm("model.layers.0.post_attention_layernorm")
    experts = {f"model.layers.0.mlp.experts.gate_up_proj[{expert}]" for expert in range(4)}
    assert set(site.readers) == {"model.layers.0.mlp.gate.weight", *experts}
    assert site.readers_complete


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in zoo.NAMES if n not in {"olmo", "opt_post", "olmo2"}])
def test_scaling_gain_and_readers_keeps_the_function_wherever_readers_are_complete(name, dtype):
    model = zoo.build(name, dtype)
    found = anatomy.examine(model)
    clean = zoo.dense_logits(model, zoo.token_ids())
    complete = [site for site in found.norms if site.readers_complete]
    assert len(complete) >= 2
    columns = torch.tensor([1, 9])
    for site in complete:
        saved = {key: parameter.clone() for key, parameter in site.parameters().items()}
        before = site.gain.clone()
        site.scale_gain(columns, 4.0)
        assert torch.allclose(site.gain[columns], 4 * before[columns], rtol=0.03)
        assert not torch.equal(zoo.dense_logits(model, zoo.token_ids()), clean)
        for reader in site.readers:
            found.matrix(reader).write_columns(columns, found.matrix(reader).read_columns(columns) / 4)
        moved = (zoo.dense_logits(model, zoo.token_ids()) - clean).abs().max()
        rounding = 8 * torch.finfo(dtype).eps if name in ONE_PLUS else 1e-6  # 1 + w is rounded when written back
        assert moved <= rounding * clean.abs().max(), site.name
        for reader in site.readers:
            found.matrix(reader).write_columns(columns, found.matrix(reader).read_columns(columns) * 4)
        for key, parameter in site.parameters().items():
            parameter.copy_(saved[key])
    assert torch.equal(zoo.dense_logits(model, zoo.token_ids()), clean)


def test_a_hidden_reader_is_found_out_and_only_its_norm_is_blamed():
    found = anatomy.examine(seeded(Stack, "pre", "leaky", "pre", "pre"), input_ids=IDS)
    complete = {site.name: site.readers_complete for site in found.norms}
    assert complete == {f"blocks.{index}.norm": index != 1 for index in range(4)} | {"last": True}
    assert "something else reads" in found.norm("blocks.1.norm").readers_note


def test_the_tied_heads_columns_cannot_be_scaled_alone():
    site = anatomy.examine(zoo.build("llama_tied")).final_norm
    assert not site.readers_complete
    assert "embedding" in site.readers_note


def test_a_norm_without_parameters_cannot_be_scaled():
    site = anatomy.examine(zoo.build("olmo")).norms[0]
    assert site.parameters() == {}
    assert "no gain" in site.readers_note
    with pytest.raises(ProbeError, match="no parameter for its gain"):
        site.scale_gain(torch.tensor([0]), 2.0)


class Lying(nn.Module):
    """Built like a LayerNorm with two parameters, but an RMS norm with gain ``bias - 2``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.bias = nn.Parameter(torch.randn(width))
        self.layer_norm_eps = 3e-4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.layer_norm_eps).rsqrt() * (self.bias - 2) + 0 * self.weight


def with_last(module: nn.Module) -> anatomy.Anatomy:
    model = seeded(Stack, "pre", "pre")
    model.last = module.requires_grad_(False).eval()
    return anatomy.examine(model, input_ids=IDS)


def test_names_are_not_believed():
    module = Lying(16)
    site = with_last(module).final_norm
    assert site.kind == "rms_norm"
    assert torch.allclose(site.gain, module.bias.double() - 2, atol=1e-12)
    assert site.bias is None
    assert site.eps == 3e-4
    assert site.parameters() == {"last.bias": module.bias}


class Quadratic(Lying):
    """A norm whose gain is the square of a parameter: no effective gain that could be written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.layer_norm_eps).rsqrt() * self.bias.square()


def test_a_norm_whose_gain_is_not_linear_in_a_parameter_is_listed_as_unhandled():
    found = with_last(Quadratic(16))
    assert found.final_norm is None
    assert [entry.reason for entry in found.unhandled if entry.name == "last"] == [
        "normalises its input with a gain that is not linear in one parameter"
    ]


@pytest.mark.parametrize("module", [nn.Identity(), nn.Softmax(-1), nn.Tanh(), nn.Dropout(0.1), nn.BatchNorm1d(12)])
def test_modules_that_keep_the_shape_are_not_taken_for_norms(module):
    found = with_last(module)
    assert "last" not in {site.name for site in found.norms}
    assert found.final_norm is None


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_a_trained_norm_with_a_tiny_gain_is_read_exactly(scale):
    module = nn.RMSNorm(16)
    module.weight.data[3] = scale * 1e-3
    module.weight.data[4] = -2.1
    assert torch.equal(with_last(module).final_norm.gain, module.weight.double())
