"""Cells of a study, committed to SQLite as they finish: a killed run loses at most the cell it was in."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ternary_probe.errors import ProbeError


class CellStore:
    """Finished cells of one study, by key. In memory when no folder is given.

    Args:
        folder: Output folder of the study, or ``None``.
        fingerprint: Everything the cells depend on (model weights, text, columns, version of the recipe); another
            fingerprint in the same folder is refused.

    Raises:
        ProbeError: If the folder cannot be used, or holds another study.
    """

    def __init__(self, folder: Path | None, fingerprint: dict[str, Any]) -> None:
        self.path = None if folder is None else folder / "cells.sqlite"
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(":memory:" if self.path is None else self.path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS study (name TEXT PRIMARY KEY, value TEXT)")
            self._db.execute("CREATE TABLE IF NOT EXISTS cells (key TEXT PRIMARY KEY, value TEXT)")
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise ProbeError(
                f"cannot write to the output folder {folder}: {error}; choose another with --out"
            ) from error
        self._claim(fingerprint)

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        mine = {name: json.dumps(value, sort_keys=True) for name, value in fingerprint.items()}
        try:
            theirs = dict(self._db.execute("SELECT name, value FROM study").fetchall())
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._db.close()
            raise ProbeError(
                f"{self.path} cannot be read as the cells of a study: {error}; delete it, or choose another --out"
            ) from error
        if not theirs:
            self._write("INSERT INTO study VALUES (?, ?)", list(mine.items()))
            return
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different:
            self._db.close()
            raise ProbeError(
                f"{self.path} holds another study (different: {', '.join(different)}); choose another --out or delete it"
            )

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a finished cell.

        Args:
            key: Its key.

        Returns:
            The cell, or ``None`` when it is not finished.

        Raises:
            ProbeError: If the file cannot be read any more.
        """
        try:
            row = self._db.execute("SELECT value FROM cells WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise ProbeError(f"cannot read {self.path}: {error}; delete the file, or choose another --out") from error
        if row is None:
            return None
        try:
            return dict(json.loads(row[0]))
        except (TypeError, ValueError) as error:
            raise self.damaged(key) from error

    def damaged(self, key: str) -> ProbeError:
        """Return the error for a cell that cannot be what `put` wrote.

        Args:
            key: Its key.

        Returns:
            The error.
        """
        return ProbeError(f"cell {key} in {self.path} is damaged: delete the file, or choose another --out")

    def put(self, key: str, cell: dict[str, Any]) -> None:
        """Commit a finished cell; it is on disk when this returns.

        Args:
            key: Its key.
            cell: JSON-able data.
        """
        self._write("INSERT OR REPLACE INTO cells VALUES (?, ?)", [(key, json.dumps(cell))])

    def _write(self, statement: str, rows: list[tuple[str, str]]) -> None:
        try:
            with self._db:
                self._db.executemany(statement, rows)
        except sqlite3.Error as error:
            raise ProbeError(
                f"cannot save a finished cell to {self.path}: {error}; free space and run the same command again, "
                "it continues where it stopped"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()
