"""Many perturbations over one loaded model: every task under every recipe, compared pairwise with the clean model."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel
from ternary_probe.perturb import NotRestoredError, Perturbation, sha256_weights
from ternary_probe.records import Environment, Status, Timing
from ternary_probe.studies.leverage import model_info
from ternary_probe.studies.store import CellStore
from ternary_probe.studies.summary import finite
from ternary_probe_lm_eval.arguments import read_recipe
from ternary_probe_lm_eval.console import TASKS
from ternary_probe_lm_eval.model import TernaryProbeLM, as_lm
from ternary_probe_lm_eval.observed import Observed, compare, observe
from ternary_probe_lm_eval.paired import DRAWS
from ternary_probe_lm_eval.records import RecipeResult, SweepRecord, SweepTask, TaskMetric, TaskResult
from ternary_probe_lm_eval.task_recipes import facts_of

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with (evaluations done, evaluations in all, what runs now); the weights are clean at that moment."""
TaskSpec: TypeAlias = str | Path | Mapping[str, Any] | Task
RecipeSpec: TypeAlias = str | Mapping[str, Any] | Perturbation

_SEED = 1234  # lm-eval's own default
CLEAN = "clean"


@dataclass(frozen=True)
class SweepOptions:
    """How tasks are run and compared.

    Attributes:
        limit: Documents a task, or a share of them below 1; all if None.
        num_fewshot: Examples in front of each document; the task's own number if None.
        metadata: Options of tasks, as ``--metadata`` gives them.
        include_path: Folder, or folders, with further task YAMLs.
        harness: Further arguments of ``lm_eval.evaluate``, such as ``apply_chat_template``.
        confidence: Two-sided coverage of every interval.
        draws: Bootstrap samples.
    """

    limit: float | None = None
    num_fewshot: int | None = None
    metadata: Mapping[str, Any] | None = None
    include_path: str | Path | Sequence[str | Path] = ()
    harness: Mapping[str, Any] | None = None
    confidence: float = 0.95
    draws: int = DRAWS

    def __post_init__(self) -> None:
        """Refuse options that could only give a plausible wrong number."""
        if self.limit is not None and not self.limit > 0:
            raise ProbeError(f"limit={self.limit} leaves no document: give a number above 0, or None for all")
        if not 0.5 < self.confidence < 1:
            raise ProbeError(f"confidence={self.confidence:g} is not in (0.5, 1)")
        if self.draws < 100:
            raise ProbeError(f"{self.draws} bootstrap samples give no interval: use 1000 or more")


class Scored(BaseModel):
    """A task on the model as it was."""

    model_config = ConfigDict(frozen=True)

    result: TaskResult
    observed: tuple[Observed, ...] = ()


def sweep(
    model: str | PreTrainedModel | LoadedModel | TernaryProbeLM,
    tasks: Sequence[TaskSpec],
    recipes: Sequence[RecipeSpec],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    options: SweepOptions | None = None,
    out: Path | None = None,
    progress: Progress = lambda done, total, label: None,
    **model_options: Any,
) -> SweepRecord:
    """Run every task on the clean model and under every recipe; model and tasks are loaded once.

    Args:
        model: A MODEL of ours, a model in memory (with ``tokenizer``), or one already wrapped.
        tasks: Names, YAML paths, configs or task objects of lm-eval.
        recipes: Recipes, their strings or their JSON.
        tokenizer: Of a model in memory.
        options: How tasks are run and compared.
        out: Folder for ``record.json`` and finished evaluations, to continue after an interruption.
        progress: Called before each evaluation.
        **model_options: Of `TernaryProbeLM`, such as ``dtype``, ``calibration``, ``window``, ``batch_size``.

    Returns:
        The record. A recipe that fails, or fails in one task, says why and costs no other figure. Every weight is bit for
        bit as before.

    Raises:
        ProbeError: If model, tasks, recipes or options do not fit, before anything is run.
        NotRestoredError: If a weight differs after the sweep.
    """
    options = options or SweepOptions()
    wanted = _recipes(recipes)
    with _generators_kept():
        lm = _wrapped(model, tokenizer, model_options)
        return _sweep(lm, tasks, wanted, options, out, progress)


