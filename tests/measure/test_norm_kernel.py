"""Kernels of norms, against a dense fp64 SVD of the centred output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ternary_probe.measure.norm_kernel import (
    KernelError,
    NormKernel,
    ZeroGainError,
    kernel_direction,
    kernel_of_norm,
    observe_norm,
    probe_norm,
    zero_gain_axes,
)

WIDTH, TOKENS = 64, 800


def stream(
    *, mean: float = 0.5, anisotropy: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A stream with a mean, and axes of unequal strength on request."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, float(np.log10(anisotropy)), WIDTH, dtype=torch.float64) + mean
    return x.to(dtype).view(4, -1, WIDTH)


@torch.no_grad()
def norm(kind: str, gain: str, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A norm whose gains are drawn around one, then given the property named."""
    made = nn.LayerNorm(WIDTH) if kind == "layer_norm" else nn.RMSNorm(WIDTH, eps=1e-6)
    generator = torch.Generator().manual_seed(1)
    weight = torch.exp(0.4 * torch.randn(WIDTH, generator=generator))
    match gain:
        case "negative":
            weight[::3] *= -1
        case "zero":
            weight[5] = 0
        case "three zeros":
            weight[[2, 7, 40]] = 0
        case "tiny":
            weight[9] = 1e-4
        case "none":
            weight.fill_(1)
    made.weight.copy_(weight)
    if bias:
        made.bias.copy_(torch.randn(WIDTH, generator=generator))
    return made.to(dtype)


class Dense:
    """What a dense fp64 SVD says of ``Y - mean(Y)``, all rows held."""

    def __init__(self, module: nn.Module, kind: str, x: torch.Tensor) -> None:
        rows = x.double().reshape(-1, WIDTH).numpy()
        if kind == "layer_norm":
            rows = rows - rows.mean(1, keepdims=True)
        clean = rows / np.sqrt((rows**2).mean(1, keepdims=True) + (1e-5 if kind == "layer_norm" else 1e-6))
        self.gain = module.weight.detach().double().numpy()
        bias = getattr(module, "bias", None)
        y = clean * self.gain + (0 if bias is None else bias.detach().double().numpy())
        _, singular, right = np.linalg.svd(y - y.mean(0), full_matrices=False)
        self.eigenvalues = singular[::-1] ** 2 / len(y)
        self.bottom = right[::-1]
        self.y = y

    def energy(self) -> float:
        v = 1 / self.gain
        projected = (self.y - self.y.mean(0)) @ (v / np.linalg.norm(v))
        return float((projected**2).mean() / np.median(self.eigenvalues))

    def cosine(self) -> float:
        v = 1 / self.gain
        return float(abs(self.bottom[0] @ (v / np.linalg.norm(v))))


