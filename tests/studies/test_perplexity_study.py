"""Perplexities against dense sums and their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from small_study import bits, calibration, cut, differing, loaded_llama

from ternary_probe.errors import ProbeError
from ternary_probe.records import PerplexityRecord
from ternary_probe.studies.perplexity import run_perplexity
from ternary_probe.text import Windows


def dense_sums(model: torch.nn.Module, windows: Windows) -> np.ndarray:
    with torch.no_grad():
        log_p = torch.cat([model(ids[None], use_cache=False).logits.double().log_softmax(-1) for ids in windows.inputs])
    return -(log_p.gather(-1, windows.targets[..., None])[..., 0] * windows.scored).sum(1).numpy()


@pytest.mark.parametrize("how", [{}, {"protocol": "rolling"}, {"protocol": "strided", "stride": 8}], ids=str)
def test_token_word_and_byte_perplexity_share_one_sum(how):
    loaded, windows = loaded_llama(), cut(4, **how)

    record = run_perplexity(loaded, windows)

    total, protocol = dense_sums(loaded.model, windows).sum(), windows.protocol
    assert record.tokens_scored == protocol.tokens_scored == int(windows.scored.sum())
    assert record.nll == pytest.approx(total / record.tokens_scored, rel=1e-6)
    assert record.token_perplexity == pytest.approx(math.exp(total / record.tokens_scored), rel=1e-5)
    assert record.word_perplexity == pytest.approx(math.exp(total / protocol.words), rel=1e-4)
    assert record.byte_perplexity == pytest.approx(math.exp(total / protocol.bytes), rel=1e-5)
    assert record.timing is not None
    assert record.timing.evaluations == 1


def test_the_interval_is_students_t_over_windows_on_the_nll():
    loaded, windows = loaded_llama(), cut(6)

    record = run_perplexity(loaded, windows)

    means = dense_sums(loaded.model, windows) / 31
    low, high = stats.t.interval(0.95, 5, loc=means.mean(), scale=stats.sem(means))
    assert (record.ci_low, record.ci_high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-5)
    assert record.nll_windows == pytest.approx(means, rel=1e-6)


def test_one_window_gives_no_interval_and_says_so():
    record = run_perplexity(loaded_llama(), cut(1))

    assert (record.ci_low, record.ci_high) == (None, None)
    assert any("one window" in note for note in record.notes)


def test_a_perplexity_that_overflows_is_null_and_the_nll_stays():
    loaded = loaded_llama()
    with torch.no_grad():
        loaded.model.lm_head.weight *= 1000

    record = run_perplexity(loaded, cut(2))

    assert record.nll > 710
    assert record.token_perplexity is None
    assert record.word_perplexity is None


def test_a_recipe_is_applied_while_scoring_and_undone():
    loaded, windows = loaded_llama(), cut(3)
    before = bits(loaded.model)

    record = run_perplexity(loaded, windows, recipe="sign_flip:rate=0.2,seed=1")

    assert differing(loaded.model, before) == []
    assert abs(record.nll - run_perplexity(loaded, windows).nll) > 1e-3
    assert record.notes[0] == "perturbed while scored: sign_flip:rate=0.2,columns=all,matching=rate,seed=1"


def test_a_recipe_on_outlier_columns_is_measured_on_the_calibration_text():
    loaded, windows = loaded_llama(), cut(3)
    recipe = "sign_flip:rate=1,columns=outlier,fraction=0.1"

    record = run_perplexity(loaded, windows, recipe=recipe, calibration=lambda: calibration(windows))

    assert record.nll != run_perplexity(loaded, windows).nll
    with pytest.raises(ProbeError, match=r"call recipe.resolve\(model, calibration\) first"):
        run_perplexity(loaded, windows, recipe=recipe)


def test_a_recipe_without_effect_is_an_error():
    with pytest.raises(ProbeError, match="raise the rate"):
        run_perplexity(loaded_llama(), cut(2), recipe="sign_flip:rate=0.0000001")


def test_a_text_without_words_has_no_word_perplexity():
    windows = cut(2)
    wordless = replace(windows, protocol=windows.protocol.model_copy(update={"words": 0}))

    assert run_perplexity(loaded_llama(), wordless).word_perplexity is None


def test_the_record_survives_json():
    record = run_perplexity(loaded_llama(), cut(2, protocol="rolling"))

    assert PerplexityRecord.model_validate_json(record.model_dump_json()) == record
