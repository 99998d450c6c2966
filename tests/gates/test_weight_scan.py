"""The scan tier: every weight read once; what is found is named with its place and figures equal dense ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gates.checkpoints import WIDTH, judge, tensors, write

from ternary_probe.gates._parameters import read_parameters
from ternary_probe.gates._weight_reader import Piece, pieces
from ternary_probe.gates.checks.quantized_twice import share_astray, share_out_of_order
from ternary_probe.measure.grid import Grid
from ternary_probe.ternary import quantize


def test_a_healthy_checkpoint_passes_with_the_dense_row_cosines(tmp_path: Path) -> None:
    content = tensors()
    (found,) = judge("weight-scan", write(tmp_path, content))
    rows = [
        (w.double().abs().sum(1) ** 2 / (w.shape[1] * w.double().square().sum(1))).mean()
        for w in content.values()
        if w.ndim == 2
    ]

    assert found.status == "pass"
    assert found.details["mean_row_cos2"] == pytest.approx(float(sum(rows) / len(rows)), rel=1e-6)
    assert found.details["gaussian_row_cos2"] == 2 / math.pi


def test_gaussian_rows_keep_two_over_pi(tmp_path: Path) -> None:
    content = {"x.weight": torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))}
    (found,) = judge("weight-scan", write(tmp_path, content))

    assert found.details["mean_row_cos2"] == pytest.approx(2 / math.pi, rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_nan_in_one_fused_expert_is_named_with_its_index(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = torch.ones(4, 6, WIDTH, dtype=dtype)
    experts[2, 5, 3] = float("nan")

    found = judge("weight-scan", write(tmp_path, tensors() | {"model.layers.1.mlp.experts.up": experts}))

    assert [(one.status, one.subject, one.measured) for one in found] == [("fail", "model.layers.1.mlp.experts.up", 1)]
    assert "[2, 5, 3] is nan" in found[0].message


def test_an_infinite_bias_is_named(tmp_path: Path) -> None:
    found = judge("weight-scan", write(tmp_path, tensors() | {"x.bias": torch.tensor([1.0, float("-inf")])}))

    assert found[0].status == "fail"
    assert "x.bias[1] is -inf" in found[0].message


def test_zero_matrices_fail_and_zero_rows_warn(tmp_path: Path) -> None:
    rows = torch.ones(50, WIDTH)
    rows[:3] = 0

    found = judge("weight-scan", write(tmp_path, tensors() | {"a.weight": torch.zeros(5, WIDTH), "b.weight": rows}))

    assert {(one.subject, one.status) for one in found} == {("a.weight", "fail"), ("b.weight", "warn")}
    assert next(one for one in found if one.subject == "b.weight").measured == pytest.approx(3 / 50)


def test_eight_bit_floats_are_widened(tmp_path: Path) -> None:
    (found,) = judge("weight-scan", write(tmp_path, {"x.weight": torch.full((4, 8), 2.0).to(torch.float8_e4m3fn)}))

    assert found.status == "pass"
    assert found.details["mean_row_cos2"] == pytest.approx(1)


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_pieces_put_together_are_the_tensor(tmp_path: Path, piece_bytes: int) -> None:
    content = {"x": torch.randn(3, 5, 7), "y": torch.randn(11), "z": torch.zeros(0, 4)}
    found = read_parameters(str(write(tmp_path, content)))

    for name, tensor in content.items():
        parts = [Piece(part.first_row, part.rows.clone()) for part in pieces(found, name, piece_bytes=piece_bytes)]
        rows = torch.cat([part.rows for part in parts]) if parts else torch.zeros(0, 4)
        assert torch.equal(rows, tensor.reshape(-1, tensor.shape[-1]))
        assert [part.first_row for part in parts] == [sum(len(p.rows) for p in parts[:i]) for i in range(len(parts))]


def matrices(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(64, 256, generator=generator) for i in range(3)}


def rounded(content: dict[str, torch.Tensor], levels: int) -> dict[str, torch.Tensor]:
    """Round to the nearest of evenly spaced levels, each group of 32 with its own scale."""
    out = {}
    for name, w in content.items():
        groups = w.reshape(-1, 32)
        step = groups.abs().amax(1, keepdim=True) / (levels // 2)
        out[name] = ((groups / step).round() * step).reshape(w.shape)
    return out


def test_a_model_on_a_grid_is_a_warning_that_names_the_grid(tmp_path: Path) -> None:
    (clean,) = judge("weight-grid", write(tmp_path / "clean", matrices()))
    (found,) = judge("weight-grid", write(tmp_path / "grid", rounded(matrices(), 15)))

    assert clean.status == "pass"
    assert (found.status, found.measured) == ("warn", 3)
    assert "4-bit grid, groups of 32" in found.message


def test_a_base_on_a_grid_makes_its_candidate_twice_quantized(tmp_path: Path) -> None:
    base = write(tmp_path / "base", rounded(matrices(), 15))
    (found,) = judge("weight-grid", write(tmp_path / "candidate", rounded(rounded(matrices(), 15), 5)), base)

    assert found.status == "warn"
    assert "quantizing twice" in found.message


def test_a_candidate_rounded_from_its_base_is_not_astray_and_one_rounded_twice_is(tmp_path: Path) -> None:
    base = write(tmp_path / "base", matrices())
    once = write(tmp_path / "once", rounded(matrices(), 7))
    twice = write(tmp_path / "twice", rounded(rounded(matrices(), 11), 7))

    (single,) = judge("quantized-twice", once, base)
    (double,) = judge("quantized-twice", twice, base)

    assert single.status == "pass"
    assert single.measured == 0
    assert double.status == "warn"
    assert "twice" in double.message


def test_a_ternary_candidate_of_the_library_is_not_called_twice_quantized(tmp_path: Path) -> None:
    base = write(tmp_path / "base", matrices())
    content = {name: quantize(w, "optimal@g64").dequantize() for name, w in matrices().items()}

    (found,) = judge("quantized-twice", write(tmp_path / "candidate", content), base)

    assert found.status == "pass"


def test_the_share_astray_equals_an_exhaustive_count() -> None:
    generator = torch.Generator().manual_seed(3)
    base, candidate = torch.randn(4, 64, generator=generator), torch.randn(4, 64, generator=generator).sign()
    for group in (16, 0):
        size = group or 64
        wrong = 0
        for row in range(4):
            for column in range(64):
                start = column // size * size
                levels = candidate[row, start : start + size].double()
                near = (base[row, column].double() - levels).abs().min()
                wrong += bool((base[row, column].double() - candidate[row, column].double()).abs() > 1.01 * near)
        assert share_astray(base, candidate, Grid(1, group, 2)) == pytest.approx(wrong / 256, abs=1 / 256)


def test_a_candidate_off_every_grid_is_not_applicable(tmp_path: Path) -> None:
    base = write(tmp_path / "base", matrices())

    assert [one.status for one in judge("quantized-twice", base, base)] == ["not_applicable"]


def quantized(content: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    return {name: quantize(w, scheme).dequantize(w.dtype) for name, w in content.items()}


SCHEMES = ("sign", "absmean", "absmean@row", "absmean@g64", "absmean+ls", "twn", "twn@row", "optimal", "planes:2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_candidate_quantized_once_by_any_scheme_of_the_library_passes(tmp_path: Path, scheme: str, dtype) -> None:
    original = {name: w.to(dtype) for name, w in matrices().items()}
    base = write(tmp_path / "base", original)

    (found,) = judge("quantized-twice", write(tmp_path / "candidate", quantized(original, scheme)), base)

    assert found.status == "pass"


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("scheme", ["absmean", "absmean@row", "absmean@g64"])
def test_absmean_applied_again_fails_with_how_often(tmp_path: Path, scheme: str, times: int) -> None:
    content = matrices()
    base = write(tmp_path / "base", content)
    for _ in range(times):
        content = quantized(content, scheme)

    (found,) = judge("quantized-twice", write(tmp_path / "candidate", content), base)

    assert found.status == "fail"
    assert f"quantized {times} times" in found.message


def test_four_bits_before_ternary_is_out_of_order(tmp_path: Path) -> None:
    base = write(tmp_path / "base", matrices())
    content = quantized(rounded(matrices(), 15), "absmean@row")

    (found,) = judge("quantized-twice", write(tmp_path / "candidate", content), base)

    assert found.status == "warn"


def test_the_order_test_ignores_thresholds_and_counts_misplaced_levels() -> None:
    base = torch.tensor([[-2.0, -1.0, 0.1, 0.2, 1.0, 3.0]])
    once, swapped = torch.tensor([[-1.0, 0, 0, 0, 0, 1]]), torch.tensor([[-1.0, 0, 0, 1, 0, 1]])

    assert share_out_of_order(base, once, Grid(2, 0, 3)) == 0
    assert share_out_of_order(base, swapped, Grid(2, 0, 3)) == pytest.approx(2 / 6)


def packed(scales: list[float]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for i, scale in enumerate(scales):
        out[f"layers.{i}.proj.weight"] = torch.zeros(4, 8, dtype=torch.uint8)
        out[f"layers.{i}.proj.weight_scale"] = torch.tensor([scale])
    return out


@pytest.mark.parametrize(
    ("scales", "status", "words"),
    [
        ([0.02, 0.03], "pass", "mean|W|"),
        ([50.0, 40.0], "pass", "1/mean|W|"),
        ([0.02, 0.03, 50.0], "fail", "two conventions"),
        ([0.02, float("nan")], "fail", "nan"),
        ([0.02, 0.0], "fail", "0.0"),
    ],
)
def test_the_scale_convention_of_packed_weights_is_read_off(tmp_path: Path, scales, status: str, words: str) -> None:
    (found,) = judge("bitnet-scale", write(tmp_path, packed(scales)))

    assert found.status == status
    assert words in found.message


@pytest.mark.parametrize(
    ("scale", "linear_class", "status"),
    [
        (0.02, "autobitlinear", "pass"),
        (50.0, "bitlinear", "pass"),
        (50.0, "autobitlinear", "fail"),
        (0.02, None, "fail"),
    ],
)
def test_a_linear_class_that_reads_the_other_convention_fails(tmp_path: Path, scale, linear_class, status) -> None:
    settings = {"quant_method": "bitnet"} | ({"linear_class": linear_class} if linear_class else {})

    (found,) = judge("bitnet-scale", write(tmp_path, packed([scale, scale]), quantization_config=settings))

    assert found.status == status


def test_eight_bit_floats_without_a_scale_are_a_warning(tmp_path: Path) -> None:
    weight = {"layers.0.proj.weight": torch.ones(4, 8).to(torch.float8_e4m3fn)}
    scaled = weight | {"layers.0.proj.weight_scale_inv": torch.ones(1)}

    assert [one.status for one in judge("bitnet-scale", write(tmp_path / "bare", weight))] == ["warn"]
    assert [one.status for one in judge("bitnet-scale", write(tmp_path / "scaled", scaled))] == ["not_applicable"]


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e25, 3e38])
def test_values_whose_squares_leave_fp32_are_finite_and_keep_their_cosine(tmp_path: Path, size: float) -> None:
    weight = torch.full((3, 8), size)
    weight[:, ::2] *= -0.5

    (found,) = judge("weight-scan", write(tmp_path, {"x.weight": weight}))

    expected = float(weight[0].double().abs().sum() ** 2 / (8 * weight[0].double().square().sum()))
    assert found.status == "pass"
    assert found.details["mean_row_cos2"] == pytest.approx(expected, rel=1e-6)


def test_biases_and_single_rows_of_zeros_are_healthy(tmp_path: Path) -> None:
    zeros = {"experts.up_proj_bias": torch.zeros(4, 8), "x.bias": torch.zeros(8), "cls_token": torch.zeros(1, 1, 8)}

    assert [one.status for one in judge("weight-scan", write(tmp_path, tensors() | zeros))] == ["pass"]


def test_a_checkpoint_without_packed_weights_is_not_applicable(tmp_path: Path) -> None:
    assert [one.status for one in judge("bitnet-scale", write(tmp_path, tensors()))] == ["not_applicable"]
