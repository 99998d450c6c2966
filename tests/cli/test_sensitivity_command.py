"""``ternary-probe sensitivity`` end to end on a tiny checkpoint folder."""

from __future__ import annotations

import re

import pytest
from test_commands import validated

from ternary_probe.records import load_record
from ternary_probe.sensitivity_record import SensitivityRecord

SMALL = (
    *(
        "--window",
        32,
        "--windows",
        2,
        "--draws",
        2,
        "--seeds",
        2,
        "--rates",
        "1%",
        "--unit-rate",
        0.05,
        "--controls",
        1,
    ),
    *("--bound", 0.05, "--singles", 4, "--columns", 2, "--random-columns", 2, "--worst", 2, "--fraction", 0.1),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return tmp_path_factory.mktemp("sensitivity") / "report"


@pytest.fixture
def outcome(probe, tiny_folder, report):
    """The first call measures, later ones read the finished experiments."""
    found = probe("sensitivity", tiny_folder, *SMALL, "--plan", 0.5, "--out", report)
    assert found.code == 0, found.err
    return found


def test_record_report_and_figures_are_written(outcome, report):
    data = validated((report / "record.json").read_text(), SensitivityRecord)
    assert {"matrices", "columns"} <= set(data)
    assert {"matrix", "predicted", "measured", "ci_low", "ci_high"} <= set(data["matrices"][0])
    assert {"matrix", "column", "predicted", "measured"} <= set(data["columns"][0])
    record = load_record(report / "record.json")
    assert isinstance(record, SensitivityRecord)
    markdown = (report / "report.md").read_text()
    for figure in ("sensitivity_map", "prediction_against_measurement", "sorted_columns"):
        assert (report / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert f"figures/{figure}.png" in markdown
    assert str(report / "report.md") in outcome.out


def test_the_table_says_what_the_record_says(outcome, report):
    record = load_record(report / "record.json")
    for title in ("Bulk response", "Single weights", "Worst blocks", "Predicted, by role", "Worst columns", "plan"):
        assert title in outcome.out
    worst = max(record.units, key=lambda unit: unit.measured)
    assert re.search(rf"Random flips hurt most in {worst.unit}\b", outcome.out)
    row = record.super_weights[0]
    assert f"[{row.row}, {row.column}]" in outcome.out
    assert f"--scheme {record.plan.scheme}" in " ".join(outcome.out.split())


def test_the_plan_is_taken_by_quantize(outcome, report, probe, tiny_folder):
    plan = load_record(report / "record.json").plan
    assert plan.exclude
    arguments = ("--scheme", plan.scheme, "--exclude", ",".join(plan.exclude), "--seeds", 0)
    found = probe("quantize", tiny_folder, *arguments, "--window", 32, "--windows", 2, "--json", "-")
    assert found.code == 0, found.err
    record = re.search(r'"delta_nll": (-?[\d.e-]+)', found.out)
    assert float(record[1]) == pytest.approx(plan.plan.delta_nll, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draws", 0), "--draws 0"),
        (("--rates", "0"), "not in (0, 1]"),
        (("--per", "layer"), "--per layer"),
        (("--precision", -1), "--precision"),
        (("--plan", 2), "--plan"),
        (("--include", "*lm_head*"), "outside every block"),
        (("--include", "nothing"), "matches no weight matrix"),
    ],
)
def test_mistakes_are_one_sentence(probe, tiny_folder, arguments, message):
    found = probe("sensitivity", tiny_folder, *SMALL, *arguments)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1
