"""Dead directions of the final norm's output: predicted ones, others, new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from gates.forward_cases import plant_fall, run_check, streams, subject, text_windows, trained_neox

from ternary_probe.anatomy import NonFiniteError, examine
from ternary_probe.gates import GateOptions
from ternary_probe.gates._forward import observe_forward


def test_a_layer_norms_dead_direction_is_no_fault_and_an_rms_norm_has_none() -> None:
    dead, others = run_check("dead-direction", zoo.build("gpt2"))
    assert dead.status == others.status == "pass"
    assert "transformer.ln_f is a LayerNorm: its output never varies along v* = 1/gain (|cos| 1," in dead.message
    assert dead.measured < 1e-12 < dead.threshold
    alive, others = run_check("dead-direction", zoo.build("llama"))
    assert alive.status == others.status == "pass"
    assert "no direction is dead by its algebra" in alive.message
    assert others.measured == 0


def test_what_is_ours_is_labelled() -> None:
    details = run_check("dead-direction", zoo.build("gpt2"))[0].details
    assert {"schur_ratio (our reading)", "delta_gamma (our reading)"} <= details.keys()
    assert details["schur_floor"] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_zeroed_gains_are_named_and_new_against_the_base(name: str) -> None:
    model = zoo.build(name)
    final = examine(model).final_norm
    final.set_gain(torch.tensor([3, 11]), 0.0)
    dead, others, against = run_check("dead-direction", model, zoo.build(name))
    assert dead.status == others.status == "pass"
    assert "has 2 zero gains (axes 3, 11)" in dead.message
    assert against.status == "fail"
    assert against.measured == 2
    assert "2 new, 2 by zeroed gains (axes 3, 11)" in against.message


@pytest.mark.parametrize("name", ["llama", "gpt_neox_serial"])
def test_a_direction_cancelled_in_the_last_block_is_found_and_new(name: str) -> None:
    model = zoo.build(name)
    block = (model.model if name == "llama" else model.gpt_neox).layers[-1]
    plant_fall(model, block, "mlp", "post_attention_layernorm", text_windows(), keep=0.0, centred=name != "llama")
    dead, others, against = run_check("dead-direction", model, zoo.build(name))
    assert dead.status == "pass"
    assert (others.status, others.measured) == ("warn", 1)
    assert "has no variance" in others.message
    assert (against.status, against.measured) == ("fail", 1)


def test_a_candidate_that_is_its_base_has_no_new_dead_direction() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        *_, against = run_check("dead-direction", zoo.build("gpt2", dtype), zoo.build("gpt2"))
        assert against.status == "pass"
        assert against.measured == 0


def test_a_norm_of_the_other_kind_makes_a_dead_direction() -> None:
    model = zoo.build("llama")
    gain = model.model.norm.weight
    model.model.norm = torch.nn.LayerNorm(zoo.WIDTH, bias=False).requires_grad_(False)
    model.model.norm.weight.copy_(gain)
    *_, against = run_check("dead-direction", model, zoo.build("llama"))
    assert against.status == "fail"
    assert "1 new, as the RMSNorm became a LayerNorm" in against.message


@pytest.mark.parametrize("step", range(5))
def test_the_kernel_of_a_trained_neox_tracks_its_gain_at_every_saved_step(step: int) -> None:
    _, saved = trained_neox()
    model = zoo.build("gpt_neox", hidden_size=64, intermediate_size=128)
    model.load_state_dict(saved[step])
    windows = text_windows(8)
    kernel = observe_forward(examine(model), windows).kernel
    moved = float(
        (saved[step]["gpt_neox.final_layer_norm.weight"] - saved[0]["gpt_neox.final_layer_norm.weight"]).norm()
    )
    assert moved >= 0.05 * step
    assert kernel.energy <= 1e-10
    assert kernel.cosine >= 1 - 1e-6
    assert kernel.classify() == "layer_norm"
    # Against the centred output of torch's own norm in fp64, by SVD.
    norm = model.gpt_neox.final_layer_norm
    x = torch.from_numpy(streams(model, list(model.gpt_neox.layers), windows)[-1])
    y = torch.nn.functional.layer_norm(x, (64,), norm.weight.double(), norm.bias.double(), norm.eps).numpy()
    bottom = np.linalg.svd(y - y.mean(0), full_matrices=False)[2][-1]
    inverse = 1 / norm.weight.double().numpy()
    assert abs(bottom @ inverse) / np.linalg.norm(inverse) >= 1 - 1e-6


def test_random_init_figures_stand_beside_the_trained_ones() -> None:
    model, _ = trained_neox()
    dead = run_check("dead-direction", model, options=GateOptions(window=64, windows=8, random_init=True))[0]
    assert "; random init: |cos| 1, relative energy" in dead.message
    assert dead.details["random_init"]["participation_of_v"] == pytest.approx(64)
    assert dead.details["participation_of_v"] < 64


def test_too_few_kinds_of_token_leave_other_directions_undecided() -> None:
    model = zoo.build("llama", hidden_size=128, intermediate_size=48)
    plant_fall(model, model.model.layers[-1], "mlp", "post_attention_layernorm", text_windows(4), keep=0.0)
    _, others = run_check("dead-direction", model, options=GateOptions(window=64, windows=4))
    assert others.status == "inconclusive"
    assert "may be too few to tell" in others.message


def test_a_model_without_a_norm_before_its_head_is_not_judged() -> None:
    made: Any = subject(zoo.build("llama"))
    made.anatomy.final_norm = None
    (finding,) = run_check("dead-direction", made)
    assert finding.status == "not_applicable"


def test_nan_never_passes() -> None:
    model = zoo.build("llama")
    model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    made = subject(zoo.build("llama"))
    made.anatomy.model.load_state_dict(model.state_dict())
    with pytest.raises(NonFiniteError, match=r"weight model\.layers\.1\.mlp\.down_proj\.weight holds nan"):
        run_check("dead-direction", made)
