"""The command line, run in this process as the ``ternary-probe`` script runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from small_study import speaking_llama, tokenizer

from ternary_probe.cli import main


class Outcome(NamedTuple):
    """What a command left on the terminal."""

    code: int
    out: str
    err: str


Probe = Callable[..., Outcome]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Probe:
    """Run ``ternary-probe`` with some arguments."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ternary-probe", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer; read only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "speaking-llama"
    speaking_llama(torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
