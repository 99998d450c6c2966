"""The anatomy of a real trained model."""

from __future__ import annotations

import pytest

from ternary_probe import anatomy


@pytest.mark.slow
def test_the_demo_model_is_fully_understood(demo_model):
    found = anatomy.examine(demo_model.model)
    assert len(found.block_matrices) == 210
    assert len(found.blocks) == 30
    assert len(found.matrices) == 211
    assert found.head_matrix.also_lookup
    assert found.final_norm.name == "model.norm"
    assert {site.kind for site in found.norms} == {"rms_norm"}
    assert sum(site.readers_complete for site in found.norms) == 60
    assert found.residual_stream.identity_skips
    assert found.accounted.fraction == 1
    assert not found.unhandled
    assert all(check.passed for check in found.checks.values())
