"""What keeps plausible wrong numbers out: caches, re-tied heads, NaN, one answer for everything, BOS twice, overflow."""

from __future__ import annotations

import json
import math

import pytest
import torch
import zoo
from harness_tasks import QUESTIONS, TEXT, choice_task, choices, evaluate, harness, rolling, text_task
from lm_eval.api.model import CacheHook, CachingLM
from small_study import bits, differing, speaking_llama, tokenizer
from ternary_probe_lm_eval import DocumentLogLikelihood, TernaryProbeLM, as_lm, task_recipes
from ternary_probe_lm_eval.document import WindowNll
from ternary_probe_lm_eval.protection import (
    FINGERPRINT,
    CacheError,
    RetiedError,
    guard_cache,
    ties_kept,
    weights_checksum,
)
from ternary_probe_lm_eval.watch import constant_argmax, describe_choices
from tiny import tiny_tokenizer

from ternary_probe.errors import ProbeError

FLIP = "sign_flip:rate=0.2,seed=3"


def lm_of(model=None, words=None, **options) -> TernaryProbeLM:
    return as_lm(model if model is not None else speaking_llama(), words or tokenizer(), **options)


def config(lm: TernaryProbeLM) -> dict:
    return lm.get_model_info()["ternary_probe"]


# ---- response caches


def test_lm_evals_own_model_is_served_another_models_answers(tmp_path):
    """The trap: its cache keys do not name the model."""
    cache = str(tmp_path / "answers")
    first = evaluate(harness(speaking_llama(), tokenizer()), text_task(), use_cache=cache)["results"]["texts"]
    second = evaluate(harness(speaking_llama(seed=5), tokenizer()), text_task(), use_cache=cache)["results"]["texts"]
    assert first["bits_per_byte,none"] == second["bits_per_byte,none"]


@pytest.mark.parametrize("task", [text_task(), choice_task()], ids=["texts", "questions"])
def test_two_recipes_never_share_a_cache_and_one_recipe_does(tmp_path, task):
    cache, model = str(tmp_path / "answers"), speaking_llama()
    first = evaluate(lm_of(model, perturb=FLIP), task, use_cache=cache)["results"]
    for other in (lm_of(model), lm_of(model, perturb="ternarize"), lm_of(model, perturb=FLIP.replace("3", "4"))):
        with pytest.raises(CacheError, match="give each its own --use_cache path"):
            evaluate(other, task, use_cache=cache)
    again = lm_of(model, perturb=FLIP)
    again.loglikelihood = again.loglikelihood_rolling = lambda _requests: pytest.fail("the answers are in the cache")
    assert evaluate(again, task, use_cache=cache)["results"] == first


@pytest.mark.parametrize(
    "other",
    [
        lambda: lm_of(speaking_llama(seed=5)),
        lambda: lm_of(window=64),
        lambda: lm_of(bos="none"),
        lambda: lm_of(softmax_dtype="float64"),
        lambda: lm_of(max_length=64),
        lambda: lm_of(speaking_llama(torch.bfloat16)),
    ],
    ids=["weights", "window", "bos", "softmax", "max_length", "dtype"],
)
def test_another_model_or_protocol_does_not_share_a_cache(tmp_path, other):
    cache = str(tmp_path / "answers")
    evaluate(lm_of(), text_task(), use_cache=cache)
    with pytest.raises(CacheError):
        evaluate(other(), text_task(), use_cache=cache)


def test_a_cache_of_unknown_origin_is_refused(tmp_path):
    cache = str(tmp_path / "answers")
    evaluate(harness(speaking_llama(), tokenizer()), text_task(), use_cache=cache)
    with pytest.raises(CacheError, match="of a model it does not name"):
        evaluate(lm_of(), text_task(), use_cache=cache)


