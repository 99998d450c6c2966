"""A checkpoint folder is read without building a model, and every kind of damage is named for what it is."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import tiny_llama_folder

from ternary_probe.checkpoint import INDEX, SINGLE, CheckpointError, open_checkpoint
from ternary_probe.errors import ProbeError
from ternary_probe.safetensors_header import BrokenFileError, read_header


def header_bytes(header: dict[str, Any] | str) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text)) + text.encode()


def folder_with(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / SINGLE).write_bytes(content)
    return tmp_path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SOUND = header_bytes({"w": ENTRY}) + bytes(range(8))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_is_read_as_the_reference_reader_reads_it(tmp_path, dtype, shards):
    folder = tiny_llama_folder(tmp_path, dtype, shards)
    expected = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

    checkpoint = open_checkpoint(folder)

    assert checkpoint.config["hidden_size"] == 32
    assert {file.name for file in checkpoint.files} == {file.name for file in folder.glob("*.safetensors")}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        entry = checkpoint.tensors[name]
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == dtype
        assert entry.shape == tuple(tensor.shape)
        stored = entry.file.read_bytes()[entry.begin : entry.end]
        assert stored == tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64],
    ids=str,
)
def test_unusual_dtypes_have_the_size_the_header_check_expects(tmp_path, dtype):
    tensor = torch.zeros(3, 5).to(dtype)
    save_file({"w": tensor, "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text("{}")

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.read("w").dtype == dtype
    assert checkpoint.read("scalar").item() == 1.5
    assert checkpoint.read("empty").shape == (0, 4)


def test_headers_are_read_without_importing_torch(tmp_path):
    folder = folder_with(tmp_path, SOUND)
    code = (
        "import sys; from pathlib import Path; from ternary_probe.checkpoint import open_checkpoint; "
        f"assert 'w' in open_checkpoint(Path({str(folder)!r})).tensors; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"\x07\x00", "is truncated: 2 bytes"),
        (SOUND[:-1], "is truncated: 1 of"),
        (SOUND[:20], "is truncated: it ends"),
        (SOUND + b"\x00", "has 1 trailing bytes"),
        (SOUND + bytes(1000), "has 1000 trailing bytes"),
        (bytes(4096), "is zeroed"),
        (struct.pack("<Q", 64) + bytes(64), "is zeroed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "is a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "is a PyTorch pickle"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
        (b"\xff" * 100, "is not a safetensors file"),
        (header_bytes('{"w": '), "is not JSON"),
        (header_bytes("[" * 200_000), "is not JSON"),
        (header_bytes("[1]"), "is not a JSON object"),
        (header_bytes('{"w": %s, "w": %s}' % ((json.dumps(ENTRY),) * 2)) + bytes(8), "'w' occurs twice"),
        (header_bytes({"w": 3}) + bytes(8), "is not described by an object"),
        (header_bytes({"w": ENTRY | {"dtype": "F33"}}) + bytes(8), "unknown dtype 'F33'"),
        (header_bytes({"w": ENTRY | {"dtype": ["F32"]}}) + bytes(8), "unknown dtype"),
        (header_bytes({"w": ENTRY | {"shape": [-2]}}) + bytes(8), "impossible shape"),
        (header_bytes({"w": ENTRY | {"shape": [3]}}) + bytes(8), "has 8 bytes, but shape [3] in F32 needs 12"),
        (header_bytes({"w": ENTRY | {"data_offsets": [8, 0]}}) + bytes(8), "impossible offsets"),
        (header_bytes({"w": ENTRY | {"data_offsets": None}}) + bytes(8), "impossible offsets"),
        (header_bytes({"v": ENTRY, "w": ENTRY}) + bytes(8), "overlaps the tensor before it"),
        (header_bytes({"w": ENTRY | {"data_offsets": [4, 12]}}) + bytes(12), "leaves 4 unused bytes"),
        (header_bytes({}), "holds no tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_file_is_named_with_what_is_wrong_with_it(tmp_path, content, complaint):
    folder = folder_with(tmp_path, content)

    with pytest.raises(ProbeError) as caught:
        open_checkpoint(folder)

    assert complaint in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(cut=st.integers(1, len(SOUND)), noise=st.binary(max_size=40), at=st.integers(0, len(SOUND)))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_raises_anything_but_a_broken_file_error(tmp_path, cut, noise, at):
    file = tmp_path / "damaged.safetensors"
    for content in (SOUND[:-cut], SOUND[:at] + noise + SOUND[at:], SOUND[:at] + noise + SOUND[at + len(noise) :]):
        file.write_bytes(content)
        try:
            entries = read_header(file)
        except BrokenFileError:
            continue
        # whatever is accepted, the reference reader accepts too, with the same shapes
        assert {name: entry.shape for name, entry in entries.items()} == {
            name: tuple(tensor.shape) for name, tensor in load_file(file).items()
        }


def test_a_sound_file_is_accepted(tmp_path):
    assert open_checkpoint(folder_with(tmp_path, SOUND)).read("w").shape == (2,)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


NORM = "model.norm.weight"


def move_norm(weight_map: dict[str, str]) -> None:
    weight_map[NORM] = next(shard for shard in sorted(weight_map.values()) if shard != weight_map[NORM])


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (move_norm, f"places '{NORM}' in model-00001-of-00003.safetensors, but it is in"),
        (lambda weight_map: weight_map.pop(NORM), f"holds '{NORM}', which {INDEX} does not list"),
        (lambda weight_map: weight_map.update(ghost="model-00001-of-00003.safetensors"), "no shard holds it"),
        (
            lambda weight_map: weight_map.update({NORM: "other.safetensors"}),
            "names the shard other.safetensors, which is missing",
        ),
        (lambda weight_map: weight_map.update({NORM: "../secret"}), "which is not a file name"),
        (lambda weight_map: weight_map.update({NORM: 3}), "which is not a file name"),
        (lambda weight_map: weight_map.clear(), "has no weight_map"),
    ],
    ids=[
        "wrong shard",
        "unlisted tensor",
        "ghost tensor",
        "missing shard",
        "path out of the folder",
        "number",
        "empty",
    ],
)
def test_index_and_shards_that_disagree_are_refused(tmp_path, edit, complaint):
    folder = tiny_llama_folder(tmp_path, shards=3)
    edit_index(folder, edit)

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)

    assert complaint in str(caught.value)


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors, which is missing"):
        open_checkpoint(folder)


def test_a_shard_the_index_does_not_list_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=2)
    save_file({"extra": torch.zeros(2)}, folder / "model-00003-of-00003.safetensors")

    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors, which .* does not list"):
        open_checkpoint(folder)


def test_a_tensor_held_by_two_shards_is_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=2)
    placed = json.loads((folder / INDEX).read_text())["weight_map"][NORM]
    other = next(file for file in folder.glob("model-*.safetensors") if file.name != placed)
    save_file(load_file(other) | {NORM: torch.zeros(32)}, other)

    with pytest.raises(CheckpointError, match=rf"holds '{NORM}', which .* places in {placed}"):
        open_checkpoint(folder)


def test_a_truncated_shard_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(BrokenFileError, match=r"model-00002-of-00002\.safetensors is truncated: 1 of"):
        open_checkpoint(folder)


def test_a_stale_single_file_beside_shards_is_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=2)
    save_file({"old": torch.zeros(2)}, folder / SINGLE)

    with pytest.raises(CheckpointError, match="remove the stale one"):
        open_checkpoint(folder)


def test_an_index_that_names_the_single_file_is_accepted(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    names = open_checkpoint(folder).tensors
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))

    assert open_checkpoint(folder).tensors.keys() == names.keys()


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "has no config.json"),
        ({"adapter_config.json": "{}"}, "PEFT adapter"),
        ({"config.json": "{}"}, "holds no weights"),
        ({"config.json": "{}", "consolidated.safetensors": "x"}, "it does hold consolidated.safetensors"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "--allow-pickle"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": "[]"}, "config.json must hold a JSON object"),
        ({"config.json": "{}", INDEX: "{}"}, "has no weight_map"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_incomplete_folder_is_told_what_it_lacks(tmp_path, files, complaint):
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)

    assert complaint in str(caught.value)


def test_a_missing_folder_and_a_missing_tensor_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no tensor 'ghost'"):
        open_checkpoint(folder_with(tmp_path, SOUND)).read("ghost")
