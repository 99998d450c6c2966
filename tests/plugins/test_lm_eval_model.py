"""The model class: lm-eval's figures without a recipe, the library's under one, bounded memory, weights restored."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness_tasks import DOCUMENTS, TEXT, choice_task, choices, dense_nll, evaluate, harness, rolling, text_task
from lm_eval.api.instance import Instance
from small_study import bits, differing, loaded_llama, speaking_llama, tokenizer
from ternary_probe_lm_eval import DocumentLogLikelihood, TernaryProbeLM, as_lm
from ternary_probe_lm_eval import task_recipes as recipes_of_tasks
from ternary_probe_lm_eval.document import WindowNll
from ternary_probe_lm_eval.heads import WholeLogits
from ternary_probe_lm_eval.scoring import Scorer, Span, spans_of
from tiny import tiny_gguf, tiny_llama_folder, tiny_tokenizer

from ternary_probe.errors import ProbeError
from ternary_probe.perturb import checksum, parse
from ternary_probe.studies.perplexity import run_perplexity
from ternary_probe.text import Text, calibration_windows, make_windows, read_text

EXACT = {"rel": 1e-6, "abs": 0}
FLIP = "sign_flip:rate=0.2,seed=3"


def lm_of(model=None, **options) -> TernaryProbeLM:
    return as_lm(model if model is not None else speaking_llama(), tokenizer(), **options)


# ---- the same figures as lm-eval's own model


@pytest.mark.parametrize("batch_size", [1, 3])
def test_documents_score_as_in_lm_eval_with_a_float32_softmax(batch_size):
    model = speaking_llama()
    theirs = harness(model, tokenizer(), batch_size=batch_size).loglikelihood_rolling(rolling())
    ours = lm_of(model, batch_size=batch_size).loglikelihood_rolling(rolling())
    assert [float(value) for value in ours] == pytest.approx([float(value) for value in theirs], **EXACT)
    assert [value.tokens for value in ours] == [len(tokenizer()(text)["input_ids"]) for text in DOCUMENTS]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_score_as_in_lm_eval_with_a_float32_softmax(batch_size):
    model = speaking_llama()
    odd = [{"question": "", "choices": [" a", "</s> b"]}, {"question": TEXT[:700], "choices": [TEXT[700:760], "."]}]
    requests = choices() + choices(odd, "odd")
    theirs = harness(model, tokenizer(), batch_size=batch_size).loglikelihood(requests, disable_tqdm=True)
    ours = lm_of(model, batch_size=batch_size).loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], **EXACT)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_greedy_answers_are_recognized():
    model = speaking_llama()
    words = tokenizer()
    context = TEXT[:120]
    ids = words(context)["input_ids"]
    with torch.no_grad():
        best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    lm = lm_of(model)
    ((value, greedy), (_, other)) = lm._loglikelihood_tokens(
        [(None, ids, [best]), (None, ids, [(best + 1) % 200])], True
    )
    assert (greedy, other) == (True, False)
    # Logits reach 9 here, where the last bit of a float32 is 1e-6, and CPUs sum in different orders.
    assert value == pytest.approx(-dense_nll(model, ids, [best]), abs=4e-6)


def test_a_whole_run_gives_lm_evals_accuracies_and_perplexities():
    model = speaking_llama()
    theirs = evaluate(harness(model, tokenizer()), text_task(), choice_task())["results"]
    ours = evaluate(lm_of(model), text_task(), choice_task())["results"]
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["questions"][metric] == theirs["questions"][metric]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert ours["texts"][metric] == pytest.approx(theirs["texts"][metric], rel=1e-5)


@pytest.mark.parametrize(("window", "length"), [(16, 40), (16, 32), (16, 9), (16, 16), (128, 300)])
def test_every_token_is_scored_once_with_lm_evals_context(window, length):
    model = speaking_llama()
    ids = tokenizer()(TEXT)["input_ids"][:length]
    text = tokenizer().decode(ids)
    assert tokenizer()(text)["input_ids"] == ids
    expected, prefixed = 0.0, [tokenizer().bos_token_id, *ids]
    for start in range(0, length, window):
        end = min(start + window, length)
        first = max(0, end - window)  # the last window is filled up with earlier tokens
        expected += dense_nll(model, prefixed[first:end], ids[start:end])
    (found,) = lm_of(model, window=window).loglikelihood_rolling(rolling([text]))
    assert -found == pytest.approx(expected, rel=1e-5)
    assert found.tokens == length
    assert [w.tokens for w in found.windows] == [min(window, length - start) for start in range(0, length, window)]


@pytest.mark.parametrize(
    "options",
    [
        {"window": 32},
        {"window": 32, "bos": "none"},
        {"window": 32, "bos": "every_window"},
        {"window": 32, "stride": 8},
        {"window": 32, "stride": 8, "bos": "every_window"},
        {"window": 32, "stride": 31, "bos": "once"},
    ],
    ids=str,
)
def test_documents_score_as_ternary_probe_perplexity_does_under_every_protocol(options):
    loaded = loaded_llama()
    text = Text(TEXT[:2000], "text", "as is")
    lm = TernaryProbeLM(loaded, **options)
    (found,) = lm.loglikelihood_rolling(rolling([text.content]))
    how = {name: options[name] for name in ("window", "stride") if name in options}
    protocol = "strided" if "stride" in options else ("disjoint" if "bos" in options else "rolling")
    windows = make_windows(text, tokenizer(), protocol=protocol, bos=options.get("bos", "none"), **how)
    record = run_perplexity(loaded, windows)
    assert found.nll == pytest.approx(record.nll * record.tokens_scored, **EXACT)
    assert found.tokens == record.tokens_scored
    assert (found.words, found.bytes) == (windows.protocol.words, windows.protocol.bytes)
    assert [w.nll / w.tokens for w in found.windows] == pytest.approx(list(record.nll_windows), **EXACT)
    assert lm.score_windows(lm.cut(text)).nll == pytest.approx(found.nll, **EXACT)


@pytest.mark.parametrize(
    "options", [{"bos": "none"}, {"bos": "every_window"}, {"stride": 8}, {"stride": 31, "bos": "once"}], ids=str
)
def test_a_document_shorter_than_a_window_is_scored_whole(options):
    model = speaking_llama()
    text = TEXT[:40]
    ids = tokenizer()(text)["input_ids"]
    lead = [tokenizer().bos_token_id] if options.get("bos", "none") != "none" else []
    (found,) = lm_of(model, window=32, **options).loglikelihood_rolling(rolling([text]))
    assert len(ids) < 32
    assert found.tokens == len(ids) - 1 + len(lead)
    assert found.nll == pytest.approx(dense_nll(model, [*lead, *ids[:-1]], ids[1 - len(lead) :]), rel=1e-5)


def test_bf16_logits_are_summed_in_float64_and_lm_evals_default_is_not():
    model = speaking_llama(torch.bfloat16)
    (found,) = lm_of(model, window=128).loglikelihood_rolling(rolling([TEXT[:900]]))
    windows = lm_of(model, window=128).cut(Text(TEXT[:900], "t", "t"))
    expected = 0.0
    for inputs, targets, scored in zip(windows.inputs, windows.targets, windows.scored, strict=True):
        n = int(scored.sum())
        expected += dense_nll(model, inputs.tolist(), targets.tolist()[-n:])
    assert found.nll == pytest.approx(expected, **EXACT)
    (coarse,) = harness(model, tokenizer(), softmax_dtype=None, max_length=128).loglikelihood_rolling(
        rolling([TEXT[:900]])
    )
    assert abs(-coarse - expected) > 1e-4 * expected  # the trap: totals of 8 bits


def test_a_float64_softmax_removes_the_bias_that_float32_shares_with_lm_eval():
    model = speaking_llama(vocab_size=49152)
    text = Text(TEXT[:900], "t", "t")
    windows = lm_of(model).cut(text)
    exact = sum(
        dense_nll(model, inputs.tolist(), targets[scored].tolist())
        for inputs, targets, scored in zip(windows.inputs, windows.targets, windows.scored, strict=True)
    )
    wide, narrow = (lm_of(model, softmax_dtype=dtype) for dtype in ("float64", "float32"))
    (theirs,) = harness(model, tokenizer()).loglikelihood_rolling(rolling([text.content]))
    assert wide.score_windows(windows).nll == pytest.approx(exact, rel=1e-7)
    assert narrow.score_windows(windows).nll == pytest.approx(-theirs, **EXACT)
    record = run_perplexity(narrow.loaded, windows)
    assert wide.score_windows(windows).nll == pytest.approx(record.nll * record.tokens_scored, **EXACT)


def test_the_softmax_may_be_wider_and_never_narrower_than_the_logits():
    wide = lm_of(softmax_dtype="float64")
    assert wide.scorer.softmax_dtype == torch.float64
    assert wide.get_model_info()["ternary_probe"]["protocol"]["softmax_dtype"] == "float64"
    narrow = lm_of(softmax_dtype="bfloat16").loglikelihood_rolling(rolling())
    assert narrow == lm_of().loglikelihood_rolling(rolling())
    with pytest.raises(ProbeError, match="softmax_dtype=auto"):
        lm_of(softmax_dtype="auto")


# ---- memory


class Seen:
    """A head that keeps the sizes of what goes through it."""

    def __init__(self, head):
        self.head, self.rows, self.states_seen = head, [], []

    def states(self, ids):
        self.states_seen.append(tuple(ids.shape))
        return self.head.states(ids)

    def logits(self, states):
        self.rows.append(len(states))
        return self.head.logits(states)


def test_logits_are_held_in_chunks_sized_in_bytes_whatever_the_batch():
    model = speaking_llama(vocab_size=8192)
    loads = {}
    for mib in (1, 40):
        lm = lm_of(model, batch_size=4, head_mib=mib)
        lm.scorer.head = seen = Seen(lm.scorer.head)
        loads[mib] = lm.loglikelihood_rolling(rolling())
        assert max(seen.rows) * 8192 * 4 <= mib << 20
        assert max(batch for batch, _ in seen.states_seen) == 4
    assert [float(v) for v in loads[1]] == pytest.approx([float(v) for v in loads[40]], **EXACT)


def test_only_the_rows_of_the_answers_go_through_the_head_and_equal_inputs_run_once():
    lm = lm_of()
    lm.scorer.head = seen = Seen(lm.scorer.head)
    ids = tokenizer()(TEXT[:120])["input_ids"]
    same = [(None, ids, [token]) for token in (5, 6, 7)] + [(None, [*ids, 9], [5])]
    answers = lm._loglikelihood_tokens(same, disable_tqdm=True)
    assert len(seen.states_seen) == 2
    assert sum(seen.rows) == 2
    assert answers[0] != answers[1]
    longer = [(None, ids[:-2], [*ids[-2:], 8]), (None, ids, [8])]  # one input, cut at two places
    seen.rows.clear()
    values = lm._loglikelihood_tokens(longer, disable_tqdm=True)
    assert sum(seen.rows) == 3
    assert -values[0][0] == pytest.approx(dense_nll(lm.loaded.model, ids, [*ids[-2:], 8]), rel=1e-5)
    assert -values[1][0] == pytest.approx(dense_nll(lm.loaded.model, ids, [8]), rel=1e-5)


def test_a_head_that_cannot_be_told_apart_is_used_whole_and_said():
    lm = lm_of()
    whole = Scorer(WholeLogits(lm.loaded.model), device=torch.device("cpu"), vocab_size=256, head_bytes=1 << 20)
    spans = spans_of(lm.cut(Text(TEXT[:900], "t", "t")))
    for ours, theirs in zip(
        lm.scorer.score(spans, every_greedy=True), whole.score(spans, every_greedy=True), strict=True
    ):
        assert ours.log_likelihoods.tolist() == pytest.approx(theirs.log_likelihoods.tolist(), rel=1e-5)
        assert torch.equal(ours.greedy, theirs.greedy)


def test_padding_of_a_batch_does_not_reach_the_scores():
    lm = lm_of()
    ids = torch.tensor(tokenizer()(TEXT[:300])["input_ids"])
    spans = [Span(ids[:n], n - 3, torch.arange(n - 3, n), ids[n - 2 : n + 1]) for n in (90, 20, 55)]
    together = lm.scorer.score(spans, every_greedy=True)
    for span, score in zip(spans, together, strict=True):
        (alone,) = lm.scorer.score([span], every_greedy=True)
        assert score.log_likelihoods.tolist() == pytest.approx(alone.log_likelihoods.tolist(), rel=1e-5)
        assert torch.equal(score.greedy, alone.greedy)


# ---- perturbations


def test_a_recipe_holds_while_scoring_and_every_bit_is_restored():
    model = speaking_llama()
    before = bits(model)
    lm = lm_of(model, perturb=FLIP)
    found = lm.loglikelihood_rolling(rolling())
    assert not differing(model, before)
    with parse(FLIP).applied(model):
        expected = lm_of(model).loglikelihood_rolling(rolling())
    assert found == expected
    assert found != lm_of(model).loglikelihood_rolling(rolling())
    proof = lm.last_proof
    assert proof.checksum_before == proof.checksum_after != proof.checksum_during


def test_answers_and_generation_are_perturbed_as_well():
    model = speaking_llama()
    request = [
        Instance("generate_until", {}, (TEXT[:100], {"until": ["\n"], "max_gen_toks": 8}), 0, metadata=("g", 0, 1))
    ]
    clean, lm = lm_of(model), lm_of(model, perturb=FLIP)
    before = bits(model)
    answers, text = lm.loglikelihood(choices()), lm.generate_until(request, disable_tqdm=True)
    with parse(FLIP).applied(model):
        assert answers == clean.loglikelihood(choices())
        assert text == clean.generate_until(request, disable_tqdm=True)
    assert answers != clean.loglikelihood(choices())
    assert text != clean.generate_until(request, disable_tqdm=True)
    assert not differing(model, before)


def test_one_model_is_perturbed_in_turn_and_never_twice_at_once():
    model = speaking_llama()
    before = bits(model)
    lm = lm_of(model)
    clean = lm.loglikelihood_rolling(rolling())
    values = {}
    for recipe in (FLIP, "ternarize", "magnitude:rate=0.2"):
        with lm.perturbed(recipe) as done:
            assert done.changed > 0
            values[recipe] = lm.loglikelihood_rolling(rolling())
            with pytest.raises(ProbeError, match="only one at a time"), lm.perturbed("ternarize"):
                pass
            assert lm.get_model_info()["ternary_probe"]["perturbation"]["checksum_after"] is None
        assert not differing(model, before)
    assert len({tuple(map(float, v)) for v in [clean, *values.values()]}) == 4
    with pytest.raises(KeyboardInterrupt), lm.perturbed(FLIP):
        raise KeyboardInterrupt
    assert not differing(model, before)
    assert lm.loglikelihood_rolling(rolling()) == clean


def test_a_recipe_given_to_the_model_gives_way_to_one_in_effect():
    lm = lm_of(perturb=FLIP)
    with lm.perturbed("ternarize"):
        found = lm.loglikelihood_rolling(rolling())
    assert found == lm_of(perturb="ternarize").loglikelihood_rolling(rolling())


def test_outlier_columns_are_chosen_where_ternary_probe_perplexity_chooses_them():
    loaded = loaded_llama()
    recipe = "sign_flip:rate=0.3,columns=outlier,fraction=0.2"
    lm = TernaryProbeLM(loaded, perturb=recipe, window=32)
    text = read_text()
    total = len(tokenizer()(text.content)["input_ids"])
    scored = make_windows(text, tokenizer(), protocol="rolling", window=32, windows=total // 32 // 2)
    calibration = calibration_windows(text, tokenizer(), scored)
    assert torch.equal(lm.calibration_windows.inputs, calibration.inputs)
    resolved = lm.resolve(recipe)
    assert resolved == parse(recipe).resolve(loaded.model, calibration)
    assert lm.resolve(recipe) is resolved
    record = run_perplexity(loaded, scored, recipe=recipe, calibration=lambda: calibration)
    with lm.in_effect():
        found = lm.score_windows(scored)
    assert found.nll == pytest.approx(record.nll * record.tokens_scored, **EXACT)
    assert "second half" not in " ".join(lm.notes)
    assert "sample text" in lm.get_model_info()["ternary_probe"]["calibration"]


def test_calibration_may_be_a_file_or_windows(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(TEXT[:3000])
    recipe = "column_flip:columns=outlier,fraction=0.2"
    lm = lm_of(perturb=recipe, calibration=str(file), window=64)
    assert lm.calibration_windows.inputs.shape[1] == 64
    assert lm.resolve(recipe) == parse(recipe).resolve(
        lm.loaded.model, make_windows(read_text(file), tokenizer(), window=64)
    )
    other = make_windows(read_text(), tokenizer(), window=64, windows=2)
    assert lm.resolve(recipe, other) == parse(recipe).resolve(lm.loaded.model, other)
    with lm.in_effect(lambda: pytest.fail("the user's file goes first")):
        assert str(file) in lm.calibration_label
    with pytest.raises(ProbeError, match="cannot be read"):
        lm_of(perturb=recipe, calibration=str(tmp_path / "none.txt")).loglikelihood_rolling(rolling())


def test_a_pattern_that_matches_nothing_is_said_before_anything_is_scored():
    with pytest.raises(ProbeError, match="matches no weight matrix"):
        lm_of(perturb="sign_flip:rate=0.1,include=nonsense*")


def test_results_do_not_depend_on_the_global_random_state():
    model = speaking_llama()
    torch.manual_seed(1)
    first = evaluate(lm_of(model, perturb=FLIP), text_task(), torch_random_seed=5)["results"]["texts"]
    second = evaluate(lm_of(model, perturb=FLIP), text_task(), torch_random_seed=6)["results"]["texts"]
    assert first == second


# ---- per-task handlers


def test_a_tasks_own_handler_answers_its_requests_and_only_those(monkeypatch):
    lm = lm_of()

    def handle(model, requests):
        assert model is lm
        return [float(len(request.args[0])) for request in requests]

    monkeypatch.setattr(recipes_of_tasks, "_handlers", {"own": handle})
    mixed = [request for pair in zip(rolling(task="plain"), rolling(task="own"), strict=True) for request in pair]
    groups = lm.request_groups(mixed)
    assert [(group.handler, len(group.requests)) for group in groups] == [(None, 5), (handle, 5)]
    answers = lm.loglikelihood_rolling(mixed)
    assert answers[1::2] == [float(len(text)) for text in DOCUMENTS]
    assert answers[::2] == lm.loglikelihood_rolling(rolling(task="plain"))


def test_a_handler_that_answers_too_little_is_an_error(monkeypatch):
    monkeypatch.setattr(recipes_of_tasks, "_handlers", {"own": lambda _lm, requests: [0.0] * (len(requests) - 1)})
    with pytest.raises(ValueError, match="zip"):
        lm_of().loglikelihood_rolling(rolling(task="own"))


# ---- what results say


def test_the_results_name_recipe_flips_checksums_and_protocol():
    results = evaluate(lm_of(perturb=FLIP, window=64), text_task(), choice_task())
    found = json.loads(json.dumps(results["config"], allow_nan=False))["ternary_probe"]
    assert found["recipe"] == str(parse(FLIP))
    perturbation = found["perturbation"]
    matrices = [p for n, p in speaking_llama().named_parameters() if p.ndim == 2 and "layers" in n]
    assert perturbation["flips"] == sum(round(0.2 * p.numel()) for p in matrices)
    assert perturbation["checksum_before"] == perturbation["checksum_after"] != perturbation["checksum_during"]
    assert len(perturbation["recipe_sha256"]) == 64
    assert (
        found["protocol"] | {"name": "rolling", "window": 64, "bos": "once", "prefix_text": "<s>"} == found["protocol"]
    )
    assert found["protocol"]["softmax_dtype"] == "float32"
    assert set(found["scored"]) == {"texts", "questions"}
    assert results["config"]["model_num_parameters"] == speaking_llama().num_parameters()


def test_an_inherited_window_is_said_and_a_chosen_one_is_not():
    inherited, chosen = lm_of(), lm_of(window=128)
    for lm in (inherited, chosen):
        lm.loglikelihood_rolling(rolling())
    assert any("window of 128 tokens is the most" in note for note in inherited.notes)
    assert not any("the most this model takes" in note for note in chosen.notes)
    assert lm_of(max_length=64).window == 64


# ---- the value of a document


def test_a_documents_value_survives_pickling_copying_and_json():
    value = DocumentLogLikelihood([WindowNll(1.5, 2, 1.25), WindowNll(2.5, 3, 2.0)], words=4, bytes=20)
    for same in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert type(same) is DocumentLogLikelihood
        assert (same, same.windows, same.words, same.bytes) == (value, value.windows, 4, 20)
    assert json.loads(json.dumps(value)) == -4.0
    assert (value.nll, value.tokens, value.squares) == (4.0, 5, 3.25)
    assert math.isclose(sum([value, value]) / 2, -4.0)
    assert DocumentLogLikelihood() == 0.0


def test_squares_are_those_of_the_tokens():
    lm = lm_of(window=32)
    windows = lm.cut(Text(TEXT[:400], "t", "t"))
    document = lm.score_windows(windows)
    tokens = [s.log_likelihoods for s in lm.scorer.score(spans_of(windows), every_greedy=False)]
    assert [w.squares for w in document.windows] == pytest.approx([float((t**2).sum()) for t in tokens])


# ---- where models come from


def test_a_folder_and_a_gguf_file_are_loaded_as_the_library_loads_them(tmp_path):
    folder = TernaryProbeLM(str(tiny_llama_folder(tmp_path)), device="cpu", dtype="float64")
    assert folder.loaded.source.kind == "folder"
    assert folder.loaded.source.dtype == "float64"
    gguf = TernaryProbeLM(
        str(tiny_gguf(tmp_path / "tiny.gguf")), device="cuda:0" if not torch.cuda.is_available() else "cpu"
    )
    assert gguf.loaded.source.kind == "gguf"
    assert all(math.isfinite(v) for v in gguf.loglikelihood_rolling(rolling()))
    with pytest.raises(ProbeError, match="there is no folder"):
        TernaryProbeLM(str(tmp_path / "none" / "at" / "all"))


def test_a_model_in_memory_takes_no_loading_options_and_another_tokenizer(tmp_path):
    with pytest.raises(ProbeError, match="dtype= concerns loading"):
        lm_of(dtype="bfloat16")
    with pytest.raises(ProbeError, match="quant= concerns loading"):
        lm_of(quant="nf4")
    tiny_tokenizer(adds_bos=True).save_pretrained(tmp_path)
    assert TernaryProbeLM(speaking_llama(), tokenizer=str(tmp_path)).tokenizer("a")["input_ids"][0] == 1
    with pytest.raises(ProbeError, match="cannot be loaded"):
        TernaryProbeLM(speaking_llama(), tokenizer=str(tmp_path / "none"))
    with pytest.raises(ProbeError, match="without a tokenizer"):
        TernaryProbeLM(speaking_llama())


def test_wrapping_leaves_every_weight_and_the_mode_as_they_were():
    model = speaking_llama()
    before = bits(model)
    lm = lm_of(model)
    assert lm.loaded.model is model
    assert not model.training
    lm.loglikelihood(choices())
    assert not differing(model, before)


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_model_is_quantized_while_loading_and_its_packed_weights_are_left_alone(tmp_path, quant):
    folder = str(tiny_llama_folder(tmp_path, hidden_size=64, intermediate_size=128))
    lm = TernaryProbeLM(folder, quant=quant, device="cpu", dtype="float32", window=64)
    (found,) = lm.loglikelihood_rolling(rolling([TEXT[:800]]))
    (dense,) = TernaryProbeLM(folder, device="cpu", dtype="float32", window=64).loglikelihood_rolling(
        rolling([TEXT[:800]])
    )
    assert found != dense
    assert found == pytest.approx(dense, rel=0.02)
    assert found.nll == pytest.approx(
        -harness(lm.loaded.model, tokenizer(), max_length=64).loglikelihood_rolling(rolling([TEXT[:800]]))[0], rel=1e-5
    )
    assert not isinstance(lm.scorer.head, WholeLogits)
    for recipe in ("sign_flip:rate=0.1", "ternarize", "sign_flip:rate=0.1,include=*q_proj*", "outlier_columns:k=4"):
        with pytest.raises(ProbeError, match="stored packed"), lm.perturbed(recipe):
            pass
        with pytest.raises(ProbeError, match="stored packed"):
            TernaryProbeLM(folder, quant=quant, device="cpu", perturb=recipe)
    before = checksum([lm.loaded.model.lm_head.weight])
    with lm.perturbed("sign_flip:rate=0.1,include=lm_head*"):
        (perturbed,) = lm.loglikelihood_rolling(rolling([TEXT[:800]]))
    assert perturbed != found
    assert checksum([lm.loaded.model.lm_head.weight]) == before
    assert lm.get_model_info()["ternary_probe"]["quantization"] == quant


def test_what_cannot_be_quantized_while_loading_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="is a GGUF file"):
        TernaryProbeLM(str(tiny_gguf(tmp_path / "tiny.gguf")), quant="nf4", device="cpu")


def test_a_sum_beyond_float16_is_finite_and_lm_evals_default_is_not():
    model = speaking_llama(torch.float16, max_position_embeddings=8192, num_hidden_layers=1)
    text = TEXT[:11000]
    (found,) = lm_of(model).loglikelihood_rolling(rolling([text]))
    assert len(found.windows) == 1
    assert 65504 < found.nll < math.inf
    (theirs,) = harness(model, tokenizer(), softmax_dtype=None).loglikelihood_rolling(rolling([text]))
    assert theirs == -math.inf  # the trap


# ---- several processes

EVERY_PROCESS = """
import json, sys
sys.path[:0] = {paths!r}
from harness_tasks import DOCUMENTS, choice_task, evaluate, text_task
from ternary_probe_lm_eval import TernaryProbeLM
lm = TernaryProbeLM({folder!r}, device="cpu", perturb={recipe!r})
results = evaluate(lm, text_task(DOCUMENTS[:1] + DOCUMENTS[2:]), choice_task())
if results is not None:
    print(json.dumps([lm.world_size, results["results"]["texts"], results["results"]["questions"]["acc,none"]]))
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    folder, tests = tmp_path / "model", Path(__file__).parent
    speaking_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    root = tests.parents[1]
    paths = [str(path) for path in (tests, tests.parent, root, root / "plugins")]
    script = tmp_path / "run.py"
    script.write_text(EVERY_PROCESS.format(paths=paths, folder=str(folder), recipe=FLIP))
    found = []
    for count in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(count),
            "--standalone",
            str(script),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        size, texts, accuracy = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
        assert size == count
        found.append((texts["bits_per_byte,none"], accuracy))
    assert found[0] == pytest.approx(found[1], rel=1e-12)
