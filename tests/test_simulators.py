"""The simulators against the closed forms and against a dense, slow rewriting of their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ternary_probe import simulators, theory
from ternary_probe.errors import ProbeError


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1])
def test_two_layer_ratio_agrees_with_the_exact_form_within_three_standard_errors(rate):
    sample = simulators.two_layer(rate, width=1024, inputs=64, seeds=range(6))
    estimate, exact = sample.ratio(), theory.exact_ratio(rate)

    assert estimate.standard_error < 0.02
    assert abs(estimate.value - exact.ratio) < 3 * estimate.standard_error
    magnitude = sample.radial_fraction("constant")
    assert abs(magnitude.value - exact.radial_magnitude) < 3 * magnitude.standard_error


@pytest.mark.parametrize("rate", [0.003, 0.02, 0.1])
def test_narrow_networks_agree_with_the_form_of_their_width(rate):
    sample = simulators.two_layer(rate, width=256, inputs=128, seeds=range(24))
    estimate, exact = sample.ratio(), theory.exact_ratio(rate, width=256)

    assert estimate.standard_error < 0.02
    assert abs(estimate.value - exact.ratio) < 3 * estimate.standard_error
    assert sample.radial_fraction("sign_flip").value == pytest.approx(exact.radial_sign, rel=0.1)


def test_shapes_of_magnitude_noise_give_their_own_ratios():
    sample = simulators.two_layer(0.01, noises=simulators.NOISES, width=512, inputs=32, seeds=range(24))

    for noise, form in (
        ("half_normal", theory.half_normal_magnitude),
        ("multiplicative", theory.multiplicative_gaussian),
    ):
        estimate = sample.ratio(denominator=noise)
        s, r = theory.moments(form(0.01))
        exact = theory.flip_transverse_energy(0.01, width=512) / theory.transverse_energy(s, r)
        assert estimate.standard_error < 0.01
        assert abs(estimate.value - exact) < 3 * estimate.standard_error
    assert sample.ratio(denominator="half_normal").value == pytest.approx(1.65, abs=0.04)
    assert sample.ratio(denominator="multiplicative").value == pytest.approx(1.0, abs=0.03)


def test_a_quantizer_of_the_weights_has_its_gaussian_radial_fraction():
    quantizers = {
        "sign": lambda w: w.sign() * w.abs().mean(1, keepdim=True),
        "absmean": lambda w: (w / w.abs().mean()).round().clamp(-1, 1) * w.abs().mean(),
    }
    sample = simulators.two_layer(0.01, noises=(), quantizers=quantizers, width=512, inputs=64, seeds=range(4))

    assert sample.arms == ("sign", "absmean")
    for scheme in quantizers:
        expected = theory.gaussian_quantizer(scheme).radial_post
        assert sample.radial_fraction(scheme).value == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("residual", [False, True])
def test_depth_series_agree_with_the_closed_forms_within_three_standard_errors(residual):
    estimate = simulators.depth(6, 0.01, residual=residual, width=256, inputs=48, seeds=range(60)).ratio()
    exact = torch.tensor(theory.depth_ratio(0.01, 6, residual=residual, width=256))

    assert (estimate.standard_error / estimate.value).max() < 0.02
    assert ((estimate.value - exact).abs() < 3 * estimate.standard_error).all()


def test_energies_equal_a_dense_float64_rewriting_of_the_definition():
    width, inputs, seed = 24, 5, 3
    sample = simulators.two_layer(0.2, width=width, inputs=inputs, seeds=[seed], dtype=torch.float64, chunk=2)
    w1 = simulators._gaussian((width, width), seed, simulators._WEIGHT).numpy().astype(np.float32) / np.float32(
        math.sqrt(width)
    )
    w2 = simulators._gaussian((width, width), seed, simulators._SECOND).numpy().astype(np.float32) / np.float32(
        math.sqrt(width)
    )
    x = simulators._gaussian((inputs, width), seed, simulators._INPUT).double().numpy()
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    mask = simulators._flip_mask(torch.zeros(width, width), 0.2, seed).numpy()
    w1, w2 = w1.astype(np.float64), w2.astype(np.float64)
    delta = np.sqrt(4 * (w1[mask] ** 2).sum() / width**2)
    perturbed = {"sign_flip": np.where(mask, -w1, w1), "constant": w1 + delta * np.sign(w1)}
    for row, arm in enumerate(sample.arms):
        across = along = 0.0
        for vector in x:
            y = w2 @ np.maximum(w1 @ vector, 0)
            change = w2 @ np.maximum(perturbed[arm] @ vector, 0) - y
            projector = np.outer(y, y) / (y @ y)
            along += change @ projector @ change
            across += change @ (np.eye(width) - projector) @ change
        assert sample.transverse[row, 0] == pytest.approx(across, rel=1e-5)
        assert sample.radial[row, 0] == pytest.approx(along, rel=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_depth_equals_a_dense_rewriting_of_the_definition(residual):
    width, seed, rate = 16, 1, 0.3
    matrices = [torch.randn(width, width, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    start = torch.randn(2, width, generator=torch.Generator().manual_seed(9)).double()
    sample = simulators.depth(
        3, rate, residual=residual, matrices=matrices, hidden_states=start, seeds=[seed], dtype=torch.float64
    )

    def step(y: np.ndarray, w: np.ndarray) -> np.ndarray:
        if residual:
            return y + np.maximum(w @ (y / np.linalg.norm(y)), 0)
        h = np.maximum(w @ y, 0)
        return h / np.linalg.norm(h)

    expected = np.zeros((2, 3))
    for vector in start.float().double().numpy():
        states = [vector / np.linalg.norm(vector)] * 3
        for layer, matrix in enumerate(matrices):
            w = matrix.numpy()
            mask = simulators._flip_mask(matrix, rate, seed, layer).numpy()
            delta = np.sqrt(4 * (w[mask] ** 2).sum() / w.size)
            weights = (w, np.where(mask, -w, w), w + delta * np.sign(w))
            states = [step(y, m) for y, m in zip(states, weights, strict=True)]
            unit = states[0] / np.linalg.norm(states[0])
            for arm in (1, 2):
                expected[arm - 1, layer] += states[arm] @ states[arm] - (states[arm] @ unit) ** 2
    np.testing.assert_allclose(torch.cat([sample.sign, sample.magnitude]).numpy(), expected, rtol=1e-5)


def test_chunks_and_arms_do_not_change_the_draws():
    whole = simulators.two_layer(0.05, width=64, inputs=30, seeds=[0, 5])
    pieces = simulators.two_layer(0.05, noises=simulators.NOISES, width=64, inputs=30, seeds=[5, 0], chunk=7)

    torch.testing.assert_close(whole.transverse, pieces.transverse[:2].flip(1), rtol=1e-6, atol=0)


def test_repeated_runs_are_equal_and_seeds_differ():
    first, second = (simulators.depth(2, 0.1, residual=True, width=32, inputs=8, seeds=[0, 1]) for _ in range(2))

    assert torch.equal(first.sign, second.sign)
    assert not torch.equal(first.sign[0], first.sign[1])


def test_interval_is_students_t_over_seeds():
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    estimate = simulators._estimate(values)
    low, high = estimate.interval(0.95)

    half = 4.302652729911275 * values.std() / math.sqrt(3)
    assert (low, high) == (pytest.approx(7 / 3 - half), pytest.approx(7 / 3 + half))
    with pytest.raises(ProbeError, match="2 seeds"):
        simulators._estimate(values[:1]).interval()


def test_square_crops_are_leading_squares_of_the_smallest_side():
    crops = simulators.square_crops([torch.ones(5, 3), torch.arange(16.0).view(4, 4)])

    assert [tuple(crop.shape) for crop in crops] == [(3, 3), (3, 3)]
    assert crops[1][2, 2] == 10


@pytest.mark.parametrize(
    "call",
    [
        lambda: simulators.two_layer(0.0),
        lambda: simulators.two_layer(0.1, width=0),
        lambda: simulators.two_layer(0.1, seeds=[]),
        lambda: simulators.two_layer(0.1, seeds=[1, 1]),
        lambda: simulators.two_layer(0.1, noises=["uniform"]),
        lambda: simulators.two_layer(0.1, noises=["constant", "constant"]),
        lambda: simulators.two_layer(1e-6, width=4, inputs=2, seeds=[0]),
        lambda: simulators.two_layer(0.5, width=4, inputs=2, seeds=[0]).ratio(denominator="half_normal"),
        lambda: simulators.depth(0, 0.1, residual=False),
        lambda: simulators.depth(2, 0.1, residual=False, matrices=[torch.ones(4, 4)]),
        lambda: simulators.depth(1, 0.1, residual=False, matrices=[torch.ones(4, 3)]),
        lambda: simulators.depth(1, 0.5, residual=False, matrices=[torch.eye(4)], hidden_states=torch.ones(2, 3)),
        lambda: simulators.depth(1, 0.9, residual=False, matrices=[-torch.eye(4)], hidden_states=torch.ones(2, 4)),
        lambda: simulators.square_crops([]),
        lambda: simulators.square_crops([torch.ones(3, 3)], 4),
    ],
)
def test_impossible_simulations_are_refused(call):
    with pytest.raises(ProbeError):
        call()
