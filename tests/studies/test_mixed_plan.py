"""Which matrices a plan keeps."""

from __future__ import annotations

from ternary_probe.studies.mixed_plan import choose

ENTRIES = {"small": 10, "large": 1000, "middle": 100, "idle": 50}


def test_the_costliest_per_entry_are_kept_until_the_share_is_avoided():
    damage = {"small": 1.0, "large": 10.0, "middle": 4.0, "idle": 0.0}
    assert choose(damage, ENTRIES, 0.05) == ["small"]
    assert choose(damage, ENTRIES, 0.3) == ["small", "middle"]
    assert choose(damage, ENTRIES, 1.0) == ["small", "middle", "large"]


def test_a_matrix_that_breaks_the_model_is_always_kept():
    assert choose({"small": None, "large": 1.0, "middle": 0.0, "idle": 0.0}, ENTRIES, 0.01) == ["small", "large"]


def test_no_damage_keeps_nothing():
    assert choose({"small": 0.0, "large": -1e-9, "middle": 0.0, "idle": 0.0}, ENTRIES, 0.9) == []
