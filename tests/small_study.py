"""Small models with a text each, and the studies on them that several test files share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tiny import tiny_llama, tiny_tokenizer

from ternary_probe.loading import LoadedModel, wrap
from ternary_probe.records import LeverageRecord
from ternary_probe.studies.leverage import run_leverage
from ternary_probe.studies.plan import LeverageOptions
from ternary_probe.text import Windows, calibration_windows, make_windows, read_text

WINDOW = 32
OPTIONS = LeverageOptions(rates=(0.05, 0.2), seeds=(0, 1), fraction=0.1)
"""A study of seconds: 12 cells and 2 for the noise floor."""


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@torch.no_grad()
def speaking_llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Any:
    """A random Llama whose weights are large enough that its logits differ and a flip shows in every dtype."""
    model = tiny_llama(dtype=torch.float32, seed=seed, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 1.0 if "embed" in name else 2.5 / parameter.shape[1] ** 0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        else:  # gains: a few input features stick out
            parameter.copy_(torch.exp(0.5 * torch.randn(parameter.shape, generator=generator)))
    return model.to(dtype)


def loaded_llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> LoadedModel:
    return wrap(speaking_llama(dtype, seed=seed, **changes), tokenizer())


def cut(windows: int = 3, *, window: int = WINDOW, **how: Any) -> Windows:
    """The sample text in windows, by the tiny tokenizer."""
    return make_windows(read_text(), tokenizer(), window=window, windows=windows, **how)


def calibration(scored: Windows) -> Windows:
    return calibration_windows(read_text(), tokenizer(), scored)


def study(
    loaded: LoadedModel | None = None, options: LeverageOptions = OPTIONS, *, windows: int = 3, **how: Any
) -> LeverageRecord:
    """Run a study; ``how`` goes to `run_leverage`."""
    scored = cut(windows)
    return run_leverage(loaded or loaded_llama(), scored, calibration(scored), options, **how)


def changed(**fields: Any) -> LeverageOptions:
    """`OPTIONS` with some fields replaced."""
    return replace(OPTIONS, **fields)


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer as raw bytes: NaN and signed zeros count."""
    return {name: tensor.detach().clone().contiguous().view(torch.uint8) for name, tensor in model.state_dict().items()}


def differing(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that no longer have the bytes they had."""
    now = bits(model)
    return [name for name in before.keys() | now.keys() if not torch.equal(before[name], now[name])]
