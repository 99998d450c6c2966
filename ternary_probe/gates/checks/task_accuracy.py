"""Check ``task-accuracy``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._mcnemar import JointDecision, TaskDecision, count_pairs, decide_tasks
from ternary_probe.gates._paired_finding import fail_rate, finite
from ternary_probe.gates._sample_logs import read_sample_logs
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence

_NAME = "task-accuracy"


class TaskAccuracyLimits(Limits):
    """How much accuracy a candidate may lose."""

    max_loss: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="loss of accuracy over all documents, a share. Our choice: losses of 0.003 can be shown with enough "
        "documents (arXiv 2602.10144), but to rule out 0.01 takes some 2,000 where the models differ on 3 %",
    )
    max_task_loss: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="loss of accuracy in any single task, a share. Our choice: three times what all tasks together may lose",
    )
    metric: str = Field(
        "", description="metric of the sample logs to compare; empty for each task's first that is right or wrong (acc)"
    )


@check(_NAME, tier=Tier.RESPONSE, limits=TaskAccuracyLimits, compares=True, tests=2)
def task_accuracy(evidence: Evidence, limits: TaskAccuracyLimits) -> Iterable[Finding]:
    """The candidate must answer tasks as well as its base: exact McNemar on the same documents, and one joint decision.

    Reads lm-eval's ``--log_samples`` files of both (Kübler et al., arXiv 2602.10144). Documents are the independent units.
    The union of documents decides; besides, a task that fails by itself (Holm over tasks) fails. These are the two
    decisions the check counts for. A failure needs both the exact test (is it worse at all?) and the score test at the
    loss allowed (is it worse than allowed?); passing needs Tango's upper bound of the loss to lie within.

    Yields:
        The joint finding, and one for each task that is decided by itself or cannot be compared.
    """
    if evidence.options.sample_logs is None:
        yield Finding(
            check=_NAME,
            status="not_applicable",
            message="no sample logs were given: run lm_eval --log_samples on both models and pass --samples BASE,CANDIDATE",
        )
        return
    logs = read_sample_logs(*evidence.options.sample_logs, limits.metric)
    for task, reason in sorted(logs.broken.items()):
        yield Finding(check=_NAME, status="fail", subject=task, message=f"{task}: {reason}")
    for task, reason in sorted(logs.unpaired.items()):
        yield Finding(check=_NAME, status="inconclusive", subject=task, message=f"{task} cannot be compared: {reason}")
    for task, reason in sorted(logs.undecidable.items()):
        yield Finding(check=_NAME, status="not_applicable", subject=task, message=f"{task} is not compared: {reason}")
    if not logs.tasks:
        if not (logs.broken or logs.unpaired or logs.undecidable):
            yield Finding(check=_NAME, status="inconclusive", message="the sample logs hold no task to compare")
        return
    decision = decide_tasks(
        {task.task: count_pairs(task.base, task.candidate) for task in logs.tasks},
        max_loss=limits.max_loss,
        max_task_loss=limits.max_task_loss,
        alpha=evidence.alpha,
        fail_alpha=fail_rate(evidence),
    )
    metrics = {task.task: f"{task.metric} ({task.filter})" for task in logs.tasks}
    for name, single in decision.tasks.items():
        # A task alone seldom has the documents to be decided; the joint decision then stands for it.
        if single.status != "inconclusive":
            yield _task_finding(name, single, metrics[name], limits.max_task_loss)
    yield _joint_finding(decision, limits, evidence)


def _task_finding(name: str, task: TaskDecision, metric: str, allowed: float) -> Finding:
    if task.status == "fail":
        verdict = f"more than the {allowed:.4g} allowed in one task (p = {task.p_value:.2g}, adjusted for all tasks)"
    else:
        verdict = f"at most {task.upper:.4g}, and {allowed:.4g} is allowed in one task"
    return Finding(
        check=_NAME,
        status=task.status,
        subject=name,
        measured=task.counts.loss,
        threshold=allowed,
        message=f"{name}: the loss of {metric} is {task.counts.loss:.4g} ({_pairs(task)}), {verdict}",
        details=_evidence(task),
    )


def _joint_finding(decision: JointDecision, limits: TaskAccuracyLimits, evidence: Evidence) -> Finding:
    pooled = decision.pooled
    failed = [name for name, task in decision.tasks.items() if task.status == "fail"]
    undecided = [name for name, task in decision.tasks.items() if task.status == "inconclusive"]
    documents = pooled.counts.documents
    start = (
        f"over {documents:,} documents of {len(decision.tasks)} tasks the loss of accuracy is {pooled.counts.loss:.4g}"
    )
    start = f"{start} ({_pairs(pooled)}; exact McNemar p = {pooled.exact:.2g})"
    power = f"so many documents can show a loss of {decision.detectable:.2g}"
    if pooled.counts.lost + pooled.counts.gained == 0:
        start = f"both models are right on the same {documents:,} documents of {len(decision.tasks)} tasks"
    if pooled.status == "fail":
        message = f"{start}, more than the {limits.max_loss:.4g} allowed; {power}"
    elif failed:
        message = f"{start}, but {', '.join(failed)} fails by itself; {power}"
    elif pooled.status == "pass":
        message = f"{start}, at most {pooled.upper:.4g}, and {limits.max_loss:.4g} is allowed; {power}"
    else:
        needed = decision.documents_needed
        end = "no number in sight would decide" if needed is None else f"about {needed:,} documents would decide"
        message = f"{start}, up to {pooled.upper:.4g}, so {limits.max_loss:.4g} is not decided; {power}; {end}"
    details: dict[str, Any] = _evidence(pooled)
    details |= {
        "fisher_p_of_all_tasks": decision.fisher,
        "smallest_detectable_difference": finite(decision.detectable),
        "documents_to_decide": decision.documents_needed,
        "pass_error_rate": evidence.alpha,
        "fail_error_rate": fail_rate(evidence),
        "tasks_undecided_alone": undecided,
        "tasks": {name: _evidence(task) for name, task in decision.tasks.items()},
    }
    return Finding(
        check=_NAME,
        status=decision.status,
        measured=pooled.counts.loss,
        threshold=limits.max_loss,
        message=message,
        details=details,
    )


def _pairs(task: TaskDecision) -> str:
    return f"{task.counts.lost} lost, {task.counts.gained} gained"


def _evidence(task: TaskDecision) -> dict[str, Any]:
    counts = task.counts
    return {
        "documents": counts.documents,
        "base_accuracy": counts.base_right / counts.documents,
        "candidate_accuracy": (counts.base_right - counts.lost + counts.gained) / counts.documents,
        "lost": counts.lost,
        "gained": counts.gained,
        "mcnemar_exact_p": task.exact,
        "p_beyond_allowed": task.p_value if math.isfinite(task.p_value) else None,
        "lower_bound": task.lower,
        "upper_bound": task.upper,
    }
