"""The lm-eval plugin: evaluate any model, perturbed or ternarized, with the tasks of lm-evaluation-harness.

    lm_eval --model ternary_probe --model_args pretrained=demo,perturb=sign_flip:rate=0.005 --tasks TASK,HOOK.yaml

`ternary-probe doctor` prints the path of HOOK.yaml and says which ways of reaching the model work here. From Python:

    from ternary_probe_lm_eval import as_lm
    lm = as_lm(model, tokenizer)
    with lm.perturbed("sign_flip:rate=0.005"):
        results = lm_eval.simple_evaluate(lm, tasks=["piqa"])

    from ternary_probe_lm_eval import sweep
    record = sweep("demo", ["piqa", "ternary_probe_nll"], ["sign_flip:rate=0.005", "ternarize:scheme=absmean"])

Importing this package imports neither torch nor lm-eval.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ternary_probe_lm_eval.model import TernaryProbeLM, as_lm
    from ternary_probe_lm_eval.records import SweepRecord
    from ternary_probe_lm_eval.scoring import DocumentLogLikelihood
    from ternary_probe_lm_eval.sweeps import SweepOptions, sweep

__all__ = ["DocumentLogLikelihood", "SweepOptions", "SweepRecord", "TernaryProbeLM", "as_lm", "sweep"]

_HOMES = {
    "DocumentLogLikelihood": "scoring",
    "SweepOptions": "sweeps",
    "SweepRecord": "records",
    "TernaryProbeLM": "model",
    "as_lm": "model",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
