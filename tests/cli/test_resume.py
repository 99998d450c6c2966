"""A study that is killed or interrupted continues, and its record equals an uninterrupted run's."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

CELLS = 8 * 3 * 3  # seeds, rates, arms
STUDY = ("--window", 128, "--windows", 6, "--rates", "0.05,0.1,0.2", "--seeds", 8, "--fraction", 0.1, "--quiet")


def start(model: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ternary_probe", "leverage", str(model), *map(str, STUDY), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def cells_in(out: Path) -> int:
    try:
        with sqlite3.connect(f"file:{out / 'cells.sqlite'}?mode=ro", uri=True) as database:
            return int(database.execute("SELECT count(*) FROM cells").fetchone()[0])
    except sqlite3.OperationalError:  # not there yet
        return 0


def strike_after(cells: int, process: subprocess.Popen[str], out: Path, with_signal: signal.Signals) -> None:
    give_up = time.monotonic() + 240
    while cells_in(out) < cells:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "the study does not get anywhere"
        time.sleep(0.002)
    process.send_signal(with_signal)


def record_in(out: Path) -> dict:
    return json.loads((out / "record.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(tiny_folder, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("uninterrupted")
    process = start(tiny_folder, out)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return record_in(out)


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_a_rerun_continues_and_gives_the_record_of_an_uninterrupted_run(
    tiny_folder, tmp_path, uninterrupted, with_signal
):
    killed = start(tiny_folder, tmp_path)
    try:
        strike_after(9, killed, tmp_path, with_signal)
        out, err = killed.communicate(timeout=120)
    finally:
        killed.kill()
    assert out == ""
    if with_signal is signal.SIGINT:
        assert killed.returncode == 130
        assert "finished cells are kept" in err
        assert "Traceback" not in err
    else:
        assert killed.returncode == -signal.SIGKILL
    kept = cells_in(tmp_path)
    assert 9 <= kept < CELLS, "the study was over before it was struck"
    assert not (tmp_path / "record.json").exists()

    again = start(tiny_folder, tmp_path)
    _, err = again.communicate(timeout=300)

    assert again.returncode == 0, err
    record = record_in(tmp_path)
    for part in ("environment", "timing"):
        record.pop(part), uninterrupted.get(part)
    assert record == {name: value for name, value in uninterrupted.items() if name not in {"environment", "timing"}}
    evaluations = record_in(tmp_path)["timing"]["evaluations"]
    assert uninterrupted["timing"]["evaluations"] == 3 + CELLS + 4
    assert evaluations <= uninterrupted["timing"]["evaluations"] - (kept - 1)  # one row is the noise floor's
    assert len(record["arms"]) == CELLS
