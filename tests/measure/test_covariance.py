"""Streaming Gram and covariance matrices, against dense ones over all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ternary_probe.anatomy import NonFiniteError
from ternary_probe.measure.covariance import Covariance, GramMatrix, smallest_singular


def rows(n: int, width: int, *, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


def with_singular_values(values: np.ndarray, n: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    left = np.linalg.qr(draw.standard_normal((n, len(values))))[0]
    right = np.linalg.qr(draw.standard_normal((len(values), len(values))))[0]
    return left * values @ right.T


@pytest.mark.parametrize("width", [1, 3, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_gram_in_chunks_equals_the_dense_product(width: int, chunk: int) -> None:
    x = rows(64, width)
    gram = GramMatrix(width)
    for part in x.split(chunk):
        gram.add(part)
    assert gram.rows == 64
    np.testing.assert_allclose(gram.matrix.numpy(), x.numpy().T @ x.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_are_multiplied_in_fp64(dtype: torch.dtype) -> None:
    x = rows(50, 8).to(dtype)
    gram = GramMatrix(8)
    gram.add(x.view(2, 25, 8))
    exact = x.double().numpy()
    np.testing.assert_allclose(gram.matrix.numpy(), exact.T @ exact, rtol=1e-14)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_covariance_in_unequal_chunks_equals_the_two_pass_one(offset: float) -> None:
    x = rows(500, 9, offset=offset)
    covariance = Covariance(9)
    for part in x.split([1, 7, 192, 300]):
        covariance.add(part)
    assert covariance.rows == 500
    centred = x.numpy() - x.numpy().mean(0)
    np.testing.assert_allclose(covariance.matrix.numpy(), centred.T @ centred / 500, rtol=1e-9, atol=1e-9)


def test_sigma_min_is_that_of_the_svd_where_fp32_would_return_nothing() -> None:
    wanted = np.geomspace(1e4, 1e-1, 40)
    x = with_singular_values(wanted, 400)
    gram = GramMatrix(40)
    gram.add(torch.from_numpy(x))
    found = smallest_singular(gram)
    assert found.value == pytest.approx(np.linalg.svd(x, compute_uv=False)[-1], rel=1e-3)
    assert found.value > 10 * found.floor
    single = torch.from_numpy(x).float()
    assert torch.linalg.eigvalsh(single.T @ single)[0].clamp(min=0).sqrt() != pytest.approx(1e-1, rel=0.5)


def test_a_missing_direction_is_below_the_floor_and_a_present_one_above() -> None:
    values = np.geomspace(100, 1, 30)
    for last, below in ((0.0, True), (1e-3, False)):
        values[-1] = last
        gram = GramMatrix(30)
        gram.add(torch.from_numpy(with_singular_values(values, 300)))
        found = smallest_singular(gram)
        assert (found.value <= found.floor) == below
        assert found.floor == found.gram_floor == pytest.approx((2.2e-16 * 30 * 1e4) ** 0.5, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_floor_is_what_rounding_a_missing_direction_leaves(dtype: torch.dtype) -> None:
    values = np.full(32, 20.0)
    values[-1] = 0.0
    gram = GramMatrix(32)
    gram.add(torch.from_numpy(with_singular_values(values, 4000)).to(dtype))
    found = smallest_singular(gram, dtype)
    assert 0.3 * found.dtype_floor < found.value < found.dtype_floor


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_an_error(bad: float) -> None:
    gram = GramMatrix(4)
    x = rows(8, 4)
    x[3, 2] = bad
    gram.add(x)
    with pytest.raises(NonFiniteError, match=r"output of h\.1 is not finite"):
        smallest_singular(gram, where="the output of h.1")


@pytest.mark.cuda
def test_cuda_accumulates_the_same_matrices() -> None:
    x = rows(600, 96, offset=3.0)
    here, there = Covariance(96), Covariance(96, "cuda")
    gram, far = GramMatrix(96), GramMatrix(96, "cuda")
    for part in x.split(100):
        here.add(part)
        gram.add(part)
        there.add(part.cuda())
        far.add(part.cuda())
    torch.testing.assert_close(there.matrix.cpu(), here.matrix, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(far.matrix.cpu(), gram.matrix, rtol=1e-12, atol=1e-9)
    assert smallest_singular(far).value == pytest.approx(smallest_singular(gram).value, rel=1e-9)
