"""Every mistake of a user is one sentence on stderr, exit code 2, nothing on stdout, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import zoo
from small_study import speaking_llama, tokenizer
from tiny import tiny_llama_folder

from ternary_probe.errors import ProbeError

SMALL = ("--window", 32, "--windows", 2, "--rates", "0.05,0.2", "--seeds", 2, "--fraction", 0.1)


def assert_one_sentence(outcome, *fragments: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("ternary-probe: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for fragment in fragments:
        assert fragment in outcome.err


# --- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["leverage", "perplexity", "inspect"])
def test_an_unknown_model(probe, command):
    assert_one_sentence(probe(command, "nobody/no-such-model", "-q"), "nobody/no-such-model")


def test_a_folder_that_does_not_exist(probe, tmp_path):
    assert_one_sentence(probe("leverage", tmp_path / "nowhere", "-q"), "nowhere")


def test_a_folder_without_a_config(probe, tmp_path):
    (tmp_path / "empty").mkdir()

    assert_one_sentence(probe("leverage", tmp_path / "empty", "-q"), "config.json")


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_safetensors(probe, tiny_folder, tmp_path, cut):
    folder = shutil.copytree(tiny_folder, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut])

    assert_one_sentence(probe("leverage", folder, "-q"), "model.safetensors", "truncated")


@pytest.mark.parametrize("command", ["leverage", "perplexity"])
def test_a_missing_tokenizer(probe, tmp_path, command):
    folder = tiny_llama_folder(tmp_path, tokenizer=False)

    assert_one_sentence(probe(command, folder, "-q"), "has no tokenizer")


def test_inspect_needs_no_tokenizer(probe, tmp_path):
    folder = tiny_llama_folder(tmp_path, tokenizer=False)

    assert probe("inspect", folder, "--json", "-").code == 0


def test_nan_weights(probe, tmp_path):
    model = speaking_llama(torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    tokenizer().save_pretrained(tmp_path / "nan")

    assert_one_sentence(probe("leverage", tmp_path / "nan", "-q", *SMALL), "up_proj")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--dtype", "float7"), ("--device", "toaster"), ("--device", "cuda:99"), ("--revision", "main")],
)
def test_a_bad_way_of_loading(probe, tiny_folder, option, value):
    assert_one_sentence(probe("leverage", tiny_folder, "-q", option, value))


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["leverage", "perplexity"])
def test_a_text_shorter_than_a_window(probe, tiny_folder, tmp_path, command):
    (tmp_path / "short.txt").write_text("Nine lanterns.")

    outcome = probe(command, tiny_folder, "-q", "--text", tmp_path / "short.txt", "--window", 64)
    assert_one_sentence(outcome, "short.txt", "tokens", "--window")


@pytest.mark.parametrize("content", ["", " \n\t\n"], ids=repr)
def test_an_empty_text(probe, tiny_folder, tmp_path, content):
    (tmp_path / "empty.txt").write_text(content)

    assert_one_sentence(probe("perplexity", tiny_folder, "-q", "--text", tmp_path / "empty.txt"), "empty")


def test_a_text_file_that_does_not_exist(probe, tiny_folder, tmp_path):
    assert_one_sentence(probe("perplexity", tiny_folder, "-q", "--text", tmp_path / "no.txt"), "no.txt")


def test_a_text_that_leaves_nothing_to_calibrate_on(probe, tiny_folder, tmp_path):
    (tmp_path / "just.txt").write_text("The river bends twice before it reaches the mill. " * 9)

    outcome = probe("leverage", tiny_folder, "-q", "--text", tmp_path / "just.txt", "--window", 32, "--windows", 2)
    assert_one_sentence(outcome, "calibration")


def test_calibrating_on_the_scored_text(probe, tiny_folder, tmp_path):
    (tmp_path / "same.txt").write_text("The river bends twice before it reaches the mill. " * 40)
    same = ("--text", tmp_path / "same.txt", "--calibration", tmp_path / "same.txt")

    assert_one_sentence(probe("leverage", tiny_folder, "-q", *SMALL, *same), "--calibration", "scored text")


@pytest.mark.parametrize("windows", [0, -1])
@pytest.mark.parametrize("command", ["leverage", "perplexity"])
def test_no_windows_at_all(probe, tiny_folder, command, windows):
    assert_one_sentence(probe(command, tiny_folder, "-q", "--window", 32, "--windows", windows), "--windows")


def test_a_text_and_a_data_set(probe, tiny_folder, tmp_path):
    both = ("--text", tmp_path / "a.txt", "--dataset", "wikitext")

    assert_one_sentence(probe("perplexity", tiny_folder, "-q", *both), "only one")


def learned_positions_folder(tmp_path: Path) -> Path:
    """A GPT-2 whose table of positions has 128 rows."""
    folder = tmp_path / "gpt2"
    zoo.build("gpt2").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", ["leverage", "perplexity"])
def test_a_window_longer_than_the_models_table_of_positions(probe, tmp_path, command):
    outcome = probe(command, learned_positions_folder(tmp_path), "-q", "--window", 129, "--windows", 2)

    assert_one_sentence(outcome, "129", "128", "--window")


def test_a_window_as_long_as_the_table_of_positions_is_fine(probe, tmp_path):
    assert probe("perplexity", learned_positions_folder(tmp_path), "-q", "--window", 128, "--windows", 2).code == 0


def test_a_window_longer_than_the_model_was_made_for_is_noted(probe, tiny_folder):
    notes = [
        json.loads(probe("perplexity", tiny_folder, "--window", window, "--windows", 1, "--json", "-").out)["protocol"]
        for window in (128, 160)
    ]

    assert not any("positions" in note for note in notes[0]["notes"])
    assert any("160" in note and "128 positions" in note for note in notes[1]["notes"])


# --- the study -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", ["0", "-0.1", "1.5", "nan", "inf", "0.1,0", "200%", "abc", "", "0.1,0.1"])
def test_a_rate_that_is_no_share(probe, tiny_folder, rates):
    assert_one_sentence(probe("leverage", tiny_folder, "-q", f"--rates={rates}"), "rate")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seeds", 0),
        ("--seeds", -2),
        ("--fraction", 0),
        ("--fraction", "nan"),
        ("--arms", "outliers"),
        ("--arms", ""),
        ("--matching", "norm"),
        ("--by", "size"),
        ("--plant", "sign_flip:rate=0.1"),
        ("--plant", "outlier_columns:k=0"),
        ("--plant", "nonsense"),
        ("--include", "*nothing*"),
    ],
    ids=lambda pair: " ".join(map(str, pair)),
)
def test_a_study_that_makes_no_sense(probe, tiny_folder, arguments):
    rest = ("--window", 32, "--windows", 2)
    assert_one_sentence(probe("leverage", tiny_folder, "-q", *rest, *arguments))


def test_no_outlier_column_selected(probe, tiny_folder):
    outcome = probe("leverage", tiny_folder, "-q", "--window", 32, "--windows", 2, "--fraction", 0.001)

    assert_one_sentence(outcome, "no outlier column", "--fraction")


def test_another_study_in_the_same_folder(probe, tiny_folder, tmp_path):
    assert probe("leverage", tiny_folder, "-q", *SMALL, "--out", tmp_path).code == 0
    before = (tmp_path / "record.json").read_bytes()

    outcome = probe("leverage", tiny_folder, "-q", *SMALL, "--seed", 5, "--out", tmp_path)

    assert_one_sentence(outcome, "another study", "seeds", "--out")
    assert (tmp_path / "record.json").read_bytes() == before


# --- the output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_an_output_that_cannot_be_written_is_found_before_any_work(probe, tmp_path, monkeypatch, option):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("ternary_probe.loading.load", lambda *_a, **_k: pytest.fail("a model was loaded"))

    outcome = probe("leverage", "demo", "-q", option, tmp_path / "file" / "below" / "x")

    assert_one_sentence(outcome, "cannot write", option)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_that_the_system_refuses(probe, tiny_folder):
    assert_one_sentence(probe("leverage", tiny_folder, "-q", *SMALL, "--out", "/proc/ternary-probe"), "/proc")


def test_json_into_a_folder(probe, tiny_folder, tmp_path):
    assert_one_sentence(probe("inspect", tiny_folder, "-q", "--json", tmp_path), "is a folder")


def test_a_full_disk_loses_no_cell_and_a_rerun_finishes(probe, tiny_folder, tmp_path, monkeypatch):
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        outcome = probe("leverage", tiny_folder, "-q", *SMALL, "--out", tmp_path)

    assert_one_sentence(outcome, "record.json", "no space left on device", "--out")
    assert not list(tmp_path.glob("*record.json*")), "a part of a record was left behind"
    again = probe("leverage", tiny_folder, "-q", *SMALL, "--out", tmp_path)
    assert again.code == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["timing"]["evaluations"] == 1
    assert len(record["arms"]) == 12


def test_a_full_disk_leaves_an_older_record_as_it_was(probe, tiny_folder, tmp_path, monkeypatch):
    target = tmp_path / "old.json"
    target.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    assert_one_sentence(probe("inspect", tiny_folder, "-q", "--json", target), "old.json", "no space")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert target.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_is_an_error(probe, tiny_folder):
    assert_one_sentence(probe("inspect", tiny_folder, "-q", "--json", "/dev/full"), "/dev/full", "no space")


# --- tracebacks ----------------------------------------------------------------------------------------------------


def test_debug_shows_the_traceback(probe, tmp_path):
    with pytest.raises(ProbeError, match="nowhere") as raised:
        probe("--debug", "leverage", tmp_path / "nowhere", "-q")

    assert [entry.name for entry in raised.traceback][-1] != "main"


def test_an_error_that_is_no_users_mistake_is_not_hidden(probe, tiny_folder, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("ternary_probe.studies.inspection.run_inspection", broken)

    with pytest.raises(ZeroDivisionError):
        probe("inspect", tiny_folder, "-q")


def test_one_strength_of_planted_outliers_given_twice(probe, tiny_folder):
    outcome = probe("quantize", tiny_folder, "--plant-outliers", "2,2")

    assert outcome.code == 2
    assert "names one strength twice" in outcome.err


def test_what_cannot_be_measured_is_refused_before_it_is_saved(probe, tiny_folder, tmp_path):
    outcome = probe("quantize", tiny_folder, "--include", "*", "--save", tmp_path / "saved", "--windows", "1")

    assert outcome.code == 2
    assert "lies outside the blocks" in outcome.err
    assert not (tmp_path / "saved").exists()
