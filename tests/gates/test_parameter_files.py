"""The files check: every way a checkpoint's files can be damaged is found and told apart from the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gates.checkpoints import judge, tensors, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ternary_probe.errors import ProbeError
from ternary_probe.gates._parameters import read_parameters
from ternary_probe.gates._stored_numbers import decode

FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write(tmp_path / "sharded", tensors(), shards=3)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_checkpoint_passes(tmp_path: Path, shards: int) -> None:
    (found,) = judge("files", write(tmp_path / "whole", tensors(), shards=shards))

    assert found.status == "pass"
    assert found.details == {"files": shards, "tensors": len(tensors())}


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def padded(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def pointer(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def missing(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "1 of"),
        (padded, "1 trailing bytes"),
        (zeroed, "zeroed"),
        (pointer, "Git LFS pointer"),
        (empty, "empty"),
        (missing, "missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_shard_is_named_with_what_happened_to_it(sharded: Path, damage, words: str) -> None:
    damage(sharded / SECOND)

    failed = [one for one in judge("files", sharded) if one.subject == SECOND]

    assert failed
    assert all(one.status == "fail" for one in failed)
    assert any(words in one.message for one in failed)


def test_every_damaged_shard_is_reported_not_only_the_first(sharded: Path) -> None:
    truncated(sharded / FIRST)
    padded(sharded / SECOND)

    found = judge("files", sharded)

    assert {one.subject for one in found} >= {FIRST, SECOND}


def edit_index(folder: Path, change) -> None:
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    change(content["weight_map"])
    file.write_text(json.dumps(content))


def test_an_index_that_points_to_the_wrong_shard_is_caught(sharded: Path) -> None:
    name = next(iter(load_file(sharded / FIRST)))
    edit_index(sharded, lambda weight_map: weight_map.update({name: SECOND}))

    (found,) = judge("files", sharded)

    assert found.status == "fail"
    assert name in found.message
    assert FIRST in found.message
    assert SECOND in found.message


def test_a_tensor_the_index_does_not_list_is_caught(sharded: Path) -> None:
    name = next(iter(load_file(sharded / FIRST)))
    edit_index(sharded, lambda weight_map: weight_map.pop(name))

    (found,) = judge("files", sharded)

    assert "does not list" in found.message
    assert name in found.message


def test_a_tensor_the_index_lists_and_no_shard_holds_is_caught(sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({"model.ghost.weight": FIRST}))

    (found,) = judge("files", sharded)

    assert "no readable shard holds it" in found.message


def test_a_tensor_in_two_shards_is_caught(sharded: Path) -> None:
    name, tensor = next(iter(load_file(sharded / FIRST).items()))
    save_file(load_file(sharded / SECOND) | {name: tensor}, sharded / SECOND)

    found = judge("files", sharded)

    assert [one.status for one in found] == ["fail"]
    assert found[0].subject == name
    assert "2 files" in found[0].message


def test_an_unlisted_shard_and_a_stale_single_file_are_caught(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "model-00004-of-00004.safetensors")
    save_file({"x": torch.zeros(1)}, sharded / "model.safetensors")

    messages = [one.message for one in judge("files", sharded)]

    assert any("not listed" in message for message in messages)
    assert any("stale" in message for message in messages)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}'])
def test_a_broken_index_is_a_finding(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)

    assert all(one.status == "fail" for one in judge("files", sharded))


def test_a_folder_without_a_checkpoint_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="is not a checkpoint"):
        read_parameters(str(tmp_path))
    with pytest.raises(ProbeError, match="there is no folder"):
        read_parameters(str(tmp_path / "absent"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_decoded_exactly_without_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e-5, 65504.0, float("inf"), -float("inf")]).to(dtype)
    write(tmp_path, {"x.weight": values})
    found = read_parameters(str(tmp_path))

    assert torch.equal(torch.from_numpy(found.read("x.weight")), values.double())


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("F8_E8M0", torch.float8_e8m0fnu),
    ],
)
def test_every_eight_bit_code_is_decoded_as_torch_decodes_it(stored: str, dtype: torch.dtype) -> None:
    codes = bytes(range(256))
    expected = torch.frombuffer(bytearray(codes), dtype=dtype).float().double().numpy()

    np.testing.assert_array_equal(decode(codes, stored, "w"), expected)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ProbeError, match="w is stored as F4"):
        decode(b"\0", "F4", "w")


def test_only_headers_and_gains_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors() | {"model.big.proj": torch.zeros(1000, 1000)})
    found = read_parameters(str(folder))
    gains = sum(gain.stored.size for gain in found.gains.values()) * 4
    header = found.tensors["model.big.proj"].begin

    assert len(found.gains) == 5
    assert found.bytes_read < gains + 2 * header + 64 + (folder / "config.json").stat().st_size + 4096
    assert found.bytes_read < 40_000


def zero_data(file: Path) -> None:
    """Keep the header, and let every byte behind it be zero."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:start] + bytes(len(raw) - start))


