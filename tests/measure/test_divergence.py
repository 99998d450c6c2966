from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from ternary_probe import anatomy
from ternary_probe.measure import Evaluator
from ternary_probe.measure.divergence import compare, quantiles
from ternary_probe.perturb import SignFlip
from ternary_probe.text import Text, make_windows

TEXT = "The tide leaves twice a day and comes back twice, and nobody in the village has ever been late for it. " * 12


@pytest.fixture(scope="module")
def subject():
    model = tiny_llama()
    windows = make_windows(Text(TEXT, "test", "none"), tiny_tokenizer(), window=48, windows=3)
    return anatomy.examine(model), windows


def dense_logits(model, windows):
    with torch.no_grad():
        return model(input_ids=windows.inputs).logits.double()[windows.scored]


def test_every_figure_equals_the_dense_fp64_one(subject):
    found_anatomy, windows = subject
    evaluator = Evaluator(found_anatomy, windows, rows=16)
    reference = evaluator.reference()
    clean = dense_logits(found_anatomy.model, windows).log_softmax(-1)
    with SignFlip(rate=0.2, seed=1).applied(found_anatomy):
        found = compare(evaluator, reference)
        now = dense_logits(found_anatomy.model, windows).log_softmax(-1)
    targets = windows.targets[windows.scored][:, None]
    delta = clean.gather(-1, targets) - now.gather(-1, targets)
    np.testing.assert_allclose(found.nll, delta.squeeze(-1).numpy(), atol=2e-6)
    np.testing.assert_allclose(found.kl_forward, (clean.exp() * (clean - now)).sum(-1).numpy(), atol=2e-6)
    np.testing.assert_allclose(found.kl_reverse, (now.exp() * (now - clean)).sum(-1).numpy(), atol=2e-6)
    assert (found.same_top == (clean.argmax(-1) == now.argmax(-1)).numpy()).all()
    assert 0 < found.top1_agreement < 1
    counts = windows.scored.sum(1).numpy()
    assert (np.bincount(found.window) == counts).all()


def test_the_clean_model_agrees_with_itself_exactly(subject):
    found_anatomy, windows = subject
    evaluator = Evaluator(found_anatomy, windows)
    found = compare(evaluator, evaluator.reference())
    assert not found.nll.any()
    assert not found.kl_forward.any()
    assert not found.kl_reverse.any()
    assert found.top1_agreement == 1


def test_quantiles_are_those_of_the_sorted_values():
    values = np.arange(1001, dtype=np.float64)
    assert quantiles(values).values == pytest.approx((500, 900, 990, 999))
    assert quantiles(values).maximum == 1000
