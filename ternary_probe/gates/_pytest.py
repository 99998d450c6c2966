"""The gate as an assertion, for a project's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ternary_probe.gates._policy import load_policy
from ternary_probe.gates._run import run_gate
from ternary_probe.records import GateRecord

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel


class GateFailureError(AssertionError):
    """A gate did not pass; the message lists the findings that decided, ``record`` has them all."""

    def __init__(self, record: GateRecord) -> None:
        self.record = record
        deciding = [f for f in record.findings if f.status == record.verdict] or list(record.findings)
        lines = [f"  {f.check}{f' [{f.subject}]' if f.subject else ''}: {f.message}" for f in deciding]
        super().__init__(
            "\n".join([f"gate of {record.model.name}: {record.verdict.upper()} ({record.reason})", *lines])
        )


def assert_gate(
    model: str | LoadedModel,
    candidate: str | LoadedModel | None = None,
    *,
    policy: Path | str | None = None,
    allow_inconclusive: bool = False,
    **arguments: Any,
) -> GateRecord:
    """Assert that a model passes its gate.

    Args:
        model: MODEL, or a loaded model; the base where there is a candidate.
        candidate: The quantized model.
        policy: TOML file; the default policy if None.
        allow_inconclusive: Accept a verdict that could not be reached.
        **arguments: Further arguments of `run_gate`.

    Returns:
        The record of a gate that passed.

    Raises:
        GateFailureError: If it did not.
    """
    record = run_gate(model, candidate, policy=load_policy(None if policy is None else Path(policy)), **arguments)
    accepted = {"pass", "inconclusive"} if allow_inconclusive else {"pass"}
    if record.verdict not in accepted:
        raise GateFailureError(record)
    return record
