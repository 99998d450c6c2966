"""The command line. Importing it, and ``--help``, load neither torch nor transformers."""

from __future__ import annotations

from ternary_probe.cli.app import app, main

__all__ = ["app", "main"]
