from __future__ import annotations

import json

import pytest
from small_study import changed, loaded_llama, study

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import OutlierColumns, from_description
from ternary_probe.records import LeverageRecord
from ternary_probe.studies.replay import recipe_of

ARMS = ("outlier", "other", "all", "magnitude_all")
MATCHINGS = ("count", "rate", "energy")


def test_every_arm_of_a_record_replays_to_the_same_bits_on_a_fresh_model():
    record = study(options=changed(rates=(0.05,), arms=ARMS, matchings=MATCHINGS))
    record = LeverageRecord.model_validate_json(record.model_dump_json())
    fresh = anatomy.examine(loaded_llama().model)
    seen = set()
    for arm in record.arms:
        recipe = recipe_of(record, arm, fresh)
        recipe = from_description(json.loads(json.dumps(recipe.describe())))
        with recipe.applied(fresh) as applied:
            assert applied.checksum_before == arm.checksum_before
            assert applied.checksum_during == arm.checksum_during
            assert applied.entries == arm.flips
        seen.add(applied.checksum_during)
    assert len(seen) > len(ARMS) * 2


def test_an_arm_over_planted_outliers_replays_with_the_planting():
    record = study(options=changed(rates=(0.05,), plant=OutlierColumns(k=4, number=2, seed=1)))
    fresh = anatomy.examine(loaded_llama().model)
    recipe = recipe_of(record, record.arms[0], fresh)
    assert [part.kind for part in recipe.parts] == ["outlier_columns", "sign_flip"]
    with recipe.parts[0].applied(fresh), recipe.parts[1].applied(fresh) as applied:
        assert applied.checksum_during == record.arms[0].checksum_during


def test_another_model_is_refused_by_the_matrix_it_lacks():
    record = study(loaded_llama(num_hidden_layers=3), changed(rates=(0.05,)))
    smaller = anatomy.examine(loaded_llama(num_hidden_layers=2).model)
    with pytest.raises(ProbeError, match=r"this model has no matrix model\.layers\.2"):
        recipe_of(record, record.arms[0], smaller)