def _sweep(
    lm: TernaryProbeLM,
    tasks: Sequence[TaskSpec],
    wanted: Sequence[Perturbation],
    options: SweepOptions,
    out: Path | None,
    progress: Progress,
) -> SweepRecord:
    started = time.perf_counter()
    if lm.recipe is not None:
        raise ProbeError(f"a sweep perturbs the model itself: leave perturb={lm.recipe} out")
    if lm.world_size > 1:
        raise ProbeError("a sweep runs in one process: start it without accelerate launch or torchrun")
    weights = sha256_weights(lm.loaded.model)
    run = _Sweep(lm, _load_tasks(tasks, options), options, progress)
    with CellStore(out, run.fingerprint(weights) if out is not None else {}) as store:
        clean, results = run.run(store, wanted)
    after = sha256_weights(lm.loaded.model)
    if after != weights:
        raise NotRestoredError(
            f"the weights differ after the sweep (SHA-256 {weights[:12]} before, {after[:12]} after)"
        )
    failed = [f"{r.recipe}: {r.reason}" for r in results if r.status != "ok"]
    info = lm.get_model_info()["ternary_probe"]
    record = SweepRecord(
        model=model_info(lm.loaded, weights),
        protocol=None,
        environment=Environment.here(torch.get_num_threads()),
        timing=Timing(seconds=time.perf_counter() - started, evaluations=run.evaluations),
        status="failed" if failed else "ok",
        notes=(*info["notes"], *failed),
        scoring=info["protocol"],
        tasks=run.describe_tasks(clean),
        clean=tuple(one.result for one in clean.values()),
        clean_warnings=run.clean_warnings,
        recipes=tuple(results),
        weights_after=after,
        limit=options.limit,
        confidence=options.confidence,
        draws=options.draws,
    )
    if out is not None:
        record.save(out / "record.json")
    return record


def _recipes(recipes: Sequence[RecipeSpec]) -> list[Perturbation]:
    wanted = [read_recipe(recipe) for recipe in recipes]
    if not wanted:
        raise ProbeError("a sweep needs at least one recipe, such as sign_flip:rate=0.005")
    names = [str(recipe) for recipe in wanted]
    for name in names:
        if names.count(name) > 1:
            raise ProbeError(f"recipe {name} is given twice: give each once, or another seed")
    return wanted


def _wrapped(
    model: str | PreTrainedModel | LoadedModel | TernaryProbeLM,
    tokenizer: PreTrainedTokenizerBase | None,
    options: Mapping[str, Any],
) -> TernaryProbeLM:
    if isinstance(model, TernaryProbeLM):
        if options or tokenizer is not None:
            given = next(iter(options), "tokenizer")
            raise ProbeError(f"{given}= cannot change a model that is wrapped already: give it when wrapping")
        return model
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise ProbeError("a model in memory needs its tokenizer: pass tokenizer=")
        return as_lm(model, tokenizer, **options)
    return TernaryProbeLM(model, **options)


def _load_tasks(specs: Sequence[TaskSpec], options: SweepOptions) -> dict[str, Task]:
    """Build every task once; lm-eval's own index, which takes seconds, only where a name is in it."""
    given = options.include_path
    paths = [str(TASKS), *map(str, [given] if isinstance(given, str | Path) else given)]
    for path in paths:
        if not Path(path).is_dir():
            raise ProbeError(f"include_path {path} is no folder: give a list of folders with task YAMLs")
    metadata = dict(options.metadata or {})
    own = TaskManager(include_defaults=False, include_path=paths, metadata=metadata)
    everything: TaskManager | None = None
    tasks: dict[str, Task] = {}
    for spec in specs:
        item = str(spec) if isinstance(spec, Path) else dict(spec) if isinstance(spec, Mapping) else spec
        manager = own
        if isinstance(item, str) and not item.endswith(".yaml") and not own.match_tasks([item]):
            everything = everything or TaskManager(include_path=paths, metadata=metadata)
            manager = everything
            if not manager.match_tasks([item]):
                raise ProbeError(
                    f"lm-eval has no task {item!r}: `lm_eval ls tasks` lists them, or give the path of a YAML"
                )
        named = manager.match_tasks([item]) if isinstance(item, str) and not item.endswith(".yaml") else [item]
        try:
            found = manager.load(named)["tasks"]
        except (KeyError, OSError) as error:
            raise ProbeError(f"task {spec} cannot be built: {' '.join(str(error).split())}") from error
        for name, task in found.items():
            if name in tasks:
                raise ProbeError(f"task {name} is given twice")
            tasks[name] = task
    if not tasks:
        raise ProbeError("a sweep needs at least one task")
    for task in tasks.values():
        _set_shots(task, options.num_fewshot)
    return tasks


