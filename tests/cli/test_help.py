"""Help costs nothing and shows everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ternary_probe

HEAVY = ("torch", "transformers", "numpy", "scipy", "matplotlib", "pandas", "datasets", "lm_eval")


def modules_after(code: str) -> set[str]:
    """Heavy modules in memory after some code ran in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('|'.join(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(filter(None, done.stderr.strip().split("\n")[-1].split("|")))


def test_importing_the_package_and_the_command_line_loads_no_torch():
    assert modules_after("import ternary_probe, ternary_probe.cli") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["leverage", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_no_torch(arguments):
    code = (
        f"sys.argv = ['ternary-probe', *{arguments!r}]\n"
        "from ternary_probe.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
    )
    assert modules_after(code) == set()


def test_python_dash_m_is_the_script():
    done = subprocess.run(
        [sys.executable, "-m", "ternary_probe", "--version"], capture_output=True, text=True, check=False, timeout=120
    )

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, ternary_probe.__version__, "")


@pytest.mark.parametrize("command", ["demo", "leverage", "perplexity", "inspect", "doctor"])
def test_every_command_explains_its_options(probe, command):
    outcome = probe(command, "--help")

    assert outcome.code == 0
    assert "--json" in outcome.out
    assert "--quiet" in outcome.out


def test_a_bare_call_lists_the_commands(probe):
    outcome = probe()

    for command in ("demo", "leverage", "perplexity", "inspect", "doctor"):
        assert command in outcome.out + outcome.err


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["leverage"], ["leverage", "demo", "--nonsense"], ["leverage", "demo", "--protocol", "x"]],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_two_with_nothing_on_stdout(probe, arguments):
    outcome = probe(*arguments)

    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err
