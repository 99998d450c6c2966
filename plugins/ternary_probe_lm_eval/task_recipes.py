"""Tasks whose requests the plugin answers itself: they ask for a measurement, not for the likelihood of a text.

lm-eval hands the requests of all tasks to the model in one list. The model gives those of a task named here to the task's
handler, so that one plain run on one loaded model can score arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ternary_probe_lm_eval.model import TernaryProbeLM

Handler = Callable[["TernaryProbeLM", "list[Instance]"], list[float]]
"""Answers a task's requests, in order."""

_handlers: dict[str, Handler] = {}
_notes: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def handle_with(task_name: str, handler: Handler) -> None:
    """Let a handler answer a task's requests. A task does this for its own name when it is built.

    Args:
        task_name: The task's name.
        handler: What answers.
    """
    _handlers[task_name] = handler


def handler_for(task_name: str | None) -> Handler | None:
    """Return what answers a task's requests.

    Args:
        task_name: The task's name.

    Returns:
        The handler, or None where the requests are texts to be scored.
    """
    return _handlers.get(task_name) if task_name is not None else None


def remember(lm: TernaryProbeLM, task_name: str, facts: Mapping[str, Any]) -> None:
    """Keep what a reader of a task's figures must know, such as the protocol, for the results file.

    Args:
        lm: The model that scored the task.
        task_name: The task.
        facts: JSON-able data.
    """
    _notes.setdefault(lm, {})[task_name] = dict(facts)


def facts_of(lm: TernaryProbeLM) -> dict[str, Any]:
    """Return what was kept about the tasks a model scored.

    Args:
        lm: The model.

    Returns:
        Facts by task name; they belong into lm-eval's ``results["config"]``.
    """
    return dict(_notes.get(lm, {}))