def _set_shots(task: Task, num_fewshot: int | None) -> None:
    """Do what lm-eval's own command does: a task's explicit 0 stands."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


class _Sweep:
    """One sweep on one model: what stays the same from recipe to recipe."""

    def __init__(
        self, lm: TernaryProbeLM, tasks: Mapping[str, Task], options: SweepOptions, progress: Progress
    ) -> None:
        self.lm, self.tasks, self.options, self.progress = lm, tasks, options, progress
        self.evaluations = 0
        self.clean_warnings: tuple[str, ...] = ()

    def fingerprint(self, weights: str) -> dict[str, Any]:
        """Everything a finished evaluation depends on."""
        o = self.options
        return {
            "weights": weights,
            "dtype": self.lm.loaded.source.dtype,
            "device": str(self.lm.device),
            "scoring": self.lm.get_model_info()["ternary_probe"]["protocol"],
            "calibration": self.lm.arguments.calibration,
            "tasks": {name: _digest(task) for name, task in self.tasks.items()},
            "options": [o.limit, o.num_fewshot, str(o.metadata), str(o.harness), o.confidence, o.draws],
            "versions": Environment.here().packages,
        }

    def run(self, store: CellStore, recipes: Sequence[Perturbation]) -> tuple[dict[str, Scored], list[RecipeResult]]:
        """Evaluate the clean model, then each recipe."""
        total = len(recipes) + 1
        self.progress(0, total, CLEAN)
        clean = self._clean(store)
        results: list[RecipeResult] = []
        broken = ""
        for done, recipe in enumerate(recipes, start=1):
            name = str(recipe)
            saved = store.get(name)
            if saved is not None:
                results.append(RecipeResult.model_validate(saved))
                continue
            if broken:
                results.append(RecipeResult(recipe=name, status="failed", reason=broken))
                continue
            self.progress(done, total, name)
            try:
                result = self._perturbed(recipe, clean)
            except NotRestoredError as error:
                result = RecipeResult(recipe=name, status="failed", reason=str(error))
                broken = f"not run, because the weights were not restored after {name}"
            except Exception as error:  # one recipe must not cost the others, whatever it raises
                log.warning("recipe %s failed: %s", name, error)
                result = RecipeResult(recipe=name, status="failed", reason=_reason(error))
            if result.status == "ok":
                store.put(name, result.model_dump(mode="json"))
            results.append(result)
        self.progress(total, total, "done")
        return clean, results

    def describe_tasks(self, clean: Mapping[str, Scored]) -> tuple[SweepTask, ...]:
        """Describe the tasks for the record."""
        facts = facts_of(self.lm)
        return tuple(
            SweepTask(
                task=name,
                version=str(task.VERSION),
                num_fewshot=int(task.get_config("num_fewshot") or 0),
                documents=clean[name].result.documents,
                facts=facts.get(name, {}),
            )
            for name, task in self.tasks.items()
        )

    def _clean(self, store: CellStore) -> dict[str, Scored]:
        saved = store.get(CLEAN)
        if saved is not None:
            self.clean_warnings = tuple(saved["warnings"])
            return {name: Scored.model_validate(one) for name, one in saved["tasks"].items()}
        self.evaluations += 1
        clean = {name: self._score(name) for name in self.tasks}
        broken = [f"{name}: {one.result.reason}" for name, one in clean.items() if one.result.status != "ok"]
        if len(broken) == len(clean):
            raise ProbeError(f"no task runs on the clean model: {'; '.join(broken)}")
        self.clean_warnings = self._warnings()
        if not broken:
            kept = {name: one.model_dump(mode="json") for name, one in clean.items()}
            store.put(CLEAN, {"tasks": kept, "warnings": self.clean_warnings})
        return clean

    def _perturbed(self, recipe: Perturbation, clean: Mapping[str, Scored]) -> RecipeResult:
        started = time.perf_counter()
        self.evaluations += 1
        with self.lm.perturbed(recipe) as done:
            scored = {name: self._score(name) for name in self.tasks}
            warnings = self._warnings()
        tasks = tuple(self._compared(name, clean[name], one) for name, one in scored.items())
        failed = [f"{one.task}: {one.reason}" for one in tasks if one.status == "failed"]
        status: Status = "failed" if failed else "ok"
        return RecipeResult(
            recipe=str(recipe),
            resolved=done.recipe.describe(),
            entries=done.entries,
            zeros=done.zeros,
            checksum_before=done.checksum_before,
            checksum_during=done.checksum_during,
            checksum_after=done.checksum_after,
            tasks=tasks,
            warnings=warnings,
            seconds=time.perf_counter() - started,
            status=status,
            reason="; ".join(failed),
        )

    def _compared(self, name: str, clean: Scored, scored: Scored) -> TaskResult:
        if scored.result.status != "ok":
            return scored.result
        if clean.result.status != "ok":
            reason = f"the clean model has no figures to compare with: {clean.result.reason}"
            return scored.result.model_copy(update={"status": "failed", "reason": reason})
        found = {(one.metric, one.filter): one for one in scored.observed}
        aggregations = self.tasks[name].aggregation()
        differences = tuple(
            compare(
                one,
                found.get((one.metric, one.filter)),
                aggregations.get(one.metric),
                confidence=self.options.confidence,
                draws=self.options.draws,
            )
            for one in clean.observed
            if one.documents
        )
        return scored.result.model_copy(update={"differences": differences})

    def _score(self, name: str) -> Scored:
        """Run one task on the model as it is. A task that fails says why."""
        task = self.tasks[name]
        try:
            _seed_all()
            task.set_fewshot_seed(seed=_SEED)  # the same examples every time, or nothing would be paired
            results = evaluate(
                self.lm,
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                limit=self.options.limit,
                bootstrap_iters=0,
                log_samples=True,
                **(self.options.harness or {}),
            )
        except Exception as error:  # one task must not cost the others, whatever it raises
            log.warning("task %s failed: %s", name, error)
            return Scored(result=TaskResult(task=name, status="failed", reason=_reason(error)))
        found = results["results"][name]
        metrics = [
            TaskMetric(metric=metric, filter=filter_name, value=_number(value))
            for key, value in found.items()
            for metric, comma, filter_name in (key.partition(","),)
            if comma and not metric.endswith("_stderr")
        ]
        observed = observe(results["samples"][name], task.aggregation())
        documents = int(results["n-samples"][name]["effective"])
        return Scored(result=TaskResult(task=name, documents=documents, metrics=tuple(metrics)), observed=observed)

    def _warnings(self) -> tuple[str, ...]:
        return tuple(self.lm.get_model_info()["ternary_probe"]["warnings"])


def _number(value: Any) -> float | None:
    return finite(float(value)) if isinstance(value, int | float | np.number) else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _digest(task: Task) -> str:
    """Return a digest of a task's configuration and documents."""
    digest = hashlib.sha256(json.dumps(dict(task.dump_config()), sort_keys=True, default=str).encode())
    for doc in task.eval_docs:
        digest.update(json.dumps(doc, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _seed_all() -> None:
    """Give tasks and generations that draw from the global generators the same numbers for every recipe."""
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002 - these are what they draw from
    torch.manual_seed(_SEED)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Give the caller's global generators back as they were; lm-eval draws from them even to name a task."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(cast("Any", legacy))  # noqa: NPY002