def test_a_perturbation_entered_later_does_not_write_into_an_earlier_cache(tmp_path):
    lm = lm_of()
    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    clean = cached.loglikelihood_rolling(rolling())
    with lm.perturbed(FLIP), pytest.raises(CacheError, match="attached before the recipe changed"):
        lm.loglikelihood_rolling(rolling())
    assert cached.loglikelihood_rolling(rolling()) == clean
    lm.set_cache_hook(CacheHook(None))
    with lm.perturbed(FLIP):
        assert lm.loglikelihood_rolling(rolling()) != clean


def test_what_comes_back_from_a_cache_still_knows_its_tokens(tmp_path):
    cached = CachingLM(lm_of(), str(tmp_path / "answers.db"))
    fresh = cached.loglikelihood_rolling(rolling())
    stored = cached.loglikelihood_rolling(rolling())
    assert [value.windows for value in stored] == [value.windows for value in fresh]


def test_a_task_that_perturbs_by_itself_does_not_take_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(task_recipes, "_handlers", {"arms": lambda _lm, requests: [0.0] * len(requests)})
    cached = CachingLM(lm_of(), str(tmp_path / "answers.db"))
    with pytest.raises(CacheError, match="without --use_cache"):
        cached.loglikelihood_rolling(rolling(task="arms"))


def test_the_fingerprint_names_what_differs():
    answers: dict[str, object] = {}
    guard_cache(answers, {"recipe": None, "weights": "1"})
    guard_cache(answers, {"recipe": None, "weights": "1"})
    assert json.loads(answers[FINGERPRINT]) == {"recipe": None, "weights": "1"}
    with pytest.raises(CacheError, match="weights '1', and this run has '2'"):
        guard_cache(answers, {"recipe": None, "weights": "2"})
    with pytest.raises(CacheError, match="recipe None, and this run has 'x'"):
        guard_cache(answers, {"recipe": "x", "weights": "2"})


def test_every_bit_of_every_weight_is_in_the_checksum_of_a_model():
    model = speaking_llama()
    first = weights_checksum(model)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        kept = flat[-1].item()
        flat[-1] = kept * (1 + 2**-20) + 1e-30
        assert weights_checksum(model) != first
        flat[-1] = kept
    assert weights_checksum(model) == first


# ---- re-tied heads


def untied_in_truth() -> torch.nn.Module:
    """A model whose config says tied, and whose head is another matrix."""
    model = speaking_llama(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone().neg_(), requires_grad=False)
    return model


def test_wrapping_does_not_tie_a_head_again_and_lm_eval_does():
    model = untied_in_truth()
    before = bits(model)
    expected = model(torch.arange(8)[None]).logits
    lm = lm_of(model)
    assert not differing(model, before)
    assert torch.equal(lm.loaded.model(torch.arange(8)[None]).logits, expected)
    harness(model, tokenizer())
    assert differing(model, before) == ["lm_head.weight"]  # the trap


def test_a_head_that_changes_while_the_model_is_wrapped_is_noticed():
    model = untied_in_truth()
    with ties_kept(model):
        model.tie_weights()  # is kept from doing anything
    with pytest.raises(RetiedError, match="changed its head or embedding"), ties_kept(model):
        model.lm_head.weight.data[3, 3] += 1
    with pytest.raises(RetiedError), ties_kept(model):
        model.lm_head.weight = model.model.embed_tokens.weight
    assert "tie_weights" not in vars(model)