def measured(module: nn.Module, x: torch.Tensor) -> NormKernel:
    return kernel_of_norm(x, probe_norm(module, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no beta", "beta"])
@pytest.mark.parametrize("gain", ["plain", "negative", "tiny", "none"])
def test_a_layer_norm_has_its_kernel_at_the_inverse_gain(gain: str, bias: bool, dtype: torch.dtype) -> None:
    module, x = norm("layer_norm", gain, bias=bias, dtype=dtype), stream(dtype=dtype)
    kernel, dense = measured(module, x), Dense(module, "layer_norm", x)
    assert kernel.kind == kernel.classify() == "layer_norm"
    assert kernel.cosine >= 1 - 1e-8
    assert dense.cosine() >= 1 - 1e-8
    assert kernel.energy < 1e-12
    assert kernel.other_directions == 0
    np.testing.assert_allclose(np.linalg.eigvalsh(kernel.covariance.numpy())[1:], dense.eigenvalues[1:], rtol=1e-6)


@pytest.mark.parametrize("gain", ["plain", "negative", "none"])
def test_an_rms_norm_has_none_and_its_figures_are_the_svds(gain: str) -> None:
    module, x = norm("rms_norm", gain), stream()
    kernel, dense = measured(module, x), Dense(module, "rms_norm", x)
    assert kernel.kind == kernel.classify() == "rms_norm"
    assert kernel.energy == pytest.approx(dense.energy(), rel=1e-6)
    assert kernel.cosine == pytest.approx(dense.cosine(), rel=1e-6)
    assert kernel.whitened_cosine < 4 / WIDTH**0.5
    assert kernel.directions() == 0
    np.testing.assert_allclose(np.linalg.eigvalsh(kernel.covariance.numpy()), dense.eigenvalues, rtol=1e-6)


def test_an_rms_norm_with_one_tiny_gain_is_still_one_although_the_raw_cosine_is_that_of_a_layer_norm() -> None:
    module, x = norm("rms_norm", "tiny"), stream()
    kernel = measured(module, x)
    assert kernel.cosine > 0.9999
    assert kernel.participation == pytest.approx(1, abs=1e-3)
    assert kernel.classify() == "rms_norm"
    assert kernel.directions() == 0


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("gain", "axes"), [("zero", (5,)), ("three zeros", (2, 7, 40))])
def test_zero_gains_are_the_kernel_and_the_inverse_of_the_others_is_not(
    kind: str, gain: str, axes: tuple[int, ...]
) -> None:
    module, x = norm(kind, gain), stream()
    kernel, dense = measured(module, x), Dense(module, kind, x)
    assert kernel.zero_axes == axes
    assert kernel.cosine == pytest.approx(1, abs=1e-8)
    assert (dense.eigenvalues < 1e-12).sum() == len(axes)  # no further one: THEORY 2.1
    assert kernel.kind == kernel.classify() == kind
    assert kernel.other_directions == 0
    assert kernel.directions() == len(axes) + (kind == "layer_norm")  # of the whitened covariance, which has both
    assert kernel.schur_ratio is None


def test_on_an_anisotropic_stream_the_energy_still_shows_the_kernel() -> None:
    module, x = norm("layer_norm", "plain"), stream(anisotropy=1e5)
    kernel = measured(module, x)
    assert kernel.energy <= max(1e-8, kernel.energy_floor)
    assert kernel.classify() == "layer_norm"


def test_an_rms_norm_on_a_mean_free_stream_is_told_by_the_probe_alone() -> None:
    x = stream(dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True)
    kernel = measured(norm("rms_norm", "plain", dtype=torch.float64), x)
    assert kernel.kind == "rms_norm"
    assert kernel.mean_free
    assert kernel.classify() == "layer_norm"
    assert kernel.other_directions == 1


def test_the_schur_ratio_is_that_of_the_dense_inverse() -> None:
    module, x = norm("rms_norm", "plain"), stream()
    kernel = measured(module, x)
    covariance, v = kernel.covariance.numpy(), kernel_direction(kernel.gain).numpy()
    expected = 1 / ((v @ np.linalg.inv(covariance) @ v) * (v @ covariance @ v))
    assert kernel.schur_ratio == pytest.approx(expected, rel=1e-9)
    assert kernel.delta_gamma == pytest.approx(1 - expected)


def test_isotropic_data_give_the_published_null_of_delta_gamma() -> None:
    draws = []
    for seed in range(12):
        x = stream(mean=0.0, seed=seed)
        draws.append(measured(norm("rms_norm", "none"), x).delta_gamma)
    assert np.mean(draws) == pytest.approx((WIDTH - 1) / (TOKENS - 1), rel=0.1)


def test_a_direction_cancelled_upstream_is_counted_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = stream(dtype=torch.float64)
        w = torch.ones(WIDTH, dtype=torch.float64)
        w[: WIDTH // 2] = -1
        w /= WIDTH**0.5
        x = (x - (x @ w)[..., None] * w).to(dtype)
        kernel = measured(norm("rms_norm", "plain", dtype=dtype), x)
        assert kernel.other_directions == 1, dtype
        assert kernel.classify() == "rms_norm"


def test_the_output_of_the_module_itself_is_set_beside_the_recomputed_one() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module, x = norm("layer_norm", "plain", bias=True, dtype=dtype), stream(dtype=dtype)
        kernel = observe_norm(module, lambda: module(x))  # noqa: B023
        assert 0 < kernel.disagreement < kernel.tolerance


def test_errors_name_the_norm_and_the_mend() -> None:
    module, x = norm("rms_norm", "plain"), stream()
    with pytest.raises(KernelError, match=r"64 tokens cannot span the 64 dimensions of norm: give more than 64 .* 256"):
        measured(module, x.reshape(-1, WIDTH)[:WIDTH])
    with pytest.raises(KernelError, match="lonely did not run"):
        observe_norm(module, lambda: None, name="lonely")
    with pytest.raises(KernelError, match="norm is not a LayerNorm or RMSNorm"):
        probe_norm(nn.Linear(WIDTH, WIDTH), x)
    with pytest.raises(ZeroGainError, match="zero at 1 axes"):
        kernel_direction(torch.tensor([1.0, 0.0]))
    assert zero_gain_axes(torch.tensor([0.0, 1.0, -0.0])) == (0, 2)


def test_the_kernel_direction_survives_gains_no_inverse_of_which_fits_a_float() -> None:
    v = kernel_direction(torch.tensor([1e-320, 1.0, -2.0], dtype=torch.float64))
    assert v.norm() == pytest.approx(1)
    assert float(v[0]) == pytest.approx(1)


@pytest.mark.cuda
def test_cuda_gives_the_same_kernel() -> None:
    module, x = norm("layer_norm", "plain", bias=True), stream()
    here = measured(module, x)
    there = observe_norm(module.cuda(), lambda: module(x.cuda()))
    assert there.cosine >= 1 - 1e-8
    assert there.classify() == here.classify()
    np.testing.assert_allclose(there.covariance.numpy(), here.covariance.numpy(), atol=1e-10)
