"""Twenty healthy architectures, random-init: no check that reads files fails them, whole or in shards, in any dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from gates.checkpoints import judge

CHECKS = ("files", "tensors", "norm-gain", "weight-scan", "weight-grid", "bitnet-scale")
COMPARED = ("folded-gain", "quantized-twice")
LEAST = 20
PLUS_ONE = ("gemma", "gemma2", "gemma3")


def test_there_are_twenty() -> None:
    assert len(zoo.NAMES) >= LEAST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_healthy_model_passes_every_check(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    zoo.build(name, dtype).save_pretrained(tmp_path, max_shard_size="60KB")

    found = {check: judge(check, tmp_path) for check in CHECKS}

    assert {one.status for findings in found.values() for one in findings} <= {"pass", "not_applicable"}
    assert [one.status for one in found["files"]] == ["pass"]
    assert [one.status for one in found["tensors"]] == ["pass"]
    assert [one.status for one in found["norm-gain"]] == ["not_applicable" if name == "olmo" else "pass"]
    if name != "olmo":
        assert found["norm-gain"][0].details["reading"] == ("1 + w" if name in PLUS_ONE else "w")
    against_itself = [one.status for check in COMPARED for one in judge(check, tmp_path, tmp_path)]
    assert set(against_itself) <= {"pass", "not_applicable"}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_straight_from_its_config_does_not_fail(tmp_path: Path, name: str) -> None:
    """Fresh weights without the zoo's noise: gains all 1 (or stored as 0), biases 0."""
    model = zoo.build(name)
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(tmp_path)

    statuses = {one.status for check in CHECKS for one in judge(check, tmp_path)}

    assert "fail" not in statuses
    assert "inconclusive" not in statuses


@pytest.mark.slow
def test_a_trained_model_passes(demo_folder: Path) -> None:
    found = {check: judge(check, demo_folder) for check in CHECKS}

    (gains,) = found["norm-gain"]
    (grid,) = found["weight-grid"]
    assert {one.status for check in ("files", "tensors", "norm-gain", "weight-scan") for one in found[check]} == {
        "pass"
    }
    assert gains.details["reading"] == "w"
    assert min(float(one["negative"]) for one in gains.details["norms"].values()) == 0
    assert grid.status == "warn"
    assert "4-bit grid" in grid.message
