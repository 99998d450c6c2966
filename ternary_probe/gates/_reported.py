"""How the checks of files report: the worst faults by name and a count of the rest, or one finding that all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ternary_probe.records import Finding, FindingStatus

if TYPE_CHECKING:
    from ternary_probe.gates._parameters import ParameterEvidence

SHOWN = 10
_ORDER = ("fail", "inconclusive", "warn")


def worst_first(faults: Sequence[Finding]) -> Iterator[Finding]:
    """Name the worst faults and count the rest.

    Args:
        faults: Findings of one check, none of them a pass.

    Yields:
        At most ten of them, failures first, and one finding for the others, as bad as the worst of those.
    """
    ranked = sorted(faults, key=lambda fault: _ORDER.index(fault.status))
    yield from ranked[:SHOWN]
    rest = ranked[SHOWN:]
    if rest:
        names = [fault.subject for fault in rest]
        yield Finding(
            check=rest[0].check,
            status=rest[0].status,
            measured=float(len(faults)),
            threshold=0.0,
            unit="faults",
            message=f"{len(rest)} more such faults, {sum(f.status == 'fail' for f in rest)} of them failures: "
            + ", ".join(name for name in names[:3] if name)
            + (", …" if len(rest) > 3 else ""),
            details={"subjects": names[:200]},
        )


def fault(
    check: str,
    status: FindingStatus,
    subject: str,
    message: str,
    measured: float | None = None,
    threshold: float | None = 0.0,
    unit: str = "",
    **details: Any,
) -> Finding:
    """Make a finding.

    Args:
        check: The check's name.
        status: What it is.
        subject: Tensor, file or block.
        message: One sentence.
        measured: What was measured.
        threshold: The bound it is compared with.
        unit: Unit of both.
        **details: The evidence.

    Returns:
        The finding.
    """
    return Finding(
        check=check,
        status=status,
        subject=subject,
        measured=measured,
        threshold=threshold if measured is not None else None,
        unit=unit,
        message=message,
        details=details,
    )


def unread(check: str, *evidence: ParameterEvidence) -> Finding | None:
    """Say that a check does not apply because files are of another format, or could not be read at all.

    Args:
        check: The check's name.
        *evidence: Of one or two models.

    Returns:
        The finding, or None where there are tensors to look at.
    """
    for one in evidence:
        if one.unread:
            return fault(check, "not_applicable", "", f"the files are not read: {one.unread}")
        if not one.tensors:
            return fault(check, "inconclusive", "", "no readable file holds a tensor")
    return None
