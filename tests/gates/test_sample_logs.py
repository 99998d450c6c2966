"""lm-eval's sample logs: found, paired by document, and refused where they are not the same questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ternary_probe.errors import ProbeError
from ternary_probe.gates._sample_logs import read_sample_logs

DATE = "2026-05-18T10-20-30.123456"


def sample(number: int, *, right: float, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "doc_id": number,
        "doc": {"question": f"q{number}"},
        "target": "a",
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"doc{number}",
        "prompt_hash": f"prompt{number}",
        "target_hash": "t",
        "acc": right,
    }
    return found | changes


def write(folder: Path, task: str, samples: list[dict[str, Any]], *, date: str = DATE, model: str = "model") -> Path:
    file = folder / model / f"samples_{task}_{date}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in samples), encoding="utf-8")
    return file


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    base, candidate = tmp_path / "base", tmp_path / "candidate"
    write(base, "arc_easy", [sample(i, right=float(i % 2)) for i in range(6)])
    write(candidate, "arc_easy", [sample(i, right=float(i < 2)) for i in reversed(range(6))])
    return base, candidate


def test_documents_are_paired_by_content_whatever_their_order(folders) -> None:
    [task] = read_sample_logs(*folders).tasks

    assert (task.task, task.metric, task.filter) == ("arc_easy", "acc", "none")
    np.testing.assert_array_equal(task.base, [False, True, False, True, False, True])
    np.testing.assert_array_equal(task.candidate, [True, True, False, False, False, False])


def test_files_as_lm_eval_itself_writes_them_are_read(tmp_path: Path) -> None:
    from lm_eval.loggers import EvaluationTracker

    for name, wrong in (("base", 3), ("candidate", 5)):
        tracker = EvaluationTracker(output_path=str(tmp_path / name))
        tracker.general_config_tracker.model_name_sanitized = "org__model"
        tracker.date_id = DATE
        samples = [
            sample(
                i,
                right=float(i >= wrong),
                arguments=[("prompt", " a")],
                resps=[[(-1.0, True)]],
                filtered_resps=[(-1.0,)],
            )
            for i in range(10)
        ]
        tracker.save_results_samples("mmlu_abstract_algebra", samples)

    [task] = read_sample_logs(tmp_path / "base", tmp_path / "candidate").tasks

    assert task.task == "mmlu_abstract_algebra"
    assert (task.base.sum(), task.candidate.sum()) == (7, 5)


def test_the_newest_of_several_logs_counts(folders) -> None:
    base, candidate = folders
    write(candidate, "arc_easy", [sample(i, right=1.0) for i in range(6)], date="2026-05-19T00-00-00.000001")

    [task] = read_sample_logs(base, candidate).tasks

    assert task.candidate.all()


def test_a_single_file_can_be_given(folders) -> None:
    files = [next(folder.rglob("*.jsonl")) for folder in folders]

    assert [task.task for task in read_sample_logs(*files).tasks] == ["arc_easy"]


def test_of_several_filters_the_first_logged_is_compared_on_both_sides(tmp_path: Path) -> None:
    def both(strict: float, flexible: float) -> list[dict[str, Any]]:
        kinds = {"strict-match": strict, "flexible-extract": flexible}
        return [sample(i, right=value, filter=kind) for kind, value in kinds.items() for i in range(3)]

    write(tmp_path / "base", "gsm8k", both(1.0, 1.0))
    write(tmp_path / "candidate", "gsm8k", both(0.0, 1.0))

    [task] = read_sample_logs(tmp_path / "base", tmp_path / "candidate").tasks

    assert task.filter == "strict-match"
    assert task.base.all()
    assert not task.candidate.any()


def test_the_metric_can_be_chosen(tmp_path: Path) -> None:
    for name in ("base", "candidate"):
        rows = [sample(i, right=1.0, metrics=["acc", "acc_norm"], acc_norm=0.0) for i in range(3)]
        write(tmp_path / name, "arc", rows)
    folders = tmp_path / "base", tmp_path / "candidate"

    assert read_sample_logs(*folders).tasks[0].metric == "acc"
    assert not read_sample_logs(*folders, "acc_norm").tasks[0].base.any()
    assert "no metric 'f1' (it logs acc, acc_norm)" in read_sample_logs(*folders, "f1").undecidable["arc"]


def test_a_task_without_right_or_wrong_is_named_not_guessed(tmp_path: Path) -> None:
    for name in ("base", "candidate"):
        write(
            tmp_path / name, "wikitext", [sample(0, right=1.0, metrics=["word_perplexity"], word_perplexity=[-3.2, 7])]
        )

    found = read_sample_logs(tmp_path / "base", tmp_path / "candidate")

    assert not found.tasks
    assert "right or wrong (it logs word_perplexity)" in found.undecidable["wikitext"]


def test_a_task_of_one_side_only_is_named(folders) -> None:
    base, candidate = folders
    write(base, "piqa", [sample(0, right=1.0)])

    assert "only the base's logs" in read_sample_logs(base, candidate).unpaired["piqa"]


def test_nan_of_the_candidate_is_its_fault_and_nan_of_the_base_an_error(tmp_path: Path, folders) -> None:
    base, _ = folders
    broken = tmp_path / "broken"
    write(broken, "arc_easy", [sample(i, right=float("nan") if i == 4 else 1.0) for i in range(6)])

    assert "the candidate's acc is NaN on 1 of 6" in read_sample_logs(base, broken).broken["arc_easy"]
    with pytest.raises(ProbeError, match="the base's acc is NaN"):
        read_sample_logs(broken, base)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param([sample(i, right=1.0) for i in range(4)], "share 4 documents of 6 and 4", id="fewer documents"),
        pytest.param([sample(i + 1, right=1.0) for i in range(6)], "share 5 documents", id="other documents"),
        pytest.param([sample(i, right=1.0, prompt_hash="x") for i in range(6)], "another prompt", id="other prompt"),
        pytest.param([sample(0, right=1.0)] * 2, "repeats document 0", id="repeated"),
        pytest.param([{"doc_id": 0, "acc": 1.0}], "no doc_hash", id="no hash"),
        pytest.param([], "has no sample", id="empty"),
    ],
)
def test_what_is_not_the_same_questions_is_refused(folders, tmp_path: Path, rows, words: str) -> None:
    write(tmp_path / "other", "arc_easy", rows)

    with pytest.raises(ProbeError, match=words):
        read_sample_logs(folders[0], tmp_path / "other")


def test_a_log_cut_short_is_named_with_its_line(folders) -> None:
    base, candidate = folders
    file = next(candidate.rglob("*.jsonl"))
    file.write_text(file.read_text()[:-20])

    with pytest.raises(ProbeError, match=r"line 6 of .*jsonl is not JSON"):
        read_sample_logs(base, candidate)


def test_missing_empty_and_ambiguous_folders_are_named(folders, tmp_path: Path) -> None:
    base, _ = folders
    (tmp_path / "empty").mkdir()
    write(tmp_path / "two", "arc_easy", [sample(0, right=1.0)], model="a")
    write(tmp_path / "two", "arc_easy", [sample(0, right=1.0)], model="b")

    for folder, words in (
        ("absent", "there is no folder"),
        ("empty", "--log_samples"),
        ("two", r"several models \(a, b\)"),
    ):
        with pytest.raises(ProbeError, match=words):
            read_sample_logs(base, tmp_path / folder)
