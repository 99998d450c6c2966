"""Signs that a model is broken though its scores look plausible: NaN, one answer for everything, always the same choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ternary_probe_lm_eval.document import DocumentLogLikelihood

_FEW_POSITIONS = 16
_FEW_DOCUMENTS = 12


def constant_argmax(greedy: Sequence[Tensor], log_likelihoods: Sequence[Tensor]) -> int | None:
    """Return the token a model predicts everywhere, if it does.

    Args:
        greedy: Most likely tokens at the scored positions, in pieces.
        log_likelihoods: Scores at these positions; where one piece is not finite it is left out.

    Returns:
        The token, or None if predictions differ, or are too few to tell.
    """
    kept = [g for g, scores in zip(greedy, log_likelihoods, strict=True) if not bool(scores.isnan().any())]
    every = torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)
    if every.numel() < _FEW_POSITIONS or bool((every != every[0]).any()):
        return None
    return int(every[0])


def describe_not_finite(task: str, values: Sequence[float]) -> list[str]:
    """Say how many log-likelihoods of a task are no finite numbers.

    Args:
        task: The task.
        values: Its log-likelihoods.

    Returns:
        Warnings, if any.
    """
    nan = sum(math.isnan(value) for value in values)
    infinite = sum(math.isinf(value) for value in values)
    found = []
    if nan:
        found.append(
            f"{task}: {nan} of {len(values)} log-likelihoods are NaN; an accuracy made from them is that of the first answer"
        )
    if infinite:
        found.append(f"{task}: {infinite} of {len(values)} log-likelihoods are infinite")
    return found


def describe_choices(task: str, documents: Sequence[Any], values: Sequence[float]) -> list[str]:
    """Say that the same position wins in every document of a multiple-choice task.

    Args:
        task: The task.
        documents: Document of each request; requests of one document are in the order of its answers.
        values: Their log-likelihoods.

    Returns:
        Warnings, if any.
    """
    answers: dict[Any, list[float]] = defaultdict(list)
    for document, value in zip(documents, values, strict=True):
        if document is not None:
            answers[document].append(value)
    choices = [scores for scores in answers.values() if len(scores) > 1]
    if len(choices) < _FEW_DOCUMENTS or any(math.isnan(value) for scores in choices for value in scores):
        return []
    if all(len(set(scores)) == 1 for scores in choices):
        return [f"{task}: all answers of each of {len(choices)} documents are equally likely; the first one is taken"]
    best = {scores.index(max(scores)) for scores in choices}
    if len(best) > 1:
        return []
    same = f"{task}: answer number {best.pop() + 1} is the most likely in all {len(choices)} documents"
    return [f"{same}: an accuracy of it says where the right answers stand, not what the model knows"]


def describe_perplexity(task: str, documents: Sequence[DocumentLogLikelihood]) -> list[str]:
    """Say the NLL of a task whose perplexity a word overflows.

    Args:
        task: The task.
        documents: Its documents.

    Returns:
        Warnings, if any.
    """
    total, words = math.fsum(d.nll for d in documents), sum(d.words for d in documents)
    tokens = sum(d.tokens for d in documents)
    if not words or not math.isfinite(total) or total / words <= 709:
        return []
    size = f"{tokens} tokens and {words} words"
    return [f"{task}: word perplexity overflows and is given as infinite; NLL {total:.6g} nat over {size}"]
