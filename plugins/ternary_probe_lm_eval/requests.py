"""Requests of many tasks: who answers them, and what their tokens ask of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance

from ternary_probe.errors import ProbeError
from ternary_probe_lm_eval.scoring import Span, SpanScores
from ternary_probe_lm_eval.task_recipes import Handler, handler_for


class RequestGroup(NamedTuple):
    """Requests that are answered together."""

    handler: Handler | None
    """Answers them, or None for the plain way."""
    places: list[int]
    requests: list[Instance]


def group_requests(requests: Sequence[Instance]) -> list[RequestGroup]:
    """Sort requests by who answers them.

    Args:
        requests: Requests of one type, of any tasks.

    Returns:
        The groups, in the order of their first request.
    """
    groups: dict[Handler | None, RequestGroup] = {}
    handlers: dict[str | None, Handler | None] = {}
    for place, request in enumerate(requests):
        name = request.task_name
        if name not in handlers:
            handlers[name] = handler_for(name)
        group = groups.setdefault(handlers[name], RequestGroup(handlers[name], [], []))
        group.places.append(place)
        group.requests.append(request)
    return list(groups.values())


class Tokenized(NamedTuple):
    """A request as lm-eval tokenizes it."""

    name: tuple[str, str] | None
    """Context and continuation as text."""
    context: list[int]
    continuation: list[int]


class Answers(NamedTuple):
    """Continuations of one input, which goes through the model once."""

    span: Span
    owners: list[int]
    """The requests, by index."""


def group_answers(requests: Sequence[Tokenized], max_length: int) -> list[Answers]:
    """Gather requests that share their input: all but the last token of context and continuation.

    Args:
        requests: Tokenized requests.
        max_length: Most tokens of an input; longer ones lose their beginning.

    Returns:
        One entry each distinct input.

    Raises:
        ProbeError: If there is no context, nothing to score, or more to score than fits.
    """
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (name, context, continuation) in enumerate(requests):
        shown = repr(name[1] if name else continuation)[:60]
        if not context or not continuation:
            what = "context" if not context else "token of its own behind its context"
            raise ProbeError(f"the answer {shown} has no {what}, so there is nothing to score")
        if len(continuation) > max_length:
            raise ProbeError(
                f"the answer {shown} has {len(continuation)} tokens, and max_length is {max_length}: raise it"
            )
        whole = (context + continuation)[-(max_length + 1) :]
        inputs.setdefault(tuple(whole[:-1]), []).append(index)
    return [Answers(_span(ids, [requests[i].continuation for i in owners]), owners) for ids, owners in inputs.items()]


def _span(ids: tuple[int, ...], continuations: list[list[int]]) -> Span:
    """Ask about the part that continuations of one input share, then about the last token of each."""
    last = len(ids) - 1
    first = last - max(map(len, continuations)) + 1
    rows = torch.cat([torch.arange(first, last), torch.full((len(continuations),), last)])
    tokens = torch.tensor([*ids[first + 1 :], *(tokens[-1] for tokens in continuations)])
    return Span(torch.tensor(ids), first, rows, tokens)


def read_answers(answers: Answers, scores: SpanScores, requests: Sequence[Tokenized]) -> list[tuple[float, bool]]:
    """Return log-likelihood and greediness of each continuation of one input.

    Args:
        answers: The continuations.
        scores: The answers about their span, with every most likely token.
        requests: All requests.

    Returns:
        One pair each owner, in order.
    """
    body = len(scores.log_likelihoods) - len(answers.owners)
    found = []
    for place, owner in enumerate(answers.owners):
        continuation = requests[owner].continuation
        shared = scores.log_likelihoods[body - len(continuation) + 1 : body]
        total = float(shared.sum() + scores.log_likelihoods[body + place])
        found.append((total, scores.greedy[-len(continuation) :].tolist() == continuation))
    return found


def by_task(requests: Sequence[Instance], values: Sequence[Any]) -> dict[str, list[Any]]:
    """Sort values by the task of their request.

    Args:
        requests: The requests.
        values: One each.

    Returns:
        Task name to its values, in order.
    """
    found: dict[str, list[Any]] = {}
    for request, value in zip(requests, values, strict=True):
        found.setdefault(str(request.task_name), []).append(value)
    return found
