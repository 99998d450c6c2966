"""Policies: complete by default, validated by name and value, and never looser than they say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from gates.made_checks import Bounds, install, made

from ternary_probe.gates import PolicyError, all_checks, default_policy_text, load_policy


@pytest.fixture
def policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, made("weights"), made("norm-gain", severity="warn"))

    def write(text: str) -> Path:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_what_a_policy_does_not_mention_keeps_its_default(policy_file) -> None:
    policy = load_policy(policy_file("[checks.weights]\nhighest = 3\n"))

    assert policy.checks["weights"].limits == Bounds(highest=3.0)
    assert policy.checks["weights"].severity == "fail"
    assert policy.checks["norm-gain"].limits == Bounds()
    assert policy.checks["norm-gain"].severity == "warn"
    assert policy.alpha == 0.05


def test_the_digest_names_the_content(policy_file) -> None:
    first = load_policy(policy_file("alpha = 0.01\n"))
    second = load_policy(policy_file("alpha = 0.02\n"))

    assert first.alpha == 0.01
    assert first.sha256 != second.sha256 != load_policy().sha256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("chekcs = 1", ["chekcs", "did you mean 'checks'"], id="unknown key"),
        pytest.param("version = 2", ["version 2", "version 1"], id="version"),
        pytest.param("checks = 3", ["'checks' must be tables"], id="no table"),
        pytest.param("[checks.weihgts]", ["weihgts", "did you mean 'weights'", "gate --list"], id="unknown check"),
        pytest.param("[checks.weights]\nhihgest = 1", ["hihgest", "did you mean 'highest'"], id="unknown limit"),
        pytest.param(
            "[checks.weights]\nseverity = 'error'", ["severity", "'error'", "fail, warn or off"], id="severity"
        ),
        pytest.param("[checks.weights]\nhighest = 'much'", ["weights.highest", "'much'"], id="kind"),
        pytest.param("[checks.weights]\nhighest = true", ["weights.highest", "True"], id="bool for number"),
        pytest.param("[checks.weights]\nstrict = 1", ["weights.strict", "1"], id="number for bool"),
        pytest.param("[checks.weights]\nhighest = nan", ["weights.highest", "nan"], id="NaN"),
        pytest.param("[checks.weights]\nhighest = inf", ["weights.highest", "inf"], id="infinity"),
        pytest.param("[checks]\nweights = 3", ["checks.weights", "must be a table"], id="value for table"),
        pytest.param("alpha = 0", ["alpha", "0"], id="alpha 0"),
        pytest.param("alpha = 'x'", ["alpha", "'x'"], id="alpha text"),
        pytest.param("alpha = ", ["not TOML"], id="broken"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(policy_file, text: str, words: list[str]) -> None:
    with pytest.raises(PolicyError) as error:
        load_policy(policy_file(text))

    for word in words:
        assert word in str(error.value)


def test_a_missing_policy_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot read policy .*absent.toml: no such file"):
        load_policy(tmp_path / "absent.toml")


def test_the_default_policy_states_every_threshold_of_every_check_with_its_source() -> None:
    text = default_policy_text()
    tables = tomllib.loads(text)["checks"]

    assert set(tables) == set(all_checks())
    for name, check in all_checks().items():
        assert set(tables[name]) == {"severity", *check.limits.model_fields}
        for field, info in check.limits.model_fields.items():
            assert tables[name][field] == info.default, f"{name}.{field}"
            assert info.description, f"{name}.{field} is not explained"
    assert {name: entry.severity for name, entry in load_policy().checks.items()} == {
        name: check.severity for name, check in all_checks().items()
    }


def test_the_default_policy_read_from_a_file_is_the_default_policy(tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(default_policy_text(), encoding="utf-8")

    copy, default = load_policy(path), load_policy()

    assert copy.checks == default.checks
    assert copy.sha256 == default.sha256
