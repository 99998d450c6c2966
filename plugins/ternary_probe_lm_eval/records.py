"""The record of a sweep: every task under every recipe, and the paired differences to the clean model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue

from ternary_probe.errors import ProbeError
from ternary_probe.records import Finite, Part, Record, Status


class AnswersChanged(Part):
    """McNemar's exact test of an accuracy."""

    lost: int = Field(description="documents right in the clean model and wrong under the recipe")
    gained: int = Field(description="documents wrong in the clean model and right under the recipe")
    p_value: Finite = Field(description="exact, two-sided")


class TaskMetric(Part):
    """A metric of a task, as lm-eval aggregates it."""

    metric: str
    filter: str
    value: Finite | None = Field(description="null where it is not finite")


class MetricDifference(Part):
    """A metric under the recipe minus the same metric of the clean model, on the same documents."""

    metric: str
    filter: str
    difference: Finite | None
    ci_low: Finite | None = Field(description="percentile bootstrap over paired documents")
    ci_high: Finite | None
    resampled: Literal["documents", "windows"] = Field("documents", description="what the bootstrap resamples")
    pairs: int = Field(description="number of documents, or windows")
    answers: AnswersChanged | None = Field(None, description="for metrics that are 0 or 1 in each document")
    status: Status = "ok"
    reason: str = ""


class TaskResult(Part):
    """One task under one recipe, or on the clean model."""

    task: str
    documents: int = 0
    metrics: tuple[TaskMetric, ...] = ()
    differences: tuple[MetricDifference, ...] = Field((), description="to the clean model; none for itself")
    status: Status = "ok"
    reason: str = ""


class RecipeResult(Part):
    """All tasks under one recipe, with proof that it took effect and was undone."""

    recipe: str
    resolved: dict[str, JsonValue] = Field(default_factory=dict, description="the recipe as data; replays exactly")
    entries: int = Field(0, description="entries perturbed")
    zeros: int = Field(0, description="of these, entries whose value did not move")
    checksum_before: str = ""
    checksum_during: str = ""
    checksum_after: str = ""
    tasks: tuple[TaskResult, ...] = ()
    warnings: tuple[str, ...] = Field((), description="signs of a broken model")
    seconds: Finite = 0.0
    status: Status = "ok"
    reason: str = ""


class SweepTask(Part):
    """A task of the sweep."""

    task: str
    version: str
    num_fewshot: int
    documents: int
    facts: dict[str, JsonValue] = Field(default_factory=dict, description="of the plugin's own tasks: the protocol")


class SweepRecord(Record):
    """Result of `ternary_probe_lm_eval.sweep`."""

    command: Literal["lm_eval_sweep"] = "lm_eval_sweep"
    scoring: dict[str, JsonValue] = Field(description="how documents and answers are scored")
    tasks: tuple[SweepTask, ...]
    clean: tuple[TaskResult, ...]
    clean_warnings: tuple[str, ...] = ()
    recipes: tuple[RecipeResult, ...]
    weights_after: str = Field(description="SHA-256 of the weights after the sweep: that of model.weights_sha256")
    limit: Finite | None = None
    confidence: Finite
    draws: int = Field(description="bootstrap samples")

    def difference(self, recipe: str, task: str, metric: str) -> MetricDifference:
        """Look a difference up.

        Args:
            recipe: The recipe, as `RecipeResult.recipe` has it.
            task: The task.
            metric: The metric.

        Returns:
            The first one of that name.

        Raises:
            ProbeError: If there is none.
        """
        for result in self.recipes:
            for one in result.tasks if result.recipe == recipe else ():
                for found in one.differences if one.task == task else ():
                    if found.metric == metric:
                        return found
        raise ProbeError(f"the sweep has no difference of {metric} in task {task} under recipe {recipe}")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record back.

        Args:
            path: A file written by `save`.

        Returns:
            The record.

        Raises:
            ProbeError: If it cannot be read or is no record of a sweep.
        """
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ProbeError(f"{path} is not a readable record of a sweep: {error}") from error
