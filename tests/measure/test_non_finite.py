from __future__ import annotations

import pytest
import torch
from small_study import cut, speaking_llama

from ternary_probe import anatomy
from ternary_probe.anatomy import NonFiniteError
from ternary_probe.measure import Evaluator


def test_a_nan_weight_is_named_with_its_place_before_anything_is_measured():
    model = speaking_llama()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds nan at \[3, 5\]"):
        anatomy.examine(model)


def test_an_overflow_in_half_precision_names_module_token_and_value():
    model = speaking_llama(torch.float16)
    model.model.layers[0].mlp.up_proj.weight.data.fill_(6e4)
    with pytest.raises(
        NonFiniteError, match=r"first non-finite output: model\.layers\.0\.mlp\.up_proj at token \d+ .*inf"
    ):
        anatomy.examine(model)


def test_a_model_that_breaks_after_it_was_examined_is_explained_while_scoring():
    model = speaking_llama()
    evaluator = Evaluator(anatomy.examine(model), cut(2))
    model.model.layers[0].self_attn.o_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"o_proj\.weight holds inf at \[0, 0\]"):
        evaluator.nll()
