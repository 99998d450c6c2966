"""Healthy models, trained and random-init, never fail a check that reads one forward pass, under default thresholds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from gates.forward_cases import run_check, subject, trained_neox, wide_gpt2

from ternary_probe.gates._forward import FreshWeightsError, freshly_initialised

CHECKS = ("norm-kind", "dead-direction", "depth-profile")


def statuses(model: Any) -> dict[str, set[str]]:
    made = subject(model)
    return {name: {one.status for one in run_check(name, made)} for name in CHECKS}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_model_of_the_zoo_fails(name: str) -> None:
    found = statuses(zoo.build(name))
    assert found["norm-kind"] == found["dead-direction"] == {"pass"}
    assert found["depth-profile"] in ({"pass"}, {"not_applicable"}, {"warn", "pass"})


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_model_of_the_zoo_fails_as_its_class_draws_it(name: str) -> None:
    found = statuses(freshly_initialised(subject(zoo.build(name)).loaded, seed=0))
    assert found["norm-kind"] == found["dead-direction"] == {"pass"}
    assert found["depth-profile"] in ({"pass"}, {"not_applicable"}, {"warn", "pass"})


@pytest.mark.parametrize("seed", [0, 1])
def test_gpt2_of_width_256_does_not_fail(seed: int) -> None:
    made = wide_gpt2(6, seed=seed)
    found = {name: {one.status for one in run_check(name, made)} for name in CHECKS}
    assert found["norm-kind"] == found["dead-direction"] == {"pass"}
    assert found["depth-profile"] == {"warn", "pass"}


def test_a_trained_neox_does_not_fail() -> None:
    found = statuses(trained_neox()[0])
    assert found["norm-kind"] == found["dead-direction"] == {"pass"}
    assert "fail" not in found["depth-profile"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_half_precision_does_not_fail(name: str, dtype: torch.dtype) -> None:
    assert all("fail" not in found for found in statuses(zoo.build(name, dtype)).values())


def test_fresh_weights_are_of_the_same_config_and_another_draw() -> None:
    loaded = subject(zoo.build("gemma3", torch.bfloat16)).loaded
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    fresh, again, other = (freshly_initialised(loaded, seed=seed) for seed in (3, 3, 4))
    assert type(fresh.model) is type(loaded.model)
    assert fresh.source.name == "made (random init)"
    assert fresh.tokenizer is loaded.tokenizer
    assert {p.dtype for p in fresh.model.parameters()} == {torch.bfloat16}
    assert not fresh.model.training
    weights = [one.model.state_dict() for one in (fresh, again, other)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert not torch.equal(weights[0][name], before[name])
    assert bool((weights[0]["model.norm.weight"] == 0).all())  # of a 1 + w norm
    assert all(torch.equal(tensor, before[key]) for key, tensor in loaded.model.state_dict().items())


def test_a_class_that_cannot_be_built_anew_says_so() -> None:
    loaded = subject(zoo.build("llama")).loaded
    loaded.model.config.hidden_act = "no such function"
    with pytest.raises(FreshWeightsError, match="made cannot be built anew from its config"):
        freshly_initialised(loaded, seed=0)


@pytest.mark.cuda
def test_cuda_finds_the_same_as_the_cpu() -> None:
    here = subject(zoo.build("gpt2")).forward
    there = subject(zoo.build("gpt2").cuda()).forward
    assert list(there.profile.ratio()) == pytest.approx(list(here.profile.ratio()), rel=1e-3)
    assert there.kernel.cosine >= 1 - 1e-8
    assert there.kernel.classify() == "layer_norm"
    assert there.kernel.disagreement < there.kernel.tolerance
