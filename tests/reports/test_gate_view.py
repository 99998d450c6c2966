"""A gate's verdict on the terminal, in Markdown and as JUnit XML: the record's own figures, the deciding ones first."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lxml import etree
from reports.factory import environment, model, protocol
from rich.console import Console

from ternary_probe.records import Finding, GateRecord, Timing
from ternary_probe.reports.junit import to_junit
from ternary_probe.reports.markdown import to_markdown
from ternary_probe.reports.terminal import gate_view

FINDINGS = (
    Finding(check="files", status="pass", message="2 files agree with the index"),
    Finding(
        check="depth-profile",
        status="fail",
        subject="model.layers.7",
        measured=0.1234567,
        threshold=0.15,
        unit="step ratio",
        message="its MLP cancels a direction <of> the stream & more",
        details={"floor": 1e-12},
    ),
    Finding(check="norm-gain", status="warn", message="gain has a tiny entry"),
    Finding(check="candidate-nll", status="inconclusive", message="more text would decide"),
    Finding(check="dead-direction", status="not_applicable", message="no LayerNorm"),
)


def record(**changes: Any) -> GateRecord:
    fields: dict[str, Any] = {
        "model": model(),
        "protocol": protocol(),
        "environment": environment(),
        "timing": Timing(seconds=12.5, evaluations=3),
        "status": "ok",
        "policy": "default",
        "policy_sha256": "cd" * 32,
        "tiers": ("parameters", "forward"),
        "findings": FINDINGS,
        "verdict": "fail",
        "reason": "failed: depth-profile",
        "bytes_read": 12345,
    }
    return GateRecord(**(fields | changes))


def shown(gate: GateRecord, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(gate_view(gate))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_verdict_comes_first_and_the_deciding_findings_before_the_others() -> None:
    text = shown(record())

    assert text.startswith("FAIL: SmolLM2-135M-Instruct does not pass")
    order = [
        text.index(word) for word in ("depth-profile", "candidate-nll", "norm-gain", "files agree", "no LayerNorm")
    ]
    assert order == sorted(order[:1]) + order[1:]
    assert order[1:] == sorted(order[1:])
    assert "0.123" in text
    assert "0.15" in text


@pytest.mark.parametrize("verdict", ["pass", "fail", "inconclusive"])
def test_each_verdict_is_a_word_not_a_colour(verdict: str) -> None:
    assert shown(record(verdict=verdict)).startswith(verdict.upper())


def test_base_and_candidate_are_both_named() -> None:
    text = shown(record(base=model(name="the-base")))

    assert "as a release of the-base" in text


def test_markdown_has_every_finding_and_the_evidence() -> None:
    text = to_markdown(record(), command_line="ternary-probe gate demo")

    for one in FINDINGS:
        assert one.check in text
    assert "1e-12" in text
    assert "ternary-probe gate demo" in text


def parsed(gate: GateRecord) -> ET.Element:
    return ET.fromstring(to_junit(gate, datetime(2026, 12, 1, tzinfo=UTC)).encode())


def test_junit_counts_agree_with_its_cases() -> None:
    root = parsed(record())
    suite = root.find("testsuite")

    assert suite is not None
    cases = suite.findall("testcase")
    assert len(cases) == len(FINDINGS) == int(suite.attrib["tests"])
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{tag}")) == 1


def test_junit_keeps_unrounded_figures_and_special_characters() -> None:
    failure = parsed(record()).find(".//failure")

    assert failure is not None
    assert failure.attrib["message"] == FINDINGS[1].message
    assert "0.1234567" in str(failure.text)


def test_junit_survives_names_no_xml_can_hold() -> None:
    root = parsed(record(findings=(Finding(check="files", status="fail", subject="a\x00b\x1b\ud800", message="\x07"),)))

    assert root.find(".//testcase").attrib["name"] == "a�b��"  # type: ignore[union-attr]


def schema_errors(document: str) -> list[str]:
    schema = etree.XMLSchema(etree.parse(Path(__file__).with_name("junit.xsd")))
    schema.validate(etree.fromstring(document.encode()))
    return [str(error) for error in schema.error_log]


@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(record(), id="every status"),
        pytest.param(record(findings=(), timing=None, base=model(name="b")), id="no finding"),
        pytest.param(
            record(findings=(Finding(check="files", status="fail", subject="\x00", message="\x07"),)), id="odd"
        ),
    ],
)
def test_junit_is_valid_under_the_schema(gate: GateRecord) -> None:
    assert schema_errors(to_junit(gate)) == []


def test_the_schema_refuses_what_is_no_junit_report() -> None:
    document = to_junit(record())

    for wrong in (
        document.replace('classname="', 'klass="'),
        document.replace("<failure", "<failed").replace("</failure", "</failed"),
        document.replace('time="12.500"', 'time="soon"'),
    ):
        assert schema_errors(wrong)
