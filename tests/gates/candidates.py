"""A base, and candidates made of it, for the tests of the response checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from small_study import loaded_llama, tokenizer

from ternary_probe.gates import Evidence, GateOptions, Subject, all_checks
from ternary_probe.loading import LoadedModel, wrap
from ternary_probe.records import Finding

OPTIONS = GateOptions(window=32, windows=10)


def subject(loaded: LoadedModel, options: GateOptions = OPTIONS) -> Subject:
    return Subject(loaded, options)


@torch.no_grad()
def candidate_of(
    edit: Callable[[Any], None], *, name: str = "candidate", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """The base's model, edited."""
    model = loaded_llama(dtype).model
    edit(model)
    return wrap(model, tokenizer(), name=name)


def noisy(amount: float, seed: int = 5) -> Callable[[Any], None]:
    """Relative Gaussian noise on every matrix of the blocks."""

    def edit(model: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in key:
                parameter.add_(amount * parameter.std() * torch.randn(parameter.shape, generator=generator))

    return edit


def permuted(model: Any) -> None:
    """The order of the MLP's hidden units, which no function depends on, but rounding does."""
    for layer in model.model.layers:
        mlp = layer.mlp
        order = torch.randperm(mlp.up_proj.weight.shape[0], generator=torch.Generator().manual_seed(1))
        mlp.up_proj.weight.copy_(mlp.up_proj.weight[order])
        mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[order])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])


def with_nan(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")


@cache
def evidence_for(edit: Callable[[Any], None], dtype: torch.dtype = torch.float32) -> Evidence:
    return Evidence(subject(candidate_of(edit, dtype=dtype)), subject(loaded_llama(dtype)), OPTIONS)


def findings(name: str, evidence: Evidence, **limits: Any) -> list[Finding]:
    """Run one check."""
    check = all_checks()[name]
    return list(check.body(evidence, check.limits(**limits)))


def only(name: str, evidence: Evidence, **limits: Any) -> Finding:
    [finding] = findings(name, evidence, **limits)
    return finding
