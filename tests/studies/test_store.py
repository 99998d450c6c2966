"""Finished cells survive anything; another study is never continued."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import pytest

from ternary_probe.errors import ProbeError
from ternary_probe.studies.store import CellStore

FINGERPRINT = {"weights": "ab", "text": "cd", "rates": (0.001, 0.005), "columns": [0.05, "energy", (), False]}


def cells_on_disk(folder) -> dict[str, str]:
    with sqlite3.connect(f"file:{folder / 'cells.sqlite'}?mode=ro", uri=True) as db:
        return dict(db.execute("SELECT key, value FROM cells"))


def test_a_cell_is_on_disk_when_put_returns(tmp_path):
    store = CellStore(tmp_path, FINGERPRINT)

    store.put("a|1", {"kl": 0.25, "kl_windows": [0.2, 0.3], "status": "ok"})

    assert cells_on_disk(tmp_path).keys() == {"a|1"}  # another connection sees it while the store is open


def test_a_cell_is_on_disk_when_the_process_dies_right_after(tmp_path):
    code = (
        "import os, sys, pathlib; from ternary_probe.studies.store import CellStore;"
        "s = CellStore(pathlib.Path(sys.argv[1]), {'weights': 'ab'});"
        "s.put('a', {'kl': 1.5}); s.put('b', {'kl': None}); os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=120)

    assert died.returncode == -9
    with CellStore(tmp_path, {"weights": "ab"}) as store:
        assert store.get("a") == {"kl": 1.5}
        assert store.get("b") == {"kl": None}
        assert store.get("c") is None


def test_cells_come_back_as_they_were_bit_for_bit(tmp_path):
    cell = {"kl": 0.1 + 0.2, "tiny": 5e-324, "windows": [1 / 3], "none": None, "text": "µ|%"}
    with CellStore(tmp_path, FINGERPRINT) as store:
        store.put("x", cell)

    with CellStore(tmp_path, FINGERPRINT) as store:
        assert store.get("x") == cell


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": "xx"}, "weights"),
        ({"rates": (0.001,)}, "rates"),
        ({"columns": [0.05, "mean_abs", (), False]}, "columns"),
        ({"new field": 1}, "new field"),
        ({"text": "zz", "weights": "xx"}, "text, weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_study_in_the_same_folder_is_refused_by_the_name_of_what_differs(tmp_path, change, named):
    with CellStore(tmp_path, FINGERPRINT) as store:
        store.put("a", {"kl": 1.0})

    with pytest.raises(ProbeError, match="holds another study") as refused:
        CellStore(tmp_path, FINGERPRINT | change)

    assert f"(different: {named})" in str(refused.value)
    assert "--out" in str(refused.value)
    with CellStore(tmp_path, FINGERPRINT) as store:  # nothing was lost by the attempt
        assert store.get("a") == {"kl": 1.0}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CellStore(None, FINGERPRINT) as store:
        store.put("a", {"kl": 1.0})
        assert store.get("a") == {"kl": 1.0}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ProbeError, match="cannot write to the output folder") as refused:
        CellStore(tmp_path / "file" / "out", FINGERPRINT)

    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    (tmp_path / "cells.sqlite").write_bytes(b"not a database, and longer than a header of one hundred bytes" * 4)

    with pytest.raises(ProbeError, match="cannot write to the output folder"):
        CellStore(tmp_path, FINGERPRINT)

    assert (tmp_path / "cells.sqlite").read_bytes().startswith(b"not a database")


def test_a_full_disk_is_a_clear_error_and_earlier_cells_stay(tmp_path):
    store = CellStore(tmp_path, FINGERPRINT)
    store.put("a", {"kl": 1.0})
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to say the disk is full

    with pytest.raises(ProbeError, match="cannot save a finished cell") as refused:
        store.put("b", {"windows": [0.5] * 10_000})

    assert "full" in str(refused.value)
    assert "run the same command again" in str(refused.value)
    with CellStore(tmp_path, FINGERPRINT) as again:
        assert again.get("a") == {"kl": 1.0}
        assert again.get("b") is None


def test_a_file_that_cannot_be_read_any_more_is_a_clear_error(tmp_path):
    store = CellStore(tmp_path, FINGERPRINT)
    store._db.execute("DROP TABLE cells")

    with pytest.raises(ProbeError, match=r"cannot read .*cells.sqlite"):
        store.get("a|1")
