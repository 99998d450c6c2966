"""Faults planted in healthy models are caught by the default policy, and the sub-layer is named."""

from __future__ import annotations

import pytest
import zoo
from gates.forward_cases import OPTIONS, plant_fall, run_check, subject, text_windows, wide_gpt2

from ternary_probe.gates import Tier, run_gate

DEPTH = 6
MODELS = {
    "llama": ("layers", "mlp", "post_attention_layernorm", "self_attn", "input_layernorm", "down_proj"),
    "qwen3": ("layers", "mlp", "post_attention_layernorm", "self_attn", "input_layernorm", "down_proj"),
    "gpt2": ("h", "mlp", "ln_2", "attn", "ln_1", "c_proj"),
    "gpt_neox_serial": (
        "layers",
        "mlp",
        "post_attention_layernorm",
        "attention",
        "input_layernorm",
        "dense_4h_to_h",
    ),
}


@pytest.mark.parametrize("where", [1, DEPTH - 1], ids=["early", "late"])
@pytest.mark.parametrize("name", MODELS)
def test_an_mlp_that_cancels_a_direction_fails_and_is_named(name: str, where: int) -> None:
    container, part, norm, *_ = MODELS[name]
    model = zoo.build(name, num_hidden_layers=DEPTH)
    block = getattr(model.base_model, container)[where]
    plant_fall(model, block, part, norm, text_windows())
    _, step = run_check("depth-profile", model)
    prefix = f"{model.base_model_prefix}.{container}.{where}"
    assert step.status == "fail"
    assert step.subject == prefix
    assert 0.5 / 18 < step.measured < 0.15
    assert step.details["cause"] == f"{prefix}.mlp"
    assert f"{prefix}.mlp takes it down" in step.message


@pytest.mark.parametrize("name", MODELS)
def test_an_attention_that_cancels_a_direction_is_told_from_the_mlp(name: str) -> None:
    container, _, _, part, norm, writer = MODELS[name]
    model = zoo.build(name, num_hidden_layers=3)
    block = getattr(model.base_model, container)[1]
    for parameter in getattr(block.mlp, writer).parameters():
        parameter *= 0.01  # or the MLP puts back what the attention took
    plant_fall(model, block, part, norm, text_windows())
    _, step = run_check("depth-profile", model)
    assert step.status == "fail"
    assert step.details["cause"].endswith(f".1.{part}")
    assert len(step.details["sub_layer_ratios"]) == 2


def test_in_a_parallel_block_each_branch_is_set_against_the_blocks_input() -> None:
    model = zoo.build("phi", num_hidden_layers=4)
    plant_fall(model, model.model.layers[2], "mlp", "input_layernorm", text_windows(), keep=1 / 18)
    # The branch sees the block's input alone, so it cancels that; what the attention adds stays.
    forward_step = run_check("depth-profile", model, step_warn=100.0)[1]
    assert "model.layers.2" in forward_step.details["traced_block"]
    ratios = forward_step.details["sub_layer_ratios"]
    assert ratios["model.layers.2.mlp"] < ratios["model.layers.2.self_attn"]
    assert forward_step.details["cause"] == "model.layers.2.mlp"


def test_a_fall_hidden_from_the_ratio_shows_in_the_step() -> None:
    """A stream that has grown stays above its start: THEORY 2.3.6."""
    model = zoo.build("llama", num_hidden_layers=DEPTH)
    for layer in model.model.layers[: DEPTH - 1]:
        layer.mlp.down_proj.weight *= 8
    plant_fall(model, model.model.layers[-1], "mlp", "post_attention_layernorm", text_windows())
    ratio, step = run_check("depth-profile", model)
    assert ratio.measured > 1
    assert ratio.status == "pass"
    assert step.status == "fail"


def test_at_width_256_too() -> None:
    _, step = run_check("depth-profile", wide_gpt2(4, plant=2))
    assert step.status == "fail"
    assert step.details["cause"] == "transformer.h.2.mlp"


def test_the_gate_as_a_whole_fails_on_the_fault_and_not_on_the_model() -> None:
    model = zoo.build("llama", num_hidden_layers=3)
    healthy = run_gate(subject(model).loaded, tiers=[Tier.FORWARD], options=OPTIONS)
    assert healthy.verdict == "pass"
    plant_fall(model, model.model.layers[1], "mlp", "post_attention_layernorm", text_windows())
    broken = run_gate(subject(model).loaded, tiers=[Tier.FORWARD], options=OPTIONS)
    assert broken.verdict == "fail"
    assert broken.reason == "failed: depth-profile"
