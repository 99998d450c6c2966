"""The commands end to end on a tiny checkpoint folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import jsonschema
import pytest
import torch
from small_study import cut, speaking_llama

from ternary_probe.loading import load
from ternary_probe.records import InspectRecord, LeverageRecord, PerplexityRecord, Record, load_record
from ternary_probe.studies.plan import LeverageOptions

SMALL = ("--window", 32, "--windows", 2, "--rates", "0.05,20%", "--seeds", 2, "--fraction", 0.1)
CUT = ("--window", 32, "--windows", 3)


def validated(text: str, kind: type[Record]) -> dict:
    """Parse strictly and check against the published schema, by a validator that is not pydantic."""
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the record"))
    schema = kind.model_json_schema(mode="serialization")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(data)
    return data


@pytest.fixture
def report(probe, tiny_folder, tmp_path):
    outcome = probe("leverage", tiny_folder, *SMALL, "--out", tmp_path / "report")
    assert outcome.code == 0, outcome.err
    return tmp_path / "report", outcome


def test_leverage_writes_record_report_and_figures_and_says_where(report):
    folder, outcome = report

    record = load_record(folder / "record.json")
    assert isinstance(record, LeverageRecord)
    validated((folder / "record.json").read_text(), LeverageRecord)
    assert {arm.rate for arm in record.arms} == {0.05, 0.2}
    assert (folder / "cells.sqlite").is_file()
    markdown = (folder / "report.md").read_text()
    assert "ternary-probe leverage" in markdown
    figures = sorted((folder / "figures").glob("*.png"))
    assert figures
    for figure in figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert f"figures/{figure.name}" in markdown
    assert str(folder / "report.md") in outcome.out
    assert str(folder / "record.json") in outcome.out
    for shown in ("outlier", "other", "noise floor"):
        assert shown in outcome.out.lower()


def test_json_dash_prints_only_json(probe, tiny_folder):
    outcome = probe("leverage", tiny_folder, *SMALL, "--json", "-")

    assert outcome.code == 0
    assert outcome.err == ""
    data = validated(outcome.out, LeverageRecord)
    assert data["command"] == "leverage"
    assert len(data["arms"]) == 12
    assert data["model"]["kind"] == "folder"


def test_json_file_and_quiet(probe, tiny_folder, tmp_path):
    outcome = probe("leverage", tiny_folder, *SMALL, "--json", tmp_path / "new" / "r.json", "--quiet")

    assert outcome == (0, "", "")
    validated((tmp_path / "new" / "r.json").read_text(), LeverageRecord)


def test_without_quiet_the_table_is_on_stdout_and_progress_is_not(probe, tiny_folder):
    outcome = probe("leverage", tiny_folder, *SMALL)

    assert outcome.code == 0
    assert "leverage" in outcome.out.lower()
    assert "loading" not in outcome.out


def test_options_reach_the_study(probe, tiny_folder):
    outcome = probe(
        *("leverage", tiny_folder, *SMALL, "--json", "-", "--seed", 3, "--arms", "outlier,magnitude_outlier"),
        *("--matching", "rate,energy", "--by", "mean_abs", "--include", "*mlp*", "--exclude", "*up_proj*"),
        *("--dtype", "bfloat16", "--protocol", "strided", "--stride", 8, "--bos", "none"),
    )

    data = validated(outcome.out, LeverageRecord)
    assert {arm["seed"] for arm in data["arms"]} == {3, 4}
    assert {arm["arm"] for arm in data["arms"]} == {"outlier", "magnitude_outlier"}
    assert {arm["matching"] for arm in data["arms"]} == {"rate", "energy"}
    assert data["selected_by"] == "mean_abs"
    assert all("mlp" in name and "up_proj" not in name for name in data["targets"])
    assert data["model"]["dtype"] == "bfloat16"
    assert (data["protocol"]["name"], data["protocol"]["stride"]) == ("strided", 8)


def test_planting_reaches_the_study(probe, tiny_folder):
    plant = "outlier_columns:k=4,number=2,mode=raw"
    outcome = probe("leverage", tiny_folder, *SMALL, "--json", "-", "--include", "*", "--plant", plant)

    data = validated(outcome.out, LeverageRecord)
    assert all(arm["recipe"].startswith("outlier_columns:k=4,number=2") for arm in data["arms"])


def test_a_text_to_calibrate_on(probe, tiny_folder, tmp_path):
    (tmp_path / "other.txt").write_text("She counted nine lanterns along the harbour wall. " * 60)

    outcome = probe("leverage", tiny_folder, *SMALL, "--json", "-", "--calibration", tmp_path / "other.txt")

    data = validated(outcome.out, LeverageRecord)
    assert data["calibration"]["text"] == str(tmp_path / "other.txt")
    assert data["protocol"]["text"] == "sample"


def test_the_papers_protocol_by_name(probe, tiny_folder):
    outcome = probe(
        *("leverage", tiny_folder, "--protocol", "dong2026", "--window", 32, "--windows", 2, "--seeds", 2),
        *("--fraction", 0.1, "--rates", "0.05", "--json", "-"),
    )

    data = validated(outcome.out, LeverageRecord)
    assert data["selected_by"] == "mean_abs"
    assert data["calibration"] == data["protocol"]
    assert [row["ratio"] for row in data["published"]] == [43.1, 9.9, 10.5, 11.4, 3.7]


def test_perplexity_is_the_exponential_of_the_dense_nll(probe, tiny_folder):
    outcome = probe("perplexity", tiny_folder, *CUT, "--json", "-")

    data = validated(outcome.out, PerplexityRecord)
    model, windows = load(str(tiny_folder)).model, cut(3)
    with torch.no_grad():
        log_p = model(windows.inputs, use_cache=False).logits.double().log_softmax(-1)
    picked = log_p.gather(-1, windows.targets[..., None])[..., 0][windows.scored]
    assert outcome.err == ""
    assert data["tokens_scored"] == 3 * 31
    assert data["nll"] == pytest.approx(-float(picked.mean()), rel=1e-6)
    assert data["token_perplexity"] == pytest.approx(math.exp(-float(picked.mean())), rel=1e-5)
    assert data["ci_low"] < data["token_perplexity"] < data["ci_high"]
    assert {"schema_version", "command", "model", "protocol", "environment", "status"} <= data.keys()


def test_perplexity_under_a_recipe(probe, tiny_folder):
    clean = validated(probe("perplexity", tiny_folder, *CUT, "--json", "-").out, PerplexityRecord)
    recipe = "sign_flip:rate=0.3,columns=outlier,fraction=0.1,seed=3"
    flipped = validated(
        probe("perplexity", tiny_folder, *CUT, "--json", "-", "--perturb", recipe).out, PerplexityRecord
    )

    assert flipped["nll"] != clean["nll"]
    assert any("sign_flip" in note for note in flipped["notes"])


def test_perplexity_prints_its_protocol(probe, tiny_folder):
    outcome = probe("perplexity", tiny_folder, *CUT)

    assert outcome.code == 0
    for shown in ("sample", "32", "disjoint", "perplexity"):
        assert shown in outcome.out


def test_inspect_lists_what_would_be_touched(probe, tiny_folder):
    data = validated(probe("inspect", tiny_folder, "--json", "-").out, InspectRecord)

    assert len(data["blocks"]) == 2
    assert {m["role"] for m in data["matrices"] if m["block"] is not None} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert data["accounted"] == 1
    assert all(check["passed"] for check in data["checks"])
    assert probe("inspect", tiny_folder).out.count("down_proj") >= 1


def test_doctor_tells_versions_devices_and_caches(probe, tmp_path):
    outcome = probe("doctor", "--no-lm-eval", "--json", "-")

    found = json.loads(outcome.out)
    assert outcome.code == 0
    assert (
        found["packages"]["torch"] == torch.__version__.split("+")[0] or found["packages"]["torch"] == torch.__version__
    )
    assert "cpu" in found["devices"]
    shown = probe("doctor", "--no-lm-eval")
    assert torch.__version__.split("+")[0] in shown.out
    assert probe("doctor", "--no-lm-eval", "--quiet", "--json", tmp_path / "d.json") == (0, "", "")
    assert json.loads((tmp_path / "d.json").read_text())["packages"] == found["packages"]


def test_demo_is_the_leverage_study_of_the_demo_model(probe, tiny_folder, tmp_path, monkeypatch):
    """Its own options take minutes: fewer seeds and shorter windows on a tiny model stand in for them."""
    seen = {}

    def tiny(source: str, **how: object) -> object:
        seen["source"], seen["dtype"] = source, how["dtype"]
        return load(str(tiny_folder), dtype="float32", device="cpu")

    monkeypatch.setattr("ternary_probe.loading.load", tiny)
    monkeypatch.setattr(
        "ternary_probe.studies.plan.LeverageOptions",
        lambda: LeverageOptions(rates=(0.05, 0.2), seeds=(0, 1), fraction=0.1),
    )

    outcome = probe("demo", "--out", tmp_path / "demo")

    assert outcome.code == 0, outcome.err
    assert seen == {"source": "demo", "dtype": "float32"}
    record = load_record(tmp_path / "demo" / "record.json")
    assert record.command == "demo"
    assert record.protocol is not None
    assert (record.protocol.model_dump()["windows"], record.protocol.model_dump()["window"]) == (4, 512)
    assert (tmp_path / "demo" / "report.md").is_file()
    assert "report.md" in outcome.out
    gate = load_record(tmp_path / "demo" / "gate.json")
    assert gate.tiers == ("parameters", "forward")
    assert (tmp_path / "demo" / "gate.md").is_file()
    assert gate.verdict.upper() in outcome.out


def test_the_script_prints_only_json_in_a_real_process(tiny_folder):
    command = [sys.executable, "-m", "ternary_probe", "inspect", str(tiny_folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    validated(done.stdout, InspectRecord)


def test_a_users_mistake_in_a_real_process_is_one_line(tmp_path):
    command = [sys.executable, "-m", "ternary_probe", "perplexity", str(tmp_path / "nowhere"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ternary-probe: ")


def test_debug_in_a_real_process_shows_the_traceback(tmp_path):
    command = [sys.executable, "-m", "ternary_probe", "--debug", "perplexity", str(tmp_path / "nowhere"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback (most recent call last)" in done.stderr
    assert "nowhere" in done.stderr


def test_the_tiny_model_is_left_as_it_was(report, tiny_folder):
    now = load(str(tiny_folder)).model
    for (name, one), (_, other) in zip(now.named_parameters(), speaking_llama().named_parameters(), strict=True):
        assert torch.equal(one, other), name
