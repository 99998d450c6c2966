"""Session fixtures of the demo model, the CUDA skip, and an environment without network or noise."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from pathlib import Path

import pytest
import torch

from ternary_probe import loading

# A suite started in the background of a script inherits "ignore Ctrl-C", and so would everything it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one thread a worker: the workers already fill the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's plain folder; where it can be neither found nor fetched the test fails."""
    return loading.fetch_demo()


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path) -> loading.LoadedModel:
    """The demo model in float32 on the CPU, shared by the session: whoever edits it must restore it."""
    return loading.load("demo", dtype="float32", device="cpu")
