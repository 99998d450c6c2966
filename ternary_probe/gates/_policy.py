"""Release policies: TOML to severities and thresholds, validated; the default policy, written from the checks."""

from __future__ import annotations

import difflib
import hashlib
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ternary_probe.errors import ProbeError
from ternary_probe.gates._check import Check, Limits, Severity, all_checks

POLICY_VERSION = 1
_TOP = ("version", "alpha", "checks")
_WIDTH = 108


class PolicyError(ProbeError):
    """A policy cannot be read or asks for something there is not."""


class CheckPolicy(BaseModel):
    """What a policy says of one check."""

    model_config = ConfigDict(frozen=True)

    severity: Severity
    limits: Limits


class Policy(BaseModel):
    """Severities and thresholds of every check.

    Attributes:
        name: ``default`` or the file.
        sha256: Of its file, or of the default policy's text.
        alpha: Chance that a candidate equal to its base fails, all statistical checks together.
        checks: By name of check.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    sha256: str
    alpha: float = Field(0.05, gt=0, lt=0.5)
    checks: dict[str, CheckPolicy]

    def enabled(self, check: Check) -> bool:
        """Whether the check is to run."""
        return self.checks[check.name].severity != "off"


def load_policy(path: Path | None = None) -> Policy:
    """Read a policy; what it does not mention keeps its default.

    Args:
        path: A TOML file; None for the default policy.

    Returns:
        The policy, complete.

    Raises:
        PolicyError: If the file cannot be read, is not TOML, or names a check or threshold that does not exist, or a
            value is of the wrong kind.
    """
    if path is None:
        text = default_policy_text()
        return _build("default", text, tomllib.loads(text))
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise PolicyError(f"cannot read policy {path}: {(error.strerror or str(error)).lower()}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"policy {path} is not TOML: {error}") from error
    return _build(str(path), text, data)


def default_policy_text() -> str:
    """Write the default policy, every threshold explained where it stands.

    Returns:
        TOML.
    """
    lines = [
        "# The default release policy: every check, what it looks at, and where its thresholds come from.",
        "# A policy of your own names only what it changes. severity is fail, warn or off.",
        "",
        f"version = {POLICY_VERSION}",
        "",
        "# Chance that a candidate equal to its base fails, all statistical checks together.",
        "alpha = 0.05",
    ]
    for name, check in all_checks().items():
        lines += ["", *_comment(check.summary), f'[checks."{name}"]', f'severity = "{check.severity}"']
        for field, info in check.limits.model_fields.items():
            lines += [*_comment(info.description or ""), f"{field} = {json.dumps(info.default)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _build(name: str, text: str, data: dict[str, Any]) -> Policy:
    label = "the default policy" if name == "default" else f"policy {name}"
    for key in data:
        if key not in _TOP:
            raise PolicyError(f"{label} has the unknown key {key!r}{_nearest(key, _TOP)}")
    if data.get("version", POLICY_VERSION) != POLICY_VERSION:
        raise PolicyError(f"{label} is of version {data['version']!r}; this release reads version {POLICY_VERSION}")
    tables = data.get("checks", {})
    if not isinstance(tables, dict):
        raise PolicyError(f"{label}: 'checks' must be tables such as [checks.files]")
    checks = all_checks()
    for key in tables:
        if key not in checks:
            raise PolicyError(f"{label} names the unknown check {key!r}{_nearest(key, checks)}; see gate --list")
    built = {key: _check_policy(label, check, tables.get(key, {})) for key, check in checks.items()}
    try:
        return Policy(
            name=name,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            alpha=data.get("alpha", 0.05),
            checks=built,
        )
    except ValidationError as error:
        raise PolicyError(f"{label}: alpha {_reason(error)}") from error


def _check_policy(label: str, check: Check, table: object) -> CheckPolicy:
    if not isinstance(table, dict):
        raise PolicyError(f"{label}: [checks.{check.name}] must be a table")
    given = dict(table)
    severity = given.pop("severity", check.severity)
    if severity not in get_args(Severity):
        raise PolicyError(f"{label}: severity of {check.name} is {severity!r}; it must be fail, warn or off")
    known = check.limits.model_fields
    for key in given:
        if key not in known:
            choices = (*known, "severity")
            raise PolicyError(f"{label}: check {check.name} has no threshold {key!r}{_nearest(key, choices)}")
    for key, value in given.items():
        if isinstance(value, bool) != isinstance(known[key].default, bool):
            raise PolicyError(f"{label}: {check.name}.{key} is {value!r}, which is not of the kind of its default")
    try:
        return CheckPolicy(severity=severity, limits=check.limits.model_validate(given))
    except ValidationError as error:
        where = error.errors()[0]["loc"]
        raise PolicyError(f"{label}: {'.'.join([check.name, *map(str, where)])} {_reason(error)}") from error


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"is {first['input']!r}: {first['msg'].lower()}"


def _nearest(name: str, choices: Any) -> str:
    found: list[str] = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
