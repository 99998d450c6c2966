"""A mistyped model is bad input, not an open question; checks that did not run are named."""

from __future__ import annotations

import pytest
from small_study import speaking_llama, tokenizer

from ternary_probe.errors import ProbeError
from ternary_probe.gates import Tier, run_gate
from ternary_probe.reports.gate_sheet import gate_sheet
from ternary_probe.reports.junit import to_junit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gate") / "model"
    speaking_llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", ["nosuch", "nobody/nothing", "./nosuch"])
def test_a_model_that_does_not_exist_is_refused_before_any_check(folder, name):
    for model, candidate in ((folder, name), (name, folder), (name, None)):
        with pytest.raises(ProbeError, match=name.strip("./")):
            run_gate(model, candidate, tiers=(Tier.PARAMETERS,))


def test_checks_that_did_not_run_are_named_in_table_and_junit(folder):
    record = run_gate(folder, folder, tiers=(Tier.PARAMETERS,))
    notes = " ".join(record.notes)
    for name in ("weight-scan", "quantized-twice", "depth-profile", "candidate-nll"):
        assert name in notes
    assert "--scan-weights" in notes
    assert record.notes[-1] in gate_sheet(record).notes
    assert "weight-scan" in to_junit(record)


def test_a_gate_that_ran_everything_names_nothing(folder):
    record = run_gate(folder, tiers=(Tier.PARAMETERS, Tier.SCAN))
    assert "--scan-weights" not in " ".join(record.notes)
