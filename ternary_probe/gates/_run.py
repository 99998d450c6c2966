"""Run the checks of a policy on a model, or on a candidate against its base, and decide."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ternary_probe.errors import ProbeError
from ternary_probe.gates._check import Check, Tier, all_checks
from ternary_probe.gates._evidence import Evidence, GateOptions, Subject
from ternary_probe.gates._file_access import require_present
from ternary_probe.gates._policy import Policy, load_policy
from ternary_probe.gates._verdict import decide, weigh
from ternary_probe.records import Environment, Finding, GateRecord, ModelInfo, ProtocolInfo, Timing

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel

DEFAULT_TIERS = (Tier.PARAMETERS, Tier.FORWARD, Tier.RESPONSE)
MODEL_FREE = frozenset({Tier.PARAMETERS, Tier.SCAN})

Progress = Callable[[int, int, str], None]


def run_gate(
    model: str | LoadedModel,
    candidate: str | LoadedModel | None = None,
    *,
    policy: Policy | None = None,
    tiers: Sequence[Tier] = DEFAULT_TIERS,
    options: GateOptions | None = None,
    progress: Progress | None = None,
) -> GateRecord:
    """Judge a model under a policy.

    With a candidate, it is the candidate that is judged, and ``model`` is the base it is compared with.

    Args:
        model: MODEL, or a loaded model.
        candidate: The quantized model.
        policy: The policy; the default one if None.
        tiers: What checks may read.
        options: Text, device, seed.
        progress: Called with (done, total, label).

    Returns:
        The record. A check that could not be carried out is a finding of its own; others are not lost.

    Raises:
        ProbeError: If a model does not exist, or no check at all could be carried out, with the reason of the first.
    """
    started = time.perf_counter()
    policy, options = policy or load_policy(), options or GateOptions()
    base = None if candidate is None else Subject(model, options)
    subject = Subject(model, options) if candidate is None else Subject(candidate, _without_revision(options))
    for one in (base, subject):
        if one is not None and isinstance(one.source, str):
            require_present(one.source, one.options.loading.get("revision"))
    chosen = select(policy, tiers, compares=base is not None)
    evidence = Evidence(subject, base, options, max(1, sum(check.tests for check in chosen)), policy.alpha)
    findings: list[Finding] = []
    refused: list[ProbeError] = []
    for done, check in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), check.name)
        if check.tier in MODEL_FREE and any(one is not None and one.files is None for one in (subject, base)):
            findings.append(
                Finding(check=check.name, status="not_applicable", message="the model is in memory: there are no files")
            )
            continue
        try:
            found = list(_findings(check, evidence, policy))
        except ProbeError as error:
            refused.append(error)
            found = [_refusal(check, error)]
        findings += [weigh(finding, policy) for finding in found]
    if chosen and len(refused) == len(chosen) and not any(finding.status == "fail" for finding in findings):
        raise refused[0]
    verdict = decide(findings, policy)
    return GateRecord(
        model=describe(subject),
        base=None if base is None else describe(base),
        protocol=_protocol(subject),
        environment=Environment.here(),
        timing=Timing(seconds=time.perf_counter() - started, evaluations=_evaluations(subject, base)),
        status="inconclusive" if verdict.value == "inconclusive" else "ok",
        notes=(*_notes(subject, base), *_left_out(policy, tiers, compares=base is not None)),
        policy=policy.name,
        policy_sha256=policy.sha256,
        tiers=tuple(tier.value for tier in Tier if tier in tiers),
        findings=tuple(findings),
        verdict=verdict.value,
        reason=verdict.reason,
        bytes_read=_bytes_read(subject, base),
    )


def _without_revision(options: GateOptions) -> GateOptions:
    """Return the options for the candidate: a revision names a commit of the base's repository."""
    return replace(options, loading={**options.loading, "revision": None})


def select(policy: Policy, tiers: Sequence[Tier], *, compares: bool) -> list[Check]:
    """Choose the checks that will run.

    Args:
        policy: Switches checks off.
        tiers: What checks may read.
        compares: Whether there is a base.

    Returns:
        The checks, cheap ones first.
    """
    return [
        check
        for check in all_checks().values()
        if check.tier in tiers and policy.enabled(check) and (compares or not check.compares)
    ]


def _findings(check: Check, evidence: Evidence, policy: Policy) -> Iterator[Finding]:
    count = 0
    for finding in check.body(evidence, policy.checks[check.name].limits):
        count += 1
        yield finding if finding.check == check.name else finding.model_copy(update={"check": check.name})
    if count == 0:
        yield Finding(check=check.name, status="inconclusive", message="the check found nothing to judge")


def _refusal(check: Check, error: ProbeError) -> Finding:
    """Weigh an error: a model that computes NaN is a bad model, anything else could not be judged."""
    broken = any(kind.__name__ == "NonFiniteError" for kind in type(error).__mro__)  # its module would import torch
    return Finding(check=check.name, status="fail" if broken else "inconclusive", message=str(error))


def describe(subject: Subject) -> ModelInfo:
    """Describe a subject by what was read of it; nothing is loaded for the description's sake.

    Args:
        subject: The subject.

    Returns:
        The description; ``dtype`` and ``parameters`` come from headers where no model was built.
    """
    if "loaded" in vars(subject) or not isinstance(subject.source, str):
        from ternary_probe.studies.leverage import model_info

        return model_info(subject.loaded, None)
    evidence = vars(subject).get("parameters")
    tensors = {} if evidence is None else evidence.tensors
    sizes: Counter[str] = Counter()
    for entry in tensors.values():
        size = 1
        for extent in entry.shape:
            size *= extent
        sizes[entry.dtype] += size
    return ModelInfo(
        name=subject.name,
        kind="files",
        dtype=sizes.most_common(1)[0][0] if sizes else "unknown",
        device="none",
        parameters=sum(sizes.values()),
    )


def _protocol(subject: Subject) -> ProtocolInfo | None:
    if "_cut" not in vars(subject):
        return None
    return ProtocolInfo.model_validate(subject.windows.protocol.model_dump())


def _evaluations(*subjects: Subject | None) -> int:
    return sum(
        vars(subject)["evaluator"].evaluations for subject in subjects if subject and "evaluator" in vars(subject)
    )


def _bytes_read(*subjects: Subject | None) -> int | None:
    read = [vars(s)["parameters"].bytes_read for s in subjects if s and "parameters" in vars(s)]
    return sum(read) if read else None


def _left_out(policy: Policy, tiers: Sequence[Tier], *, compares: bool) -> tuple[str, ...]:
    """Name the checks the policy asks for that this run did not make."""
    every = select(policy, tuple(Tier), compares=compares)
    made = {check.name for check in select(policy, tiers, compares=compares)}
    missing = [check for check in every if check.name not in made]
    scan = [check.name for check in missing if check.tier is Tier.SCAN]
    others = [check.name for check in missing if check.tier is not Tier.SCAN]
    notes = []
    if scan:
        notes.append(f"not run: {', '.join(scan)}; --scan-weights runs them, reading every weight once")
    if others:
        notes.append(f"not run, as asked: {', '.join(others)}")
    return tuple(notes)


def _notes(subject: Subject, base: Subject | None) -> tuple[str, ...]:
    notes: list[str] = []
    for one in (subject, base):
        if one is not None and "loaded" in vars(one):
            notes += [f"{one.name}: {note}" for note in one.loaded.source.notes]
    return tuple(dict.fromkeys(notes))
