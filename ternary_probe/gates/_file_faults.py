"""Config, index and shard headers of a checkpoint, read through `Files`; whatever is wrong is collected, not raised."""

from __future__ import annotations

import fnmatch
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ternary_probe.checkpoint import CONFIG, INDEX, SHARD_PATTERN, SINGLE
from ternary_probe.errors import ProbeError
from ternary_probe.gates._file_access import Files
from ternary_probe.safetensors_header import BrokenFileError, TensorEntry, check_layout, header_of

_POINTER = b"version https://git-lfs"


class Problem(NamedTuple):
    """A fault of a file.

    Attributes:
        file: The file concerned.
        message: One sentence.
        fault: Its kind: ``missing``, ``index``, ``config``, ``stale``, or one of `BrokenFileError`'s.
    """

    file: str
    message: str
    fault: str


@dataclass
class Headers:
    """What config, index and headers say.

    Attributes:
        config: ``config.json``, empty where it cannot be read.
        tensors: Where each tensor lies that can be read whole.
        shards: Entries by file, of every file with a readable header.
        duplicates: Tensors that lie in more than one file, with those files.
        problems: What is wrong, all of it.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    shards: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    duplicates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_headers(files: Files) -> Headers:
    """Read config, index and every header.

    Args:
        files: The checkpoint's files.

    Returns:
        What they say, and what is wrong with them.
    """
    sizes = files.sizes
    problems: list[Problem] = []
    found = Headers(_object(files, CONFIG, problems, "config"), problems=problems)
    weight_map = _weight_map(files, problems)
    stray = sorted(name for name in sizes if fnmatch.fnmatch(name, SHARD_PATTERN))
    if weight_map:
        names = sorted(set(weight_map.values()))
    elif SINGLE in sizes:
        names = [SINGLE]
    else:
        names = stray
        if INDEX not in sizes:
            lacking = f"{len(stray)} shards, but no {INDEX}" if stray else f"no weights: neither {SINGLE} nor {INDEX}"
            problems.append(Problem(INDEX if stray else SINGLE, f"{files.label} holds {lacking}", "missing"))
    if weight_map and SINGLE in sizes and SINGLE not in names:
        message = f"{SINGLE} lies beside {INDEX}, which names other files: one of them is stale"
        problems.append(Problem(SINGLE, message, "stale"))
    files.prefetch(names)
    for name in names:
        if name not in sizes:
            problems.append(Problem(name, f"{INDEX} names the shard {name}, which is missing", "missing"))
        else:
            found.shards |= _header(files, name, problems)
    if weight_map:
        problems += [
            Problem(name, f"the shard {name} is not listed in {INDEX}", "index") for name in stray if name not in names
        ]
        problems += _disagreements(weight_map, found.shards)
    places: dict[str, list[str]] = defaultdict(list)
    for shard, header in found.shards.items():
        for name in header:
            places[name].append(shard)
    found.duplicates = {name: tuple(where) for name, where in places.items() if len(where) > 1}
    for name, where in places.items():
        listed = weight_map.get(name)
        entry = found.shards[listed if listed in where else where[0]][name]
        if entry.end <= sizes[entry.file.name]:
            found.tensors[name] = entry
    return found


def _header(files: Files, name: str, problems: list[Problem]) -> dict[str, dict[str, TensorEntry]]:
    """Return the entries under the file's name; a layout that is wrong leaves them usable."""
    file, size = Path(files.label) / name, files.sizes[name]
    try:
        entries, start = header_of(file, size, lambda begin, end: files.read(name, begin, end))
    except BrokenFileError as error:
        problems.append(Problem(name, str(error), error.fault))
        return {}
    except ProbeError as error:
        if type(error) is not ProbeError:  # the Hub went away: nothing is known of the file
            raise
        problems.append(Problem(name, str(error), "unreadable"))
        return {}
    try:
        check_layout(file, entries, start, size)
    except BrokenFileError as error:
        problems.append(Problem(name, str(error), error.fault))
    return {name: entries}


def _object(files: Files, name: str, problems: list[Problem], fault: str) -> dict[str, Any]:
    if name not in files.sizes:
        problems.append(Problem(name, f"{files.label} has no {name}", "missing"))
        return {}
    raw = files.read(name, 0, files.sizes[name])
    if raw.startswith(_POINTER):
        message = f"{name} is a Git LFS pointer, not the file: fetch it with `git lfs pull`"
        problems.append(Problem(name, message, "impostor"))
        return {}
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        problems.append(Problem(name, f"{name} is not valid JSON: {error}", fault))
        return {}
    if not isinstance(content, dict):
        problems.append(Problem(name, f"{name} must hold a JSON object, not {type(content).__name__}", fault))
        return {}
    return content


def _weight_map(files: Files, problems: list[Problem]) -> dict[str, str]:
    if INDEX not in files.sizes:
        return {}
    before = len(problems)
    weight_map = _object(files, INDEX, problems, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if len(problems) == before:
            problems.append(Problem(INDEX, f"{INDEX} has no weight_map", "index"))
        return {}
    sane: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in {"", ".", ".."} or "/" in shard or "\\" in shard:
            problems.append(Problem(INDEX, f"{INDEX} maps {name!r} to {shard!r}, which is not a file name", "index"))
        else:
            sane[name] = shard
    return sane


def _disagreements(weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]]) -> list[Problem]:
    """Compare index and headers, both ways; one problem for each pair of files that disagree, with the first tensor."""
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard]:
            elsewhere = next((other for other in headers if name in headers[other]), "")
            moved[shard, elsewhere].append(name)
    problems = []
    for (shard, elsewhere), names in moved.items():
        where = f"it lies in {elsewhere}" if elsewhere else "no readable shard holds it"
        message = f"{INDEX} places {names[0]!r} in {shard}, but {where} ({len(names)} such tensors)"
        problems.append(Problem(shard, message, "index"))
    for shard, header in headers.items():
        stray = [name for name in header if name not in weight_map]
        if stray:
            message = f"{shard} holds {stray[0]!r}, which {INDEX} does not list ({len(stray)} such tensors)"
            problems.append(Problem(shard, message, "index"))
    return problems
