"""A linear model whose outlier inputs have a designed amplitude: leverage must come out as the theory says (THEORY 1.5).

Every input feature is +a_j or -a_j by a fair coin for each token, so that alpha_j is exactly as designed on any text; every
weight is +c or -c, so that all columns have the same energy; logits are small, so that KL is quadratic in the change.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ternary_probe.loading import LoadedModel, ModelSource
from ternary_probe.records import Leverage, LeverageRecord
from ternary_probe.studies.leverage import run_leverage
from ternary_probe.studies.plan import LeverageOptions
from ternary_probe.text import Protocol, Windows

INPUTS, OUTPUTS, VOCABULARY = 200, 96, 400
FRACTION = 0.05
OUTLIERS = int(FRACTION * INPUTS)
SEEDS = 16


def coin(*shape: int, seed: int) -> Tensor:
    """Random signs, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


class ReadingBlock(nn.Module):
    """Reads the token's vector, adds a linear map of it to the accumulator beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.reader = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.reader.weight.copy_(coin(OUTPUTS, INPUTS, seed=seed) / math.sqrt(INPUTS))

    def forward(self, stream: Tensor) -> Tensor:
        return stream + nn.functional.pad(self.reader(stream[..., :INPUTS]), (INPUTS, 0))


class Body(nn.Module):
    """Tokens to vectors, then two blocks."""

    def __init__(self, amplitude: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, INPUTS + OUTPUTS, dtype=torch.float64)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[:, :INPUTS] = coin(VOCABULARY, INPUTS, seed=1) * amplitude
        self.blocks = nn.ModuleList(ReadingBlock(seed=10 + index) for index in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.embed(input_ids)
        for block in self.blocks:
            stream = block(stream)
        return stream


class PlantedModel(nn.Module):
    """A linear language model; its first ``OUTLIERS`` input features have ``n alpha^2 = strength``."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        other = (1 - FRACTION * strength) / (1 - FRACTION)
        squares = torch.full((INPUTS,), other, dtype=torch.float64)
        squares[:OUTLIERS] = strength
        self.body = Body(squares.sqrt())
        self.head = nn.Linear(INPUTS + OUTPUTS, VOCABULARY, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.zero_()
            generator = torch.Generator().manual_seed(2)
            mixing = torch.randn(VOCABULARY, OUTPUTS, generator=generator, dtype=torch.float64)
            self.head.weight[:, INPUTS:] = 0.15 * mixing / math.sqrt(OUTPUTS)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids))

    def get_input_embeddings(self) -> nn.Module:
        return self.body.embed


def every_token(seed: int, windows: int = 4) -> Windows:
    """The whole vocabulary once, shuffled, in windows."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed)).reshape(windows, -1)
    scored = torch.ones_like(order, dtype=torch.bool)
    scored[:, -1] = False
    protocol = Protocol(
        name="disjoint",
        tokenizer="none",
        text="every token once",
        text_sha256="0" * 64,
        window=order.shape[1],
        stride=order.shape[1],
        bos="none",
        joining="as is",
        windows=windows,
        tokens_scored=int(scored.sum()),
        tokens_total=VOCABULARY,
        words=VOCABULARY,
        bytes=VOCABULARY,
    )
    return Windows(order, order.roll(-1, 1), scored, protocol, (0, VOCABULARY))


@cache
def measured(strength: float) -> LeverageRecord:
    source = ModelSource("planted", "memory", None, None, "float64", "cpu", "0" * 64)
    model: Any = PlantedModel(strength).eval().requires_grad_(False)
    first = round(strength) * SEEDS  # no two strengths share a mask, else one draw's luck would count in all of them
    options = LeverageOptions(rates=(0.02,), seeds=tuple(range(first, first + SEEDS)), fraction=FRACTION)
    return run_leverage(LoadedModel(model, None, source), every_token(3), every_token(4), options)


def leverage(strength: float, under: str) -> Leverage:
    (found,) = [x for x in measured(strength).leverage if x.denominator == under and x.response == "kl"]
    return found


@pytest.mark.parametrize("strength", [5.0, 10.0, 15.0])
def test_the_planted_columns_are_found_at_their_designed_amplitude(strength):
    record = measured(strength)

    other = (1 - FRACTION * strength) / (1 - FRACTION)
    assert record.outlier_columns == {f"body.blocks.{i}.reader.weight": tuple(range(OUTLIERS)) for i in (0, 1)}
    assert record.prediction.n_alpha2_outlier == pytest.approx(strength, rel=1e-6)
    assert record.prediction.ratio_outlier_other == pytest.approx(strength / other, rel=1e-6)
    assert record.prediction.weighted_outlier_all == pytest.approx(strength, rel=1e-6)
    for amplitude in record.amplitude:
        assert amplitude.energy_share == pytest.approx(FRACTION * strength, rel=1e-6)
        assert np.square(amplitude.alpha_sorted[0]) * INPUTS == pytest.approx(strength, rel=1e-6)


@pytest.mark.parametrize("strength", [5.0, 10.0, 15.0])
def test_leverage_over_all_columns_is_n_alpha_squared(strength):
    found = leverage(strength, "all")

    assert found.status == "ok"
    assert found.ci_low <= strength <= found.ci_high
    assert found.ci_high / found.ci_low < 1.8, "an interval this wide shows nothing"


@pytest.mark.parametrize("strength", [5.0, 10.0, 15.0])
def test_leverage_over_the_other_columns_is_the_ratio_of_alpha_squares(strength):
    found = leverage(strength, "other")

    predicted = strength * (1 - FRACTION) / (1 - FRACTION * strength)
    assert found.status == "ok"
    assert found.ci_low <= predicted <= found.ci_high
    assert found.ci_high / found.ci_low < 1.3, "an interval this wide shows nothing"
    assert not found.ci_low <= strength <= found.ci_high, "the two predictions are not told apart"


def test_without_outliers_leverage_is_one():
    """The control: the same columns called outliers, with the amplitude of all others."""
    found = leverage(1.0, "other")

    assert found.ci_low <= 1.0 <= found.ci_high
    assert found.ci_high / found.ci_low < 1.3
