"""What is read from a model: NLL, KL divergence, input activations."""

from __future__ import annotations

from ternary_probe.anatomy import NonFiniteError
from ternary_probe.measure.activations import Activations, InputMoments, measure_activations, outlier_amplitude
from ternary_probe.measure.nll import Evaluator, NllResult, Reference, Response, perplexity

__all__ = [
    "Activations",
    "Evaluator",
    "InputMoments",
    "NllResult",
    "NonFiniteError",
    "Reference",
    "Response",
    "measure_activations",
    "outlier_amplitude",
    "perplexity",
]
