"""Requests, in-memory tasks and evaluations for the tests of the lm-eval plugin: no file, no network, no defaults."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ternary_probe.data import sample_text

TEXT = sample_text()
DOCUMENTS = (TEXT[:900], "", TEXT[3000:3040], TEXT[5000:5600], "x")
QUESTIONS = tuple(
    {
        "question": TEXT[i * 90 : i * 90 + 60],
        "choices": [" the river", " a mill", " the mill wheel", " nine"],
        "answer": i % 4,
    }
    for i in range(14)
)


def rolling(texts: Any = DOCUMENTS, task: str = "texts") -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (text,), 0, metadata=(task, i, 1)) for i, text in enumerate(texts)]


def choices(questions: Any = QUESTIONS, task: str = "questions") -> list[Instance]:
    return [
        Instance("loglikelihood", {}, (question["question"], choice), j, metadata=(task, i, 1))
        for i, question in enumerate(questions)
        for j, choice in enumerate(question["choices"])
    ]


def text_task(texts: Any = DOCUMENTS, name: str = "texts") -> dict[str, Any]:
    """lm-eval's own rolling task over some texts."""
    rows = [{"text": text} for text in texts]
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        "metadata": {"version": 0},
    }


def choice_task(questions: Any = QUESTIONS, name: str = "questions") -> dict[str, Any]:
    """lm-eval's own multiple-choice task over some questions."""
    rows = list(questions)
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 0},
    }


def evaluate(lm: Any, *tasks: dict[str, Any], **options: Any) -> dict[str, Any]:
    return simple_evaluate(
        lm, tasks=list(tasks), task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, **options
    )


def harness(model: Any, tokenizer: Any, **options: Any) -> HFLM:
    """lm-eval's own model, with the float32 softmax unless told otherwise."""
    return HFLM(pretrained=model, tokenizer=tokenizer, **{"softmax_dtype": "float32", **options})


@torch.no_grad()
def dense_nll(model: Any, inputs: list[int], targets: list[int]) -> float:
    """Sum of the NLL of the last ``len(targets)`` positions, from whole logits, everything after them in float64."""
    logits = model(torch.tensor([inputs])).logits[0].double()
    logits = logits[-len(targets) :]
    return float(-torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets].sum())
