"""The norm-gain check, on gains whose figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gates.checkpoints import WIDTH, judge, tensors, write

from ternary_probe.gates.checks.norm_gain import measure

GAIN = "model.layers.1.input_layernorm.weight"


def with_gain(values: torch.Tensor, *, bias: bool = False) -> dict[str, torch.Tensor]:
    return tensors(bias=bias) | {GAIN: values}


def test_healthy_gains_pass_with_their_extremes(tmp_path: Path) -> None:
    content = tensors()
    (found,) = judge("norm-gain", write(tmp_path, content))
    gains = [value.double() for name, value in content.items() if "norm" in name]

    assert found.status == "pass"
    assert found.measured == pytest.approx(max(float(g.abs().max() / g.abs().min()) for g in gains))
    assert found.details["reading"] == "w"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_not_finite_fails_and_is_named(tmp_path: Path, value: float) -> None:
    gain = torch.ones(WIDTH)
    gain[3] = value

    (found,) = judge("norm-gain", write(tmp_path, with_gain(gain)))

    assert (found.status, found.subject) == ("fail", GAIN)
    assert "entry 3" in found.message


def test_zero_entries_are_a_warning_and_a_gain_of_zeros_fails(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[[1, 5]] = 0

    (some,) = judge("norm-gain", write(tmp_path / "some", with_gain(gain)))
    (every,) = judge("norm-gain", write(tmp_path / "every", with_gain(torch.zeros(WIDTH))))

    assert (some.status, some.measured) == ("warn", 2)
    assert (every.status, every.measured) == ("fail", WIDTH)


def test_negative_gains_are_healthy(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[2] = -2.1

    (found,) = judge("norm-gain", write(tmp_path, with_gain(gain)))

    assert found.status == "pass"


def test_a_collapsed_kernel_direction_is_a_warning_for_a_layer_norm_only(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[4] = 1e-4

    (layer,) = judge("norm-gain", write(tmp_path / "layer", with_gain(gain, bias=True)))
    (rms,) = judge("norm-gain", write(tmp_path / "rms", with_gain(gain)))

    assert layer.status == "warn"
    assert layer.measured == pytest.approx(1.0, abs=1e-6)
    assert rms.status == "pass"


def test_a_huge_range_is_a_warning(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[0] = 1e-8

    (found,) = judge("norm-gain", write(tmp_path, with_gain(gain)))

    assert found.status == "warn"
    assert found.measured == pytest.approx(1e8, rel=1e-6)


def test_gains_stored_around_zero_are_read_as_one_plus_w(tmp_path: Path) -> None:
    content = {name: value - 1 if "norm" in name else value for name, value in tensors().items()}
    zeros = {name: torch.zeros_like(value) if "norm" in name else value for name, value in tensors().items()}

    (found,) = judge("norm-gain", write(tmp_path / "trained", content))
    (fresh,) = judge("norm-gain", write(tmp_path / "fresh", zeros))

    assert found.status == fresh.status == "pass"
    assert found.details["reading"] == fresh.details["reading"] == "1 + w"
    assert fresh.measured == 1.0


def test_a_checkpoint_without_gains_is_not_applicable(tmp_path: Path) -> None:
    content = {name: value for name, value in tensors().items() if "norm" not in name}

    assert [one.status for one in judge("norm-gain", write(tmp_path, content))] == ["not_applicable"]


def test_the_participation_ratio_is_that_of_the_unit_vector() -> None:
    gain = np.array([0.5, -2.0, 1.0, 4.0])
    v = 1 / gain / np.linalg.norm(1 / gain)

    assert measure(gain).participation == pytest.approx(1 / (v**4).sum(), rel=1e-12)
    assert measure(np.ones(7)).participation == pytest.approx(7)
    assert measure(np.array([1e-300, 1.0])).participation == pytest.approx(1)


def test_one_gain_of_zeros_among_gains_around_zero_is_a_warning(tmp_path: Path) -> None:
    content = {name: value - 1 if "norm" in name else value for name, value in tensors().items()}

    (found,) = judge("norm-gain", write(tmp_path, content | {GAIN: torch.zeros(WIDTH)}))

    assert (found.status, found.subject) == ("warn", GAIN)
    assert "ever written" in found.message


def test_zeros_are_told_with_what_they_do_to_a_layer_norm_and_to_an_rms_norm(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[[1, 5]] = 0

    (layer,) = judge("norm-gain", write(tmp_path / "layer", with_gain(gain, bias=True)))
    (rms,) = judge("norm-gain", write(tmp_path / "rms", with_gain(gain)))

    assert "kernel" in layer.message
    assert "silenced" in rms.message
    assert layer.details["axes"] == rms.details["axes"] == [1, 5]


def test_more_than_ten_faults_are_counted(tmp_path: Path) -> None:
    content = tensors()
    for number in range(25):
        content[f"extra.{number}.norm.weight"] = torch.full((WIDTH,), float("nan"))

    found = judge("norm-gain", write(tmp_path, content))

    assert len(found) == 11
    assert {one.status for one in found} == {"fail"}
    assert "15 more" in found[-1].message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_gains_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    gain = torch.linspace(0.5, 2, WIDTH).to(dtype)
    content = tensors()
    content = {name: gain.clone() if "norm" in name else value for name, value in content.items()}

    (found,) = judge("norm-gain", write(tmp_path, content))

    expected = gain.double()
    assert found.measured == pytest.approx(float(expected.max() / expected.min()), rel=1e-12)


@pytest.mark.parametrize(
    "extra",
    [
        {"model.layers.1.self_attn.sinks": torch.zeros(4)},
        {"model.layers.1.attn.q_proj.bias": torch.zeros(WIDTH)},
        {"model.layers.1.ls1.gamma": torch.zeros(WIDTH)},
        {"model.layers.1.mlp.up_proj.scale": torch.zeros(WIDTH)},
        {"model.layers.1.layer_scalar": torch.zeros(1)},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_vectors_that_are_no_gains_are_left_alone(tmp_path: Path, extra: dict[str, torch.Tensor]) -> None:
    assert [one.status for one in judge("norm-gain", write(tmp_path, tensors() | extra))] == ["pass"]
