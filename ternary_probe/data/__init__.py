"""Files that travel with the package: the sample text."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["sample_text"]


def sample_text() -> str:
    """Return the sample text: English prose on varied subjects, written for this project.

    Returns:
        Plain paragraphs separated by blank lines; every piece opens with a title line.
    """
    return files(__name__).joinpath("sample.txt").read_text(encoding="utf-8")