def test_a_tied_model_stays_tied():
    model = speaking_llama(tie_word_embeddings=True)
    lm_of(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ---- broken models


def test_nan_logits_are_flagged_though_the_accuracy_looks_plausible():
    model = speaking_llama()
    model.model.norm.weight.data[0] = math.nan
    lm = lm_of(model)
    results = evaluate(lm, text_task(), choice_task())
    accuracy = results["results"]["questions"]["acc,none"]
    assert accuracy == sum(q["answer"] == 0 for q in QUESTIONS) / len(QUESTIONS)  # the trap: a plausible number
    warnings = results["config"]["ternary_probe"]["warnings"]
    assert any("questions: 56 of 56 log-likelihoods are NaN" in warning for warning in warnings)
    assert any("texts: 4 of 5 log-likelihoods are NaN" in warning for warning in warnings)
    assert math.isnan(results["results"]["texts"]["word_perplexity,none"])


def test_a_model_that_predicts_one_token_everywhere_is_flagged():
    model = speaking_llama()
    model.model.norm.weight.data.zero_()
    lm = lm_of(model)
    lm.loglikelihood_rolling(rolling())
    assert any("at every position looked at" in warning for warning in config(lm)["warnings"])
    lm.loglikelihood(choices())
    assert sum("at every position looked at" in warning for warning in config(lm)["warnings"]) == 2
    sound = lm_of()
    sound.loglikelihood_rolling(rolling())
    sound.loglikelihood(choices())
    assert config(sound)["warnings"] == []


def test_a_model_that_always_takes_the_first_answer_is_flagged():
    lm = lm_of()
    scored = lm.loglikelihood(choices())
    ordered = []
    for i, question in enumerate(QUESTIONS):
        by_score = sorted(range(4), key=lambda j, i=i: -scored[4 * i + j][0])
        ordered.append({**question, "choices": [question["choices"][j] for j in by_score]})
    lm.loglikelihood(choices(ordered))
    assert any("answer number 1 is the most likely in all 14 documents" in w for w in config(lm)["warnings"])
    lm.loglikelihood(choices())
    assert config(lm)["warnings"] == []  # the same task, sound this time


def test_few_documents_say_nothing_about_positions():
    assert describe_choices("t", [0, 0, 1, 1], [-1.0, -2.0, -1.0, -2.0]) == []
    many = [i // 2 for i in range(24)]
    assert "number 2" in describe_choices("t", many, [-2.0, -1.0] * 12)[0]
    assert describe_choices("t", many, [-2.0, -1.0] * 11 + [-1.0, -2.0]) == []
    assert "equally likely" in describe_choices("t", many, [-2.0] * 24)[0]
    assert describe_choices("t", [None] * 24, [-2.0, -1.0] * 12) == []


def test_predictions_at_broken_positions_do_not_count_as_constant():
    zeros, fine = torch.zeros(40, dtype=torch.int64), torch.zeros(40)
    assert constant_argmax([zeros], [fine]) == 0
    assert constant_argmax([zeros], [fine + math.nan]) is None
    assert constant_argmax([zeros[:8]], [fine[:8]]) is None
    assert constant_argmax([zeros, torch.ones(1, dtype=torch.int64)], [fine, fine[:1]]) is None


def test_an_overflowing_perplexity_is_infinite_and_keeps_its_nll_where_lm_eval_loses_the_run():
    text = TEXT[:1500].replace(" ", "").replace("\n", "")
    model = speaking_llama()
    with pytest.raises(OverflowError):
        evaluate(harness(model, tokenizer()), text_task([text]))
    lm = lm_of(model)
    results = evaluate(lm, text_task([text]))
    found = results["results"]["texts"]
    (value,) = lm.loglikelihood_rolling(rolling([text]))
    assert found["word_perplexity,none"] == math.inf
    assert found["bits_per_byte,none"] == pytest.approx(value.nll / math.log(2) / len(text.encode()))
    (warning,) = results["config"]["ternary_probe"]["warnings"]
    assert f"NLL {value.nll:.6g} nat over {value.tokens} tokens" in warning


def test_sums_of_documents_overflow_to_infinity_only_when_negated():
    document = DocumentLogLikelihood([WindowNll(1000.0, 1, 1e6)])
    mean = sum([document, document]) / 2
    assert mean == -1000.0
    assert math.exp(-mean) == math.inf
    assert -(sum([document]) / 2) == 500.0
    assert 0.0 + document == document + 0.0 == -1000.0


# ---- documents and BOS


def test_empty_documents_count_no_tokens_and_are_said():
    lm = lm_of(bos="none")
    values = lm.loglikelihood_rolling(rolling(["", "x", TEXT[:100]]))
    assert [v.tokens for v in values][:2] == [0, 0]
    assert [float(v) for v in values][:2] == [0.0, 0.0]
    assert values[2].tokens > 0
    notes = " ".join(config(lm)["notes"])
    assert "is empty" in notes
    assert "too short to predict a token" in notes


def test_an_empty_answer_is_refused_before_anything_is_scored():
    with pytest.raises(ProbeError, match="task questions has an empty answer in document 0"):
        lm_of().loglikelihood(choices([{"question": "q", "choices": ["a", ""]}]))


def test_an_answer_that_melts_into_its_context_is_refused():
    words = tokenizer()
    start = next(
        i for i in range(80) if len(words(TEXT[:i])["input_ids"]) == len(words(TEXT[: i + 1])["input_ids"]) and i
    )
    assert TEXT[start - 1 : start + 1].strip() == TEXT[start - 1 : start + 1]
    with pytest.raises(ProbeError, match="no token of its own behind its context"):
        lm_of().loglikelihood(choices([{"question": TEXT[:start], "choices": [TEXT[start]]}]))


def test_an_answer_that_does_not_fit_is_refused():
    lm = lm_of(max_length=16)
    with pytest.raises(ProbeError, match="max_length is 16"):
        lm.loglikelihood(choices([{"question": "q", "choices": [TEXT[:200]]}]))


def test_a_tokenizer_that_adds_bos_puts_it_once_where_lm_eval_puts_it_twice():
    model, adding = speaking_llama(), tiny_tokenizer(adds_bos=True)
    lm = lm_of(model, adding)
    once = lm.loglikelihood_rolling(rolling([TEXT[:200]]))
    assert once == lm_of(model).loglikelihood_rolling(rolling([TEXT[:200]]))
    theirs = harness(model, adding).loglikelihood_rolling(rolling([TEXT[:200]]))
    assert abs(theirs[0] - once[0]) > 1  # the trap
    assert any("where lm-eval's hf model puts it twice" in note for note in config(lm)["notes"])
    same = harness(model, adding, add_bos_token=False).loglikelihood_rolling(rolling([TEXT[:200]]))
    assert once == pytest.approx(same, rel=1e-6)


def test_a_document_that_begins_with_the_prefix_token_is_said():
    lm = lm_of()
    lm.loglikelihood_rolling(rolling(["<s>" + TEXT[:100]]))
    assert any("which therefore stands twice" in note for note in config(lm)["notes"])


def test_the_prefix_token_is_shown_and_must_exist():
    shown = config(lm_of(prefix_token_id=2))["protocol"]
    assert (shown["prefix_token"], shown["prefix_text"]) == (2, "</s>")
    with pytest.raises(ProbeError, match="prefix_token_id=256"):
        lm_of(prefix_token_id=256)
    assert config(lm_of(bos="none"))["protocol"]["prefix_token"] is None


def test_every_window_gets_a_bos_where_asked():
    lm = lm_of(bos="every_window", window=16)
    lm.scorer.head = Spy(lm.scorer.head)
    lm.loglikelihood_rolling(rolling([TEXT[:300]]))
    assert len(lm.scorer.head.inputs) > 3
    assert all(ids[0, 0] == 1 for ids in lm.scorer.head.inputs)


class Spy:
    def __init__(self, head):
        self.head, self.inputs = head, []

    def states(self, ids):
        self.inputs.append(ids)
        return self.head.states(ids)

    def logits(self, states):
        return self.head.logits(states)


def test_a_window_beyond_learned_positions_is_refused():
    lm = as_lm(zoo.build("gpt2", torch.float32), tokenizer(), window=129)
    with pytest.raises(ProbeError, match="128 learned positions"):
        lm.loglikelihood_rolling(rolling([TEXT[:900]]))


def test_lost_context_is_said():
    lm = lm_of(max_length=32)
    lm.loglikelihood(choices([{"question": TEXT[:300], "choices": [" a", " b"]}]))
    assert any("cut at their beginning" in note for note in config(lm)["notes"])


def test_disjoint_windows_say_that_tokens_are_left_out():
    lm = lm_of(bos="none", window=32)
    lm.loglikelihood_rolling(rolling([TEXT[:300]]))
    assert any("has tokens that are not scored" in note for note in config(lm)["notes"])
