"""Self-checks pass on sound models and fail on models that break them."""

from __future__ import annotations

import pytest
import torch
import zoo
from made_models import IDS, seeded
from torch import nn

from ternary_probe import anatomy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_capability_holds_on_the_zoo(name, dtype):
    checks = zoo.examined(name, dtype).checks
    assert set(checks) == {"repeatable", "chunked_head", "negation", "undo", "causal", "suffix"}
    assert {check.name: check.passed for check in checks.values()} == dict.fromkeys(checks, True)


def broken(model, module, change):
    """Self-checks of a model one of whose modules returns something else."""
    module.register_forward_hook(lambda _m, _a, output: change(output))
    return anatomy.examine(model).checks


def test_a_model_that_draws_random_numbers_is_not_repeatable():
    model = zoo.build("llama")
    checks = broken(model, model.model.layers[0].mlp, lambda output: output + torch.randn_like(output))
    assert checks["repeatable"].passed is False
    assert checks["repeatable"].difference > 0


def test_a_model_that_looks_ahead_is_not_causal():
    model = zoo.build("llama")
    checks = broken(model, model.model.layers[0].mlp, lambda output: output + output.mean(1, keepdim=True))
    assert checks["causal"].passed is False
    assert checks["repeatable"].passed is True


def test_a_head_that_mixes_tokens_cannot_be_chunked():
    model = zoo.build("llama")
    checks = broken(model, model.lm_head, lambda output: output - output.mean(1, keepdim=True))
    assert checks["chunked_head"].passed is False


def test_a_model_whose_only_matrix_is_tied_cannot_check_negation():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids) @ self.table.weight.T

    checks = anatomy.examine(seeded(Tied), input_ids=IDS).checks
    assert checks["negation"].passed is None
    assert checks["chunked_head"].passed is None
