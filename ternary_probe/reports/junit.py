"""A gate as JUnit XML, the format every CI system shows test results from.

Layout of the de-facto standard (Jenkins' ``testsuites > testsuite > testcase`` with ``failure``, ``error`` and
``skipped``): a failed finding is a failure, an undecided one an error, one that does not apply is skipped, a warning
passes and says its sentence on ``system-out``.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

from ternary_probe.records import Finding, GateRecord, write_atomically

# What XML 1.0 cannot hold, escaped or not: tensor names come from files nobody has vetted.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(record: GateRecord, now: datetime | None = None) -> str:
    """Write a gate's findings as one test suite.

    Args:
        record: The gate's record.
        now: Time stamp of the suite, UTC; the present if None.

    Returns:
        The XML document. The time of the whole run stands on the suite; single checks are not timed.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S")
    seconds = f"{record.timing.seconds:.3f}" if record.timing else "0"
    statuses = [finding.status for finding in record.findings]
    counts = {
        "tests": str(len(statuses)),
        "failures": str(statuses.count("fail")),
        "errors": str(statuses.count("inconclusive")),
    }
    suites = ET.Element("testsuites", counts | {"time": seconds})
    suite = ET.SubElement(
        suites,
        "testsuite",
        {"name": _clean(f"ternary-probe gate {record.model.name}")}
        | counts
        | {"skipped": str(statuses.count("not_applicable")), "time": seconds, "timestamp": stamp},
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(record).items():
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for finding in record.findings:
        _case(suite, finding)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def write_junit(record: GateRecord, path: Path) -> Path:
    """Write the XML file, atomically.

    Args:
        record: The gate's record.
        path: Target file.

    Returns:
        The path written.
    """
    return write_atomically(path, to_junit(record))


def _properties(record: GateRecord) -> dict[str, str]:
    found = {
        "verdict": record.verdict,
        "reason": record.reason,
        "model": record.model.name,
        "policy": record.policy,
        "policy_sha256": record.policy_sha256,
        "ternary_probe": record.environment.ternary_probe,
    }
    if record.notes:
        found["notes"] = "; ".join(record.notes)
    return found if record.base is None else found | {"base": record.base.name}


def _case(suite: ET.Element, finding: Finding) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        {"classname": f"ternary_probe.{finding.check}", "name": _clean(finding.subject or "model"), "time": "0"},
    )
    kinds = {"fail": "failure", "inconclusive": "error", "not_applicable": "skipped"}
    message = _clean(finding.message)
    if kind := kinds.get(finding.status):
        attributes = {"message": message}
        if kind != "skipped":
            attributes["type"] = finding.status
        ET.SubElement(case, kind, attributes).text = None if kind == "skipped" else _evidence(finding)
    ET.SubElement(case, "system-out").text = f"{finding.status}: {message}"


def _evidence(finding: Finding) -> str:
    unit = f" {finding.unit}" if finding.unit else ""
    lines = [f"measured: {finding.measured}{unit}", f"threshold: {finding.threshold}{unit}"]
    lines += [f"{name}: {value}" for name, value in finding.details.items()]
    return _clean("\n".join(lines))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