def roomy() -> dict[str, torch.Tensor]:
    """Matrices of more than the 64 bytes a sample reads."""
    generator = torch.Generator().manual_seed(1)
    names = [f"model.layers.{block}.{part}.weight" for block in range(4) for part in ("up", "down")]
    return tensors() | {name: torch.randn(64, 64, generator=generator) for name in names}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_shard_whose_data_are_zero_under_a_sound_header_is_called_zeroed(tmp_path: Path, shards: int) -> None:
    folder = write(tmp_path, roomy(), shards=shards)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    zero_data(shard)

    (found,) = judge("files", folder)

    assert (found.status, found.subject) == ("fail", shard.name)
    assert "its header is sound" in found.message
    assert found.details["fault"] == "zeroed data"


def test_a_shard_of_matrices_alone_whose_data_are_zero_is_called_zeroed(tmp_path: Path) -> None:
    content = roomy()
    matrices = {
        name: torch.zeros_like(value) for name, value in content.items() if "layers.3" in name and value.ndim > 1
    }
    folder = write(tmp_path, content, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        save_file({k: v for k, v in load_file(folder / file).items() if k not in matrices}, folder / file)
    save_file(matrices, folder / "model-00004-of-00004.safetensors")
    index["weight_map"] |= dict.fromkeys(matrices, "model-00004-of-00004.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    (found,) = judge("files", folder)

    assert (found.status, found.subject) == ("fail", "model-00004-of-00004.safetensors")


def test_a_file_that_ends_in_zeros_is_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path, roomy())
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))

    found = judge("files", folder)

    assert [one.status for one in found] == ["warn"]
    assert "stopped" in found[0].message


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (truncated, "truncated"),
        (padded, "trailing"),
        (zeroed, "zeroed"),
        (pointer, "impostor"),
        (empty, "empty"),
        (missing, "missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kinds_of_damage_are_told_apart_for_scripts(sharded: Path, damage, fault: str) -> None:
    damage(sharded / SECOND)

    assert {one.details["fault"] for one in judge("files", sharded) if one.subject == SECOND} == {fault}


def test_what_a_truncated_shard_still_holds_is_judged(sharded: Path) -> None:
    whole = read_parameters(str(sharded))
    truncated(sharded / SECOND)
    found = read_parameters(str(sharded))

    assert len(whole.tensors) - len(found.tensors) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pointer_in_place_of_a_json_file_is_named(sharded: Path, name: str) -> None:
    pointer(sharded / name)

    failed = [one for one in judge("files", sharded) if one.subject == name]

    assert [one.status for one in failed] == ["fail"]
    assert "Git LFS pointer" in failed[0].message


def test_shards_without_an_index_are_read_and_the_index_missed(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()

    (found,) = judge("files", sharded)

    assert found.status == "fail"
    assert "no model.safetensors.index.json" in found.message
    assert read_parameters(str(sharded)).tensors.keys() == tensors().keys()


@pytest.mark.parametrize("kind", ["gguf", "pickle"])
def test_formats_that_are_not_read_are_not_applicable(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "model.gguf"
    if kind == "gguf":
        source.write_bytes(b"GGUF")
    else:
        source = tmp_path
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK")

    for check in ("files", "tensors", "norm-gain", "weight-scan", "weight-grid", "bitnet-scale"):
        (found,) = judge(check, source)
        assert found.status == "not_applicable"


def test_a_revision_of_a_folder_is_refused(sharded: Path) -> None:
    with pytest.raises(ProbeError, match="drop --revision"):
        read_parameters(str(sharded), revision="v1")


@given(
    which=st.sampled_from(["config.json", "model.safetensors.index.json", FIRST, SECOND]),
    at=st.floats(0, 1),
    noise=st.binary(min_size=1, max_size=12),
    cut=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_makes_a_check_raise(tmp_path: Path, which: str, at: float, noise: bytes, cut: bool) -> None:
    folder = tmp_path / "sharded"
    if not folder.exists():
        write(folder, tensors(), shards=3)
    file = folder / which
    sound = file.read_bytes()
    place = int(at * (len(sound) - 1))
    file.write_bytes(sound[:place] if cut else sound[:place] + noise + sound[place + len(noise) :])
    try:
        for check in ("files", "tensors", "norm-gain", "weight-scan", "weight-grid", "bitnet-scale"):
            assert judge(check, folder)
    finally:
        file.write_bytes(sound)
