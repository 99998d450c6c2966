"""lm-eval's ``--log_samples`` files of two models, paired document by document."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ternary_probe.errors import ProbeError

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.:-]+)\.jsonl")
_MADE_BY = "write them with lm_eval --log_samples --output_path"


class SampleLogError(ProbeError):
    """Sample logs cannot be read or paired."""


class _Key(NamedTuple):
    document: str
    """``doc_hash``."""
    number: int
    """``doc_id``."""


@dataclass(frozen=True)
class _Row:
    prompt: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class PairedTask:
    """One task's documents, right or wrong with either model.

    Attributes:
        task: Its name.
        metric: What was scored.
        filter: lm-eval's filter, where a task has several the first logged.
        base: Whether the base is right, ``[documents]``.
        candidate: Whether the candidate is right, in the same order.
    """

    task: str
    metric: str
    filter: str
    base: NDArray[np.bool_]
    candidate: NDArray[np.bool_]


@dataclass(frozen=True)
class PairedLogs:
    """What two folders of logs have in common.

    Attributes:
        tasks: Paired tasks with a right-or-wrong metric, by name.
        undecidable: Tasks without one, with the reason.
        broken: Tasks in which the candidate's score is not a number, with the reason.
        unpaired: Tasks only one model was given, with the reason.
    """

    tasks: tuple[PairedTask, ...]
    undecidable: Mapping[str, str]
    broken: Mapping[str, str]
    unpaired: Mapping[str, str]


def read_sample_logs(base: Path, candidate: Path, metric: str = "") -> PairedLogs:
    """Read and pair the logs of two models.

    Documents are paired by content (``doc_hash``) and number (``doc_id``), never by position, and must have been asked
    with the same prompt.

    Args:
        base: Folder of the base's logs, searched with its sub-folders, or one file.
        candidate: The same of the candidate.
        metric: Metric to compare; empty for each task's first that is right or wrong.

    Returns:
        The pairs.

    Raises:
        SampleLogError: If a log cannot be read, or a task's documents or prompts are not the same on both sides.
    """
    ours, theirs = _find(base), _find(candidate)
    unpaired = dict.fromkeys(ours.keys() - theirs.keys(), f"only the base's logs ({base}) have it")
    unpaired |= dict.fromkeys(theirs.keys() - ours.keys(), f"only the candidate's logs ({candidate}) have it")
    tasks: list[PairedTask] = []
    undecidable: dict[str, str] = {}
    broken: dict[str, str] = {}
    for task in sorted(ours.keys() & theirs.keys()):
        kind, left = _read(ours[task])
        _, right = _read(theirs[task], kind)
        _require_pairs(task, left, right)
        keys = sorted(left)
        chosen = _metric(metric, left, right)
        if chosen is None:
            names = ", ".join(dict.fromkeys(name for row in left.values() for name in row.metrics))
            wanted = f"metric {metric!r}" if metric else "metric that is right or wrong"
            undecidable[task] = f"it has no {wanted} (it logs {names or 'none'})"
            continue
        scores = [_scores(side, keys, chosen) for side in (left, right)]
        if np.isnan(scores[0]).any():
            raise SampleLogError(f"task {task}: the base's {chosen} is NaN, so nothing can be compared: {ours[task]}")
        if np.isnan(scores[1]).any():
            count = int(np.isnan(scores[1]).sum())
            broken[task] = f"the candidate's {chosen} is NaN on {count} of {len(keys)} documents"
            continue
        tasks.append(PairedTask(task, chosen, kind, scores[0] == 1, scores[1] == 1))
    return PairedLogs(tuple(tasks), undecidable, broken, unpaired)


def _find(folder: Path) -> dict[str, Path]:
    """Return the newest log of each task."""
    if folder.is_file():
        match = _FILE.fullmatch(folder.name)
        return {match["task"] if match else folder.stem: folder}
    if not folder.is_dir():
        raise SampleLogError(f"there is no folder {folder} with sample logs: {_MADE_BY}")
    found: dict[str, tuple[str, Path]] = {}
    parents: set[Path] = set()
    for file in sorted(folder.rglob("samples_*.jsonl")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        parents.add(file.parent)
        if match["task"] not in found or match["date"] > found[match["task"]][0]:
            found[match["task"]] = (match["date"], file)
    if not found:
        raise SampleLogError(f"{folder} holds no samples_TASK_DATE.jsonl: {_MADE_BY}")
    if len(parents) > 1:
        names = ", ".join(sorted(str(parent.relative_to(folder)) for parent in parents)[:3])
        raise SampleLogError(f"{folder} holds logs of several models ({names}): name the folder of one")
    return {task: file for task, (_, file) in found.items()}


def _read(file: Path, kind: str | None = None) -> tuple[str, dict[_Key, _Row]]:
    """Return the filter and the rows of a file: those of ``kind``, or of the first filter met."""
    rows: dict[_Key, _Row] = {}
    for number, sample in _samples(file):
        own = str(sample.get("filter", "none"))
        kind = own if kind is None else kind
        if own != kind:
            continue
        document, doc_id, prompt = sample.get("doc_hash"), sample.get("doc_id"), sample.get("prompt_hash")
        if not isinstance(document, str) or not isinstance(doc_id, int) or not isinstance(prompt, str):
            raise SampleLogError(
                f"line {number} of {file} has no doc_hash, doc_id and prompt_hash to pair it by: {_MADE_BY}, of a present "
                "lm-eval"
            )
        key = _Key(document, doc_id)
        if key in rows:
            raise SampleLogError(f"line {number} of {file} repeats document {doc_id}: give the log of one run")
        names = sample.get("metrics", [])
        rows[key] = _Row(prompt, {name: sample.get(name) for name in names if isinstance(name, str)})
    if not rows:
        wanted = f" of filter {kind!r}" if kind is not None else ""
        raise SampleLogError(f"{file} has no sample{wanted}: {_MADE_BY}")
    return str(kind), rows


def _samples(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SampleLogError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise SampleLogError(f"line {number} of {file} is not JSON, the file may be cut short: {error}") from error
        if not isinstance(sample, dict):
            raise SampleLogError(f"line {number} of {file} is no sample: {_MADE_BY}")
        yield number, sample


def _require_pairs(task: str, left: Mapping[_Key, _Row], right: Mapping[_Key, _Row]) -> None:
    if left.keys() != right.keys():
        common = len(left.keys() & right.keys())
        raise SampleLogError(
            f"task {task}: base and candidate share {common} documents of {len(left)} and {len(right)}: run both on the "
            "same documents (the same --limit and data)"
        )
    for key, row in left.items():
        if row.prompt != right[key].prompt:
            raise SampleLogError(
                f"task {task}: document {key.number} was asked with another prompt: run both with the same number of shots, "
                "seed and chat template"
            )


def _metric(wanted: str, left: Mapping[_Key, _Row], right: Mapping[_Key, _Row]) -> str | None:
    """Return the metric to compare: the one wanted, or the first that is 0 or 1 on every document of both."""
    first = next(iter(left.values()))
    names = [wanted] if wanted else list(first.metrics)
    return next(
        (name for name in names if all(_binary(row, name) for side in (left, right) for row in side.values())), None
    )


def _binary(row: _Row, name: str) -> bool:
    value = row.metrics.get(name)
    return isinstance(value, int | float) and (value in {0, 1} or math.isnan(value))


def _scores(rows: Mapping[_Key, _Row], keys: list[_Key], metric: str) -> NDArray[np.float64]:
    return np.array([float(rows[key].metrics[metric]) for key in keys])
