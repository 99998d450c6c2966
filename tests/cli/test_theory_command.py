"""``ternary-probe theory``: the record on stdout, the table, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny import tiny_llama_folder
from typer.testing import CliRunner

from ternary_probe import theory
from ternary_probe.cli.app import app
from ternary_probe.errors import ProbeError

QUICK = ("theory", "--rates", "0.01,10%", "--width", "256", "--inputs", "64", "--seeds", "24", "--no-depth")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


@pytest.mark.parametrize("seed", ["0", "9000"])
def test_a_correct_program_exits_0_on_any_seeds(seed):
    result = run(*QUICK, "--seed", seed, "--json", "-")

    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["seeds"] == list(range(int(seed), int(seed) + 24))
    assert record["verdict"] == "pass"


def test_the_record_has_the_keys_that_scripts_rely_on():
    record = json.loads(run(*QUICK, "--json", "-").stdout)

    for key in ("schema_version", "command", "model", "protocol", "environment", "status"):
        assert key in record
    assert [row["rate"] for row in record["two_layer"]] == [0.01, 0.1]
    for row in record["two_layer"]:
        assert row["ratio_simulated"] == pytest.approx(row["ratio_exact"], rel=0.05)
        assert row["ratio_paper"] == pytest.approx(row["ratio_exact"], rel=0.02)
    assert [row["scheme"] for row in record["quantizers"]] == list(theory.GAUSSIAN_SCHEMES)
    assert {"cos2", "radial_pre", "radial_post"} <= record["quantizers"][0].keys()


def test_a_wrong_closed_form_exits_1_and_is_named(monkeypatch):
    monkeypatch.setattr(theory, "exact_ratio", lambda rate, *, width=None: theory.authors_ratio(rate))

    result = run(*QUICK)

    assert result.exit_code == 1
    assert "A closed form is wrong here" in result.stdout
    assert "ratio at rate 0.1" in " ".join(result.stdout.split())


def test_a_run_too_coarse_to_test_anything_exits_3():
    result = run(*QUICK[:-3], "--seeds", "2", "--no-depth")

    assert result.exit_code == 3
    assert "The closed forms are not tested" in result.stdout


def test_the_table_prints_the_width_and_quiet_prints_nothing(tmp_path):
    loud, silent = run(*QUICK), run(*QUICK, "--quiet", "--json", str(tmp_path / "theory.json"))

    assert "width 256, 64 inputs a seed, 24 seeds" in loud.stdout
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert json.loads((tmp_path / "theory.json").read_text())["width"] == 256


def test_a_models_own_matrices_are_stacked(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    arguments = [*QUICK[:-1], "--model", str(folder), "--role", "up_proj", "--inputs", "40", "--json", "-"]

    record = json.loads(run(*arguments).stdout)

    rows = [row for row in record["depth"] if row["weights"] == "up_proj"]
    assert [(row["layers"], row["residual"]) for row in rows] == [(1, False), (2, False), (1, True), (2, True)]
    assert all(row["ci_low"] < row["simulated"] < row["ci_high"] for row in rows)
    assert record["stack"] == [f"model.layers.{block}.mlp.up_proj.weight" for block in (0, 1)]
    assert record["protocol"]["window"] == 40
    assert record["model"]["path"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rates", "ten"), "is not a number"),
        (("--rates", "2"), "flip rate lies in"),
        (("--width", "16"), "--width 16"),
        (("--seeds", "0"), "--seeds 0"),
        (("--role", "up_proj"), "--model"),
        (("--text", "a.txt"), "--model"),
        (("--model", "x", "--no-depth"), "--no-depth"),
        (("--device", "tpu"), "tpu"),
        (("--confidence", "95"), "--confidence 95"),
    ],
)
def test_bad_usage_is_one_sentence_that_names_the_input(arguments, message):
    result = run("theory", *arguments)

    assert isinstance(result.exception, ProbeError)
    assert message in str(result.exception)


@pytest.mark.parametrize("command", ["theory", "quantize"])
def test_help_does_not_import_torch(command):
    script = (
        "import sys\nfrom ternary_probe.cli import main\n"
        f"sys.argv = ['ternary-probe', '{command}', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
