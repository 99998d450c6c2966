"""Pre-quantization gates: checks under a policy, to a verdict with its evidence."""

from ternary_probe.gates._check import Check, Limits, Tier, all_checks, check
from ternary_probe.gates._evidence import Evidence, GateOptions, Subject
from ternary_probe.gates._policy import Policy, PolicyError, default_policy_text, load_policy
from ternary_probe.gates._pytest import GateFailureError, assert_gate
from ternary_probe.gates._run import DEFAULT_TIERS, run_gate
from ternary_probe.gates._verdict import EXIT_CODES, decide, weigh

__all__ = [
    "DEFAULT_TIERS",
    "EXIT_CODES",
    "Check",
    "Evidence",
    "GateFailureError",
    "GateOptions",
    "Limits",
    "Policy",
    "PolicyError",
    "Subject",
    "Tier",
    "all_checks",
    "assert_gate",
    "check",
    "decide",
    "default_policy_text",
    "load_policy",
    "run_gate",
    "weigh",
]
