"""Ternary quantizers against dense definitions, exhaustive search and the Gaussian constants; their edges."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ternary_probe import theory
from ternary_probe.errors import ProbeError
from ternary_probe.least_squares import fit_two_planes
from ternary_probe.schemes import METHODS, Scheme, parse
from ternary_probe.ternary import least_squares_scale, quantization_error, quantize

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SINGLE = ["sign", "absmean", "absmean+ls", "twn", "optimal"]
GRANULARITIES = ["row", "tensor", "g4", "g7"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def squared_error(w: torch.Tensor, scheme: str) -> float:
    return float((quantize(w, scheme).dequantize(torch.float64) - w.double()).square().sum())


def split_units(w: np.ndarray, where: str) -> list[np.ndarray]:
    if where == "tensor":
        return [w.ravel()]
    size = w.shape[1] if where == "row" else int(where[1:])
    return [row[start : start + size] for row in w for start in range(0, w.shape[1], size)]


def dense(unit: np.ndarray, method: str) -> np.ndarray:
    """Quantized values of one unit, written down from the definitions with masks and means."""
    magnitude = np.abs(unit)
    mean = magnitude.mean()
    if mean == 0:
        return np.zeros_like(unit)
    if method == "sign":
        return np.where(unit >= 0, mean, -mean)
    if method.startswith("absmean"):
        codes = np.clip(np.round(unit / mean), -1, 1)
        return codes * (mean if method == "absmean" else (codes * unit).sum() / (codes**2).sum())
    kept = magnitude > 0.7 * mean
    return np.sign(unit) * kept * magnitude[kept].mean()


def best_ternary(unit: np.ndarray) -> float:
    """Least squared error over all 3^n code vectors, each with its best scale."""
    codes = np.indices((3,) * len(unit)).reshape(len(unit), -1) - 1
    inner, count = unit @ codes, np.maximum(np.abs(codes).sum(0), 1)
    return float((unit**2).sum() - (np.maximum(inner, 0) ** 2 / count).max())


# Against the definitions


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("where", GRANULARITIES)
@pytest.mark.parametrize("method", ["sign", "absmean", "absmean+ls", "twn"])
def test_values_equal_the_definition_unit_by_unit(method, where, dtype):
    w = gaussian(6, 18, dtype=dtype)
    w[2] = 0
    q = quantize(w, f"{method}@{where}")

    units = split_units(w.double().numpy(), where)
    expected = np.concatenate([dense(unit, method) for unit in units])
    np.testing.assert_allclose(q.dequantize(torch.float64).numpy().ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1500, 1536])
def test_absmean_codes_are_those_of_a_float64_mean_to_the_last_entry(columns, dtype):
    w = gaussian(700, columns, dtype=dtype)
    exact = (w.double() / w.double().abs().mean()).round().clamp(-1, 1)

    assert torch.equal(quantize(w, "absmean").codes[0].double(), exact)


@pytest.mark.parametrize("seed", range(40))
def test_absmean_ties_round_to_zero_as_in_round_half_to_even(seed):
    # Quarters in float32 with a mean that makes many quotients exactly 0.5.
    rng = np.random.default_rng(seed)
    row = rng.choice([0.25, 0.5, 1.0, -0.5, -1.0, 0.75], 8)
    row[-1] += 8 * 0.5 * 2 - np.abs(row).sum()  # mean |w| = 1 wherever the last entry stays positive
    w = torch.tensor(row[None])
    expected = (w / w.abs().mean()).round().clamp(-1, 1)

    assert torch.equal(quantize(w.float(), "absmean@row").codes[0].double(), expected)


def test_threshold_neighbours_in_every_dtype_fall_on_the_right_side():
    for dtype in FLOATS:
        for mean in (1.0, 1.3, 0.0123, 777.7):
            threshold = torch.tensor(mean * 0.5, dtype=dtype)
            row = torch.stack([threshold.nextafter(threshold * 2), threshold, threshold.nextafter(threshold * 0)])
            filler = torch.full((5,), mean * 1.1, dtype=dtype)
            w = torch.cat([row, filler])[None]
            expected = (w.double() / w.double().abs().mean()).round().clamp(-1, 1)
            assert torch.equal(quantize(w, "absmean").codes[0].double(), expected), (dtype, mean)


@pytest.mark.parametrize("where", ["row", "tensor", "g5"])
@pytest.mark.parametrize("columns", [1, 2, 7])
def test_optimal_equals_exhaustive_search(where, columns):
    w = gaussian(8 if where != "tensor" else 1, columns, seed=columns)
    got = (quantize(w, f"optimal@{where}").dequantize(torch.float64) - w.double()).square().sum()

    assert float(got) == pytest.approx(sum(best_ternary(u) for u in split_units(w.double().numpy(), where)), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    row=hnp.arrays(
        np.float32, st.integers(1, 12), elements=st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.3, 1e-3, 40.0])
    )
)
def test_optimal_on_short_rows_with_ties_equals_the_best_prefix(row):
    # 3^12 vectors are too many for a property test: for given magnitudes the best codes of size k are the k largest.
    sorted_magnitudes = np.sort(np.abs(row.astype(np.float64)))[::-1]
    gains = sorted_magnitudes.cumsum() ** 2 / np.arange(1, len(row) + 1)
    best = float((row.astype(np.float64) ** 2).sum() - gains.max())

    assert squared_error(torch.from_numpy(row[None]), "optimal") == pytest.approx(best, rel=1e-5, abs=1e-10)


def test_optimal_on_a_row_of_twelve_equals_exhaustive_search():
    w = gaussian(1, 12, seed=5)

    assert squared_error(w, "optimal") == pytest.approx(best_ternary(w.double().numpy()[0]), rel=1e-6)


FINITE = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=80, deadline=None)
@given(
    w=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=FINITE),
    where=st.sampled_from(GRANULARITIES),
)
def test_optimal_never_has_a_larger_error_than_any_other_single_plane(w, where):
    w = torch.from_numpy(w)
    best = squared_error(w, f"optimal@{where}")

    for method in SINGLE:
        assert best <= squared_error(w, f"{method}@{where}") * (1 + 1e-6)
    assert squared_error(w, f"absmean+ls@{where}") <= squared_error(w, f"absmean@{where}") * (1 + 1e-6)


# Two planes


@settings(max_examples=60, deadline=None)
@given(
    w=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=FINITE),
    where=st.sampled_from(GRANULARITIES),
)
def test_two_planes_are_never_worse_than_one_and_the_error_never_rises(w, where):
    w = torch.from_numpy(w)

    energy = float(w.double().square().sum())
    assert squared_error(w, f"planes:2@{where}") <= squared_error(w, f"optimal@{where}") + 1e-6 * energy
    course = fit_two_planes(w).explained
    slack = 1e-9 * w.double().square().sum(1)
    assert (course[1:] - course[:-1] >= -slack).all()


def test_two_plane_codes_are_the_nearest_of_the_nine_levels():
    w = gaussian(5, 64) * torch.tensor([1.0, 0.01, 30.0, 1.0, 2.0])[:, None]
    q = quantize(w, "planes:2@g16")
    scale = q.scale.double().repeat_interleave(16, dim=2)
    levels = torch.stack([i * scale[0] + j * scale[1] for i in (-1, 0, 1) for j in (-1, 0, 1)])
    nearest = (levels - w.double()).abs().amin(0)

    torch.testing.assert_close((q.dequantize(torch.float64) - w.double()).abs(), nearest, rtol=1e-6, atol=1e-7)


def test_two_plane_scales_are_least_squares_for_their_codes():
    w = gaussian(4, 200)
    q = quantize(w, "planes:2@row")
    for row in range(4):
        codes = q.codes[:, row].double().T.numpy()
        solution = np.linalg.lstsq(codes, w[row].double().numpy(), rcond=None)[0]
        np.testing.assert_allclose(q.scale[:, row, 0].numpy(), solution, rtol=0.02)


def test_two_planes_of_tiny_groups_come_close_to_exhaustive_search():
    w = gaussian(60, 4, seed=3).double().numpy()
    signs = np.array(list(itertools.product((-1, 0, 1), repeat=4)))
    best = 0.0
    for row in w:
        pairs = [(a, b) for a, b in itertools.combinations(range(len(signs)), 2)]
        first, second = signs[[a for a, _ in pairs]], signs[[b for _, b in pairs]]
        g11, g22, g12 = (first**2).sum(1), (second**2).sum(1), (first * second).sum(1)
        b1, b2 = first @ row, second @ row
        determinant = g11 * g22 - g12**2
        safe = np.where(determinant > 0, determinant, 1)
        gain = np.where(determinant > 0, (g22 * b1**2 - 2 * g12 * b1 * b2 + g11 * b2**2) / safe, 0)
        best += float(row @ row - gain.max())

    assert squared_error(torch.from_numpy(w), "planes:2@row") <= 1.5 * best + 0.01 * float((w**2).sum())


def test_two_planes_of_a_gaussian_have_the_error_of_the_theory():
    w = gaussian(4, 60_000)

    error = quantization_error(w, quantize(w, "planes:2@row"))
    constants = theory.gaussian_quantizer("planes:2")
    assert error.relative_error == pytest.approx(constants.error_energy, rel=0.02)
    assert error.cos2 == pytest.approx(constants.cos2, rel=1e-3)


# Gaussian constants


@pytest.mark.parametrize("scheme", SINGLE)
def test_gaussian_rows_have_the_constants_of_the_theory_within_half_a_percent(scheme):
    w = gaussian(64, 16_384, seed=1)
    error, constants = quantization_error(w, quantize(w, f"{scheme}@row")), theory.gaussian_quantizer(scheme)

    assert error.cos2 == pytest.approx(constants.cos2, rel=0.005)
    assert error.relative_error == pytest.approx(constants.error_energy, rel=0.005)
    assert error.radial_fraction == pytest.approx(constants.radial_pre, rel=0.005)
    assert 1 - error.sparsity == pytest.approx(constants.nonzero, rel=0.005)


def test_quantization_error_equals_a_dense_computation():
    w = gaussian(9, 31)
    q = quantize(w, "optimal@g8")
    x, y = w.double().ravel(), q.dequantize(torch.float64).ravel()
    error = quantization_error(w, q)

    assert error.cos2 == pytest.approx(float((x @ y) ** 2 / (x @ x) / (y @ y)))
    assert error.relative_error == pytest.approx(float((x - y) @ (x - y) / (x @ x)))
    assert error.radial_fraction == pytest.approx(float((x @ (y - x)) ** 2 / (x @ x) / ((x - y) @ (x - y))))
    assert error.sparsity == float((y == 0).double().mean())
    with pytest.raises(ProbeError, match="do not belong"):
        quantization_error(w.T, q)


# Layout, dtype, edges


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("where", GRANULARITIES)
def test_shapes_codes_and_scales_follow_the_granularity(scheme, where):
    w = gaussian(5, 18)
    q = quantize(w, f"{scheme}@{where}")

    planes = 2 if scheme == "planes:2" else 1
    groups = {"row": (5, 1), "tensor": (1, 1), "g4": (5, 5), "g7": (5, 3)}[where]
    assert q.codes.dtype == torch.int8
    assert tuple(q.codes.shape) == (planes, 5, 18)
    assert set(q.codes.unique().tolist()) <= {-1, 0, 1}
    assert q.scale.dtype == torch.float32
    assert tuple(q.scale.shape) == (planes, *groups)
    assert (q.scale >= 0).all()
    assert q.shape == (5, 18)


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("where", GRANULARITIES)
def test_strides_and_chunks_do_not_matter(scheme, where, monkeypatch):
    w = gaussian(18, 12)
    whole = quantize(w, f"{scheme}@{where}")
    monkeypatch.setattr("ternary_probe.ternary._CPU_CHUNK", 24)
    pieces = quantize(w.T.contiguous().T, f"{scheme}@{where}")

    assert torch.equal(whole.codes, pieces.codes)
    torch.testing.assert_close(whole.scale, pieces.scale, rtol=1e-7, atol=0)


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
def test_the_weight_is_left_alone_and_gradients_are_not_tracked(scheme):
    w = gaussian(6, 9).requires_grad_()
    before = w.detach().clone()
    q = quantize(w, scheme)

    assert torch.equal(w.detach(), before)
    assert not q.scale.requires_grad


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**40])
def test_scaling_the_weight_scales_the_result(scheme, factor):
    w = gaussian(6, 40)

    assert torch.equal(quantize(w * factor, scheme).codes, quantize(w, scheme).codes)
    torch.testing.assert_close(
        quantize(w * factor, scheme).scale, quantize(w, scheme).scale * factor, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("where", ["row", "g4", "tensor"])
def test_units_of_zeros_get_zero_codes_and_scales_and_are_counted(scheme, where):
    w = gaussian(4, 8)
    w[1] = 0
    w[2, 4:] = 0
    w[3] = 1e-42  # a float32 subnormal: its scale would not survive
    q = quantize(w, f"{scheme}@{where}")

    expected = {"row": [1, 3], "g4": [2, 3, 5, 6, 7], "tensor": []}[where]
    assert q.zero_units.ravel().nonzero().ravel().tolist() == expected
    assert q.zero_unit_count == len(expected)
    assert q.dequantize()[1].abs().max() == 0 or (scheme, where) == ("sign", "tensor")
    if where == "row":
        assert not q.codes[:, [1, 3]].any()


def test_both_zeros_count_as_positive_under_sign():
    w = torch.tensor([[0.0, -0.0, 2.0, -1.0]])

    assert quantize(w, "sign").codes[0].tolist() == [[1, 1, 1, -1]]


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("where", ["row", "g4", "tensor"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_non_finite_weight_is_named(scheme, where, bad, dtype):
    w = gaussian(7, 9, dtype=dtype)
    w[3, 8] = w[5, 1] = bad
    with pytest.raises(ProbeError, match=rf"weight \[3, 8\] is {bad}"):
        quantize(w, f"{scheme}@{where}")


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_empty_matrices_have_empty_codes(scheme, shape):
    for where in ("row", "tensor", "g4"):
        q = quantize(torch.zeros(shape), f"{scheme}@{where}")
        assert q.shape == shape
        assert q.zero_unit_count == 0
        assert tuple(q.dequantize().shape) == shape
        assert math.isnan(q.bits_per_weight().two_bit)
        assert math.isnan(quantization_error(torch.zeros(shape), q).cos2)


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
def test_the_largest_half_precision_weights_do_not_overflow(scheme):
    w = torch.full((3, 4096), 65504.0, dtype=torch.float16)
    w[1] *= -1
    q = quantize(w, f"{scheme}@row")

    assert torch.equal(q.dequantize(torch.float16), w)


@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
@pytest.mark.parametrize("columns", [256, 300])
def test_the_largest_float32_weights_do_not_overflow(scheme, columns):
    w = torch.full((3, columns), 3e38)
    w[1] *= -1

    torch.testing.assert_close(quantize(w, scheme).dequantize(), w)


def test_scales_that_a_dtype_cannot_hold_are_refused():
    big = quantize(torch.full((2, 3), 1e6), "absmean")
    with pytest.raises(ProbeError, match=r"overflows torch.float16"):
        big.dequantize(torch.float16)
    assert big.dequantize(torch.bfloat16).isfinite().all()
    with pytest.raises(ProbeError, match="overflows float32"):
        quantize(torch.full((2, 3), 1e200, dtype=torch.float64), "absmean@row")
    both = quantize(torch.tensor([[40_000.0, 70_000.0, 30_000.0]]), "planes:2@row")
    with pytest.raises(ProbeError, match=r"overflows torch.float16"):
        both.dequantize(torch.float16)
    with pytest.raises(ProbeError, match="floating dtype"):
        big.dequantize(torch.int8)


@pytest.mark.parametrize(
    "w",
    [
        torch.ones(3, 3, dtype=torch.int64),
        torch.ones(3, 3, dtype=torch.uint8),
        torch.ones(3, 3, dtype=torch.bool),
        torch.ones(3, 3, dtype=torch.complex64),
        torch.ones(9),
        torch.ones(2, 3, 3),
        torch.ones(3, 3, device="meta"),
    ],
    ids=str,
)
def test_what_is_no_loaded_floating_matrix_is_refused(w):
    with pytest.raises(ProbeError):
        quantize(w, "absmean")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scheme", ["absmean", "optimal@row", "twn@g5", "planes:2@g5"])
def test_dequantized_values_are_rounded_once(scheme, dtype):
    q = quantize(gaussian(6, 13), scheme)
    scale = q.scale.double()
    if q.scheme.group:
        scale = scale.repeat_interleave(q.scheme.group, dim=2)[:, :, :13]
    exact = (q.codes.double() * scale).sum(0)

    if dtype == torch.float32 and len(q.codes) == 2:
        torch.testing.assert_close(q.dequantize(dtype).double(), exact, rtol=1e-7, atol=0)
    else:
        torch.testing.assert_close(q.dequantize(dtype), exact.float().to(dtype) if dtype != torch.float64 else exact)


def test_least_squares_scale_is_the_minimum_for_any_integer_grid():
    w = gaussian(3, 50)
    codes = (w * 3).round().to(torch.int8)
    scheme = parse("absmean@row")
    scale = least_squares_scale(w, codes, scheme)
    for row in range(3):
        best = np.linalg.lstsq(codes[row].double().numpy()[:, None], w[row].double().numpy(), rcond=None)[0]
        assert scale[row, 0] == pytest.approx(best[0], rel=1e-6)
    assert least_squares_scale(w, torch.zeros_like(codes), scheme).abs().max() == 0
    with pytest.raises(ProbeError, match="no integer grid"):
        least_squares_scale(w, codes.float(), scheme)
    with pytest.raises(ProbeError, match="no integer grid"):
        least_squares_scale(w, codes[:2], scheme)


# Bits


def test_bits_per_weight_count_codes_scales_and_fill():
    q = quantize(gaussian(16, 256), "absmean@g64")
    bits = q.bits_per_weight(16)

    assert bits.two_bit == 2 + 16 / 64
    assert bits.five_trits == 52 * 8 / 256 + 16 / 64
    assert bits.two_bit / 8 < 0.3
    p = np.bincount(q.codes.ravel().numpy() + 1) / q.codes.numel()
    assert bits.entropy == pytest.approx(-(p * np.log2(p)).sum() + 0.25)
    odd = quantize(gaussian(2, 5), "planes:2@row").bits_per_weight()
    assert odd.two_bit == pytest.approx(2 * 2 * 8 / 5 + 2 * 32 / 5)
    assert quantize(torch.ones(4, 64), "sign").bits_per_weight(0).entropy == 0


# Names


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sign", "sign@row"),
        ("absmean", "absmean@tensor"),
        ("absmean+ls", "absmean+ls@tensor"),
        ("absmean_row", "absmean@row"),
        ("absmean_row+ls", "absmean+ls@row"),
        ("absmean_group", "absmean@g128"),
        ("twn", "twn@tensor"),
        ("twn+ls@g32", "twn@g32"),
        ("optimal", "optimal@row"),
        ("optimal@tensor", "optimal@tensor"),
        ("planes:2", "planes:2@g128"),
        ("planes:2@row", "planes:2@row"),
    ],
)
def test_names_are_parsed_and_described(text, canonical):
    scheme = parse(text)

    assert scheme.describe() == str(scheme) == canonical
    assert parse(canonical) == scheme


@given(
    method=st.sampled_from(METHODS),
    where=st.sampled_from(["tensor", "row", "g1", "g128", "g4096"]),
    refit=st.booleans(),
)
def test_every_scheme_survives_describe_and_parse(method, where, refit):
    scheme = parse(f"{method}{'+ls' if refit else ''}@{where}")

    assert parse(scheme.describe()) == scheme


@pytest.mark.parametrize(
    "text",
    [
        *("", "ternary", "Absmean", "planes", "planes:3"),
        *("absmean+", "absmean+ls+ls", "absmean@row+ls", "absmean_row@g64"),
        *("absmean@", "absmean@g0", "absmean@g-4", "absmean@g128.5", "absmean@block", "absmean @row"),
    ],
)
def test_names_outside_the_grammar_are_refused(text):
    with pytest.raises(ProbeError):
        parse(text)


def test_the_group_argument_fills_in_and_never_contradicts():
    assert parse("absmean", group=64) == parse("absmean@g64")
    assert quantize(gaussian(2, 8), "optimal", group=4).scheme == parse("optimal@g4")
    for bad in (lambda: parse("absmean@row", group=64), lambda: quantize(gaussian(2, 8), parse("sign"), group=4)):
        with pytest.raises(ProbeError, match="drop the group size"):
            bad()
    with pytest.raises(ProbeError):
        parse("absmean", group=0)
    with pytest.raises(ProbeError):
        Scheme("optimal", "row", refit=True)
    with pytest.raises(ProbeError):
        replace(parse("sign"), method="ternary")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scheme", [*SINGLE, "planes:2"])
def test_cuda_gives_the_codes_of_the_cpu(scheme, dtype):
    w = gaussian(300, 1000, dtype=dtype)
    here, there = quantize(w, scheme), quantize(w.cuda(), scheme)

    assert (here.codes != there.codes.cpu()).double().mean() < 1e-5
    torch.testing.assert_close(here.scale, there.scale.cpu(), rtol=1e-6, atol=0)
