"""The folded-gain check: a gain moved into the next matrix is a warning that names the matrix, base against candidate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gates.checkpoints import DEPTH, WIDTH, judge, tensors, write

from ternary_probe.ternary import quantize


def folded(content: dict[str, torch.Tensor], value: float = 1.0) -> dict[str, torch.Tensor]:
    """Move every block's gain into the matrix that reads it: the same function."""
    out = dict(content)
    for block in range(DEPTH):
        norm, reader = f"model.layers.{block}.input_layernorm.weight", f"model.layers.{block}.mlp.up_proj.weight"
        out[reader] = content[reader] * content[norm] / value
        out[norm] = torch.full((WIDTH,), value)
    return out


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_folded_gains_are_a_warning_that_names_the_matrix(tmp_path: Path, value: float) -> None:
    base = write(tmp_path / "base", tensors())
    candidate = write(tmp_path / "candidate", folded(tensors(), value))

    found = judge("folded-gain", candidate, base)

    assert [one.status for one in found] == ["warn"] * DEPTH
    assert {one.subject for one in found} == {f"model.layers.{block}.input_layernorm.weight" for block in range(DEPTH)}
    assert all("folded into up_proj" in one.message for one in found)
    assert all(next(iter(one.details["absorbed_by"].values())) == pytest.approx(1) for one in found)


def test_a_folded_gain_is_found_in_a_quantized_candidate(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    content = {"layers.0.norm.weight": 1 + 0.5 * torch.rand(64, generator=generator)}
    content["layers.0.proj.weight"] = torch.randn(128, 64, generator=generator)
    candidate = dict(content, **{"layers.0.norm.weight": torch.ones(64)})
    moved = content["layers.0.proj.weight"] * content["layers.0.norm.weight"]
    candidate["layers.0.proj.weight"] = quantize(moved, "absmean@g16").dequantize()

    (found,) = judge("folded-gain", write(tmp_path / "c", candidate), write(tmp_path / "b", content), absorbed=0.4)

    assert found.status == "warn"
    assert "folded into proj" in found.message


def test_inputs_along_the_first_axis_are_recognised(tmp_path: Path) -> None:
    content = {"h.0.ln.weight": 1 + torch.arange(8.0) / 8, "h.0.fc.weight": torch.randn(8, 24)}
    candidate = {
        "h.0.ln.weight": torch.ones(8),
        "h.0.fc.weight": content["h.0.fc.weight"] * content["h.0.ln.weight"][:, None],
    }

    (found,) = judge("folded-gain", write(tmp_path / "c", candidate), write(tmp_path / "b", content))

    assert "folded into fc" in found.message


def test_the_final_norm_is_looked_for_in_the_head(tmp_path: Path) -> None:
    content = tensors() | {"lm_head.weight": torch.randn(12, WIDTH)}
    candidate = content | {
        "lm_head.weight": content["lm_head.weight"] * content["model.norm.weight"],
        "model.norm.weight": torch.ones(WIDTH),
    }

    (found,) = judge("folded-gain", write(tmp_path / "c", candidate), write(tmp_path / "b", content))

    assert found.subject == "model.norm.weight"
    assert "folded into lm_head" in found.message


def test_a_gain_that_went_nowhere_is_not_said_to_be_folded(tmp_path: Path) -> None:
    content = tensors()
    name = "model.layers.2.input_layernorm.weight"
    lost = content | {name: torch.ones(WIDTH)}
    gone = {key: value for key, value in content.items() if key != name}
    base = write(tmp_path / "base", content)

    (first,) = judge("folded-gain", write(tmp_path / "lost", lost), base)
    (second,) = judge("folded-gain", write(tmp_path / "gone", gone), base)

    assert first.status == second.status == "warn"
    assert "or lost" in first.message
    assert "gone from" in second.message


def test_gains_that_stay_pass_even_where_matrices_changed(tmp_path: Path) -> None:
    base = write(tmp_path / "base", tensors())
    content = {name: value if "norm" in name else value.sign() for name, value in tensors().items()}

    (found,) = judge("folded-gain", write(tmp_path / "candidate", content), base)

    assert found.status == "pass"


def test_a_base_whose_gains_are_all_ones_has_nothing_to_fold(tmp_path: Path) -> None:
    content = {name: torch.ones_like(value) if "norm" in name else value for name, value in tensors().items()}
    base = write(tmp_path / "base", content)

    assert [one.status for one in judge("folded-gain", base, base)] == ["not_applicable"]
