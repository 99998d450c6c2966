"""σ_min of the residual stream over depth, against an SVD of all rows held."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from anatomy.made_models import Stack, seeded
from gates.forward_cases import (
    built,
    dense_sigma_min,
    plant_fall,
    random_windows,
    run_check,
    streams,
    subject,
    text_windows,
    wide_gpt2,
    with_windows,
)

from ternary_probe.anatomy import AnatomyError, examine
from ternary_probe.gates import GateOptions, _forward
from ternary_probe.gates._forward import observe_forward
from ternary_probe.measure import depth
from ternary_probe.measure.depth import DepthProfile, point_groups
from ternary_probe.text import make_windows, read_text


def layers(model: Any) -> list[Any]:
    body = model.base_model
    return list(getattr(body, "layers", None) or body.h)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi", "mixtral", "granite"])
def test_the_profile_is_that_of_a_dense_svd(name: str) -> None:
    model, windows = zoo.build(name), text_windows()
    profile = observe_forward(examine(model), windows).profile
    expected = [dense_sigma_min(rows) for rows in streams(model, layers(model), windows)]
    np.testing.assert_allclose(profile.sigma, expected, rtol=1e-6)
    np.testing.assert_allclose(profile.ratio(), np.array(expected) / expected[0], rtol=1e-6)
    np.testing.assert_allclose(profile.step()[1:], np.array(expected[1:]) / expected[:-1], rtol=1e-6)
    assert math.isnan(profile.step()[0])
    assert not profile.scaled
    assert bool((profile.floor < 1e-3 * profile.sigma).all())


def test_passes_over_groups_of_blocks_give_the_same_figures(monkeypatch) -> None:
    model, windows = zoo.build("gpt2", num_hidden_layers=5), text_windows()
    whole = observe_forward(examine(model), windows)
    monkeypatch.setattr(_forward, "point_groups", lambda blocks, width: point_groups(blocks, width, 2 * 8 * width**2))
    parts = observe_forward(examine(model), windows)
    assert np.array_equal(whole.profile.sigma, parts.profile.sigma)
    assert whole.kernel.energy == parts.kernel.energy
    assert [list(group) for group in point_groups(5, 10, 1600)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(group) for group in point_groups(2, 1000, 1)] == [[0], [1], [2]]


def test_few_tokens_are_not_measurable_and_the_sentence_says_how_many_are() -> None:
    model = zoo.build("llama")
    for windows, tokens in ((1, 32), (3, 96)):
        (finding,) = run_check("depth-profile", model, options=GateOptions(window=32, windows=windows))
        assert finding.status == "inconclusive"
        assert f"{tokens} tokens for a stream of 32 dimensions; give 128 or more" in finding.message
    found = run_check("depth-profile", model, options=GateOptions(window=32, windows=4))
    assert [one.status for one in found] == ["pass", "pass"]
    asked_less = run_check("depth-profile", model, options=GateOptions(window=32, windows=3), tokens_per_dimension=2)
    assert [one.status for one in asked_less] == ["pass", "pass"]


def test_few_distinct_ids_are_not_measurable_with_rotary_positions_and_are_with_learned_ones() -> None:
    windows = random_windows(1024, 24)
    (finding,) = run_check("depth-profile", with_windows(zoo.build("llama"), windows))
    assert finding.status == "inconclusive"
    assert "24 distinct token ids cannot span the 32 dimensions" in finding.message
    found = run_check("depth-profile", with_windows(zoo.build("gpt2"), windows))
    assert {one.status for one in found} <= {"pass", "warn"}
    assert found[0].details["ratio"][0] == 1


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "opt_post"])
def test_models_without_identity_skips_are_named_not_failed(name: str) -> None:
    (finding,) = run_check("depth-profile", zoo.build(name))
    assert finding.status == "not_applicable"
    assert ("sandwich" if name != "opt_post" else "post") in finding.message


def test_a_healthy_gpt2_at_random_init_warns_at_most() -> None:
    ratio, step = run_check("depth-profile", wide_gpt2(6))
    assert ratio.status == "warn"
    assert 0.25 < ratio.measured < 1
    assert step.status == "pass"


def test_details_give_every_figure_and_the_dips() -> None:
    ratio, step = run_check("depth-profile", zoo.build("gpt2", num_hidden_layers=4))
    details = ratio.details
    assert details["streams"][:2] == ["input", "transformer.h.0"]
    assert all(len(details[key]) == 5 for key in ("streams", "sigma_min", "floor", "ratio", "step"))
    assert details["dips"] == {
        name: value for name, value in zip(details["streams"], details["step"], strict=True) if value and value < 1
    }
    assert ratio.measured == min(details["ratio"][1:])
    assert step.measured == min(details["step"][1:])


class Scaled(torch.nn.Module):
    """Three blocks that multiply the whole stream by a scalar, as Gemma 4 does."""

    class Layer(torch.nn.Module):
        def __init__(self, scalar: float) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(16)
            self.linear = torch.nn.Linear(16, 16)
            self.scalar = scalar

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scalar * (x + self.linear(self.norm(x)))

    class Body(torch.nn.Module):
        def __init__(self, scalar: float) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(256, 16)
            self.layers = torch.nn.ModuleList(Scaled.Layer(scalar) for _ in range(3))
            self.norm = torch.nn.RMSNorm(16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    def __init__(self, scalar: float) -> None:
        super().__init__()
        self.body = Scaled.Body(scalar)
        self.head = torch.nn.Linear(16, 256, bias=False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.body.table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids))


def test_scalars_of_the_whole_stream_are_divided_out_and_the_raw_figures_stand_beside() -> None:
    def profile(scalar: float) -> DepthProfile:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Scaled(scalar).eval().requires_grad_(False)
        return observe_forward(examine(model), text_windows()).profile

    plain, scaled = profile(1.0), profile(0.05)
    assert scaled.scaled
    assert not plain.scaled
    np.testing.assert_allclose(scaled.scale, [1, 0.05, 0.05**2, 0.05**3], rtol=1e-4)
    np.testing.assert_allclose(scaled.ratio(raw=True), scaled.ratio() * scaled.scale)
    np.testing.assert_allclose(scaled.step(raw=True)[1:], 0.05 * scaled.step()[1:], rtol=1e-4)
    np.testing.assert_allclose(scaled.ratio()[1], plain.ratio()[1], rtol=1e-4)  # the first block reads the same stream
    assert scaled.ratio(raw=True)[1] < 0.05 < scaled.ratio()[1]


def test_a_model_without_a_separable_backbone_is_run_whole() -> None:
    model = seeded(Stack, "pre", "pre")
    windows = random_windows(512, 40)
    evidence = observe_forward(examine(model, input_ids=windows.inputs[:2, :12]), windows)
    expected = [dense_sigma_min(rows) for rows in streams(model, list(model.blocks), windows)]
    np.testing.assert_allclose(evidence.profile.sigma, expected, rtol=1e-6)
    assert evidence.kernel.kind == "layer_norm"


def test_a_stream_whose_embedding_is_normed_is_measured_from_its_first_block_on() -> None:
    model = built(
        "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=4, n_head=4, vocab_size=256, use_cache=False
    )
    ratio, step = run_check("depth-profile", model)
    assert ratio.details["ratio"][0] is None
    assert ratio.details["ratio"][1] == 1
    assert "of that of transformer.h.0, the first stream above the floor of rounding" in ratio.message
    assert {ratio.status, step.status} <= {"pass", "warn"}


@pytest.mark.parametrize(
    ("sigma", "floor", "statuses"),
    [
        ([1.0, 2.0, 3.0], 1e-6, ["pass", "pass"]),
        ([1.0, 0.9, 3.0], 1e-6, ["warn", "pass"]),
        ([1.0, 9.0, 2.0], 1e-6, ["pass", "warn"]),
        ([1.0, 9.0, 1.1], 1e-6, ["pass", "fail"]),
        ([1.0, 0.5, 0.24], 1e-6, ["fail", "pass"]),
        ([1.0, 1.0, 0.1], 0.12, ["fail", "fail"]),  # at its floor, and even the floor is too low
        ([1.0, 1.0, 0.1], 0.2, ["fail", "inconclusive"]),  # may be 0.2: a warning, not a failure
        ([1.0, 1.0, 0.1], 0.5, ["inconclusive", "inconclusive"]),
        ([0.1, 0.1, 0.1], 0.5, ["inconclusive"]),
    ],
)
def test_falls_are_graded_by_ratio_and_step_and_not_below_the_floor(monkeypatch, sigma, floor, statuses) -> None:
    made = subject(zoo.build("llama"))
    names = ("input", "model.layers.0", "model.layers.1")
    made.forward.profile = DepthProfile(names, np.array(sigma), np.full(3, floor), np.ones(3), 512, 32)
    assert [one.status for one in run_check("depth-profile", made)] == statuses


def test_a_candidate_whose_stream_falls_against_its_base_fails_although_it_passes_alone() -> None:
    base, model = zoo.build("llama", num_hidden_layers=4), zoo.build("llama", num_hidden_layers=4)
    plant_fall(model, model.model.layers[2], "mlp", "post_attention_layernorm", text_windows(), keep=0.1)
    generous = {"ratio_warn": 0.01, "ratio_fail": 0.001, "step_warn": 0.01, "step_fail": 0.001}
    ratio, step, against = run_check("depth-profile", model, base, **generous)
    assert ratio.status == step.status == "pass"
    assert against.status == "fail"
    assert against.measured < 0.15
    assert against.details["cause"] == "model.layers.2.mlp"
    *_, same = run_check("depth-profile", base, base)
    assert same.status == "pass"
    assert same.measured == pytest.approx(1)
    *_, other = run_check("depth-profile", model, zoo.build("llama"), **generous)
    assert other.status == "inconclusive"
    assert "another number of blocks" in other.message


def test_random_init_figures_stand_beside_the_trained_ones() -> None:
    ratio, step = run_check(
        "depth-profile", zoo.build("gpt2"), options=GateOptions(window=64, windows=8, random_init=True)
    )
    assert "; random init: lowest 0." in ratio.message
    assert "; random init: lowest 0." in step.message
    fresh = ratio.details["random_init"]
    assert fresh["streams"] == ratio.details["streams"]
    assert fresh["sigma_min"] != ratio.details["sigma_min"]


def test_a_block_that_is_not_there_cannot_be_traced() -> None:
    forward = subject(zoo.build("llama")).forward
    with pytest.raises(AnatomyError, match="there is no block 3"):
        forward.locate(3)


@pytest.mark.slow
def test_the_demo_model_keeps_every_direction_at_every_depth(demo_model) -> None:
    windows = make_windows(read_text(), demo_model.tokenizer, window=512, windows=5)  # 2,560 tokens, 4.4 a dimension
    forward = observe_forward(examine(demo_model.model), windows)
    profile, kernel = forward.profile, forward.kernel
    assert bool((profile.ratio() >= 1).all())
    assert float(np.nanmin(profile.step())) > 0.3
    assert bool((profile.sigma > 100 * profile.floor).all())
    assert kernel.kind == kernel.classify() == "rms_norm"
    assert kernel.whitened_cosine < 4 / kernel.width**0.5
    assert kernel.other_directions == 0
    picked = [0, 16, 30]
    blocks = list(demo_model.model.model.layers)
    dense = streams_at(demo_model.model, blocks, windows, picked)
    np.testing.assert_allclose(profile.sigma[picked], [dense_sigma_min(rows) for rows in dense], rtol=1e-6)
    x, norm = dense[-1], demo_model.model.model.norm
    y = norm.weight.double().numpy() * x / np.sqrt((x**2).mean(1, keepdims=True) + norm.variance_epsilon)
    singular = np.linalg.svd(y - y.mean(0), compute_uv=False)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(kernel.covariance.numpy())[::-1], singular**2 / len(y), rtol=1e-6, atol=1e-12
    )


def streams_at(model: Any, blocks: list[Any], windows: Any, points: list[int]) -> list[np.ndarray]:
    """The streams at a few points only: all 31 would take half a gigabyte."""
    assert depth.GRAM_BYTES > 0
    return [rows for point, rows in enumerate(streams(model, blocks, windows)) if point in points]
