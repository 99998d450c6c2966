"""Records: no NaN, one schema, written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import threading

import jsonschema
import pytest
from pydantic import ValidationError
from reports.factory import inspect_record, leverage_record, perplexity_record

from ternary_probe.errors import ProbeError
from ternary_probe.records import Environment, Leverage, Record, load_record, write_atomically

MAKERS = [leverage_record, perplexity_record, inspect_record]


@pytest.mark.parametrize("make", MAKERS)
def test_a_record_comes_back_from_its_file_as_its_own_class(make, tmp_path):
    record = make()

    assert record.save(tmp_path / "new" / "record.json") == tmp_path / "new" / "record.json"
    again = load_record(tmp_path / "new" / "record.json")

    assert type(again) is type(record)
    assert again == record


@pytest.mark.parametrize("make", MAKERS)
def test_a_record_validates_against_its_own_schema_by_another_validator(make):
    record = make()
    schema = type(record).model_json_schema(mode="serialization")

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(record.model_dump_json()))


@pytest.mark.parametrize("make", MAKERS)
def test_the_schema_is_not_so_loose_that_anything_passes(make):
    data = json.loads(make().model_dump_json())
    validator = jsonschema.Draft202012Validator(type(make()).model_json_schema(mode="serialization"))

    assert validator.is_valid(data)
    assert not validator.is_valid(data | {"extra": 1})
    assert not validator.is_valid({key: value for key, value in data.items() if key != "status"})
    assert not validator.is_valid(data | {"status": "great"})


@pytest.mark.parametrize("make", MAKERS)
def test_every_record_has_the_keys_of_all_commands(make):
    keys = {"schema_version", "command", "model", "protocol", "environment", "status"}
    assert keys <= json.loads(make().model_dump_json()).keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_refuses_what_is_not_finite(value):
    with pytest.raises(ValidationError):
        Leverage(rate=0.1, matching="count", response="kl", ratio=value, ci_low=None, ci_high=None, status="ok")


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError):
        leverage_record().status = "ok"


def test_unknown_keys_are_refused():
    data = leverage_record().model_dump() | {"lverage": []}
    with pytest.raises(ValidationError, match="lverage"):
        type(leverage_record()).model_validate(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON record"),
        ('"a string"', "no known 'command'"),
        ("[]", "no known 'command'"),
        ('{"command": "dance"}', "no known 'command'"),
        ('{"command": "leverage"}', "does not match schema"),
        ("\udcff", "not a JSON record"),
    ],
    ids=["cut off", "string", "list", "other command", "nothing in it", "not UTF-8"],
)
def test_a_file_that_is_no_record_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(ProbeError, match=message) as refused:
        load_record(path)
    assert "r.json" in str(refused.value)


def test_a_missing_record_is_refused_by_name(tmp_path):
    with pytest.raises(ProbeError, match=r"cannot read record .*none.json: no such file"):
        load_record(tmp_path / "none.json")


def test_the_environment_names_what_can_move_a_figure():
    here = Environment.here(threads=3)

    assert here.threads == 3
    assert {"torch", "transformers", "numpy"} <= here.packages.keys()


def fails_with(number: int, *, after_calls: int = 0):
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) > after_calls:
            raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_trace(tmp_path, monkeypatch, call):
    path = tmp_path / "record.json"
    path.write_text("old")
    monkeypatch.setattr(os, call, fails_with(errno.ENOSPC))

    with pytest.raises(ProbeError, match=r"cannot write .*record.json: no space left on device"):
        write_atomically(path, "new")

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_an_interrupt_while_writing_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "record.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", interrupted)

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_reader_never_sees_a_part_of_a_file(tmp_path):
    """Many large writes against a reader that looks all the time."""
    path = tmp_path / "record.json"
    contents = {letter * 400_000 for letter in "abc"}
    write_atomically(path, min(contents))
    torn: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if (seen := path.read_text()) not in contents:
                torn.append(len(seen))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for content in contents:
            write_atomically(path, content)
    over.set()
    reader.join()

    assert torn == []


def test_written_files_can_be_read_by_others(tmp_path):
    path = write_atomically(tmp_path / "r.json", "x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_text_is_utf8_and_bytes_are_bytes(tmp_path):
    assert write_atomically(tmp_path / "t", "α²").read_bytes() == "α²".encode()
    assert write_atomically(tmp_path / "b", b"\x00\xff").read_bytes() == b"\x00\xff"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()

    write_atomically(pipe, "through the pipe")

    reader.join(timeout=10)
    assert got == [b"through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_base_class_names_no_command_of_its_own():
    assert "command" in Record.model_fields
