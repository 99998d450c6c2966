"""NLL and KL against dense fp64 sums over the model's own full logits, and against lm-eval."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from small_study import cut, loaded_llama, speaking_llama, tokenizer
from tiny import tiny_llama
from torch import nn

from ternary_probe.anatomy import Anatomy, examine
from ternary_probe.cli.options import HEAD_MIB
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel
from ternary_probe.measure import Evaluator, NonFiniteError, perplexity
from ternary_probe.measure.nll import HEAD_BYTES
from ternary_probe.perturb import SignFlip
from ternary_probe.text import Text, Windows, make_windows, read_text

PROTOCOLS: dict[str, dict[str, Any]] = {
    "disjoint": {},
    "bos-every-window": {"bos": "every_window"},
    "strided": {"protocol": "strided", "stride": 5},
    "rolling": {"protocol": "rolling"},
    "dong2026": {"protocol": "dong2026"},
}


@cache
def zoo_anatomy(name: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """Examined once; nobody edits it."""
    return examine(zoo.build(name, dtype))


@cache
def llama_anatomy() -> Anatomy:
    """Examined once; whoever edits it restores it."""
    return examine(speaking_llama())


@torch.no_grad()
def dense_log_probabilities(model: nn.Module, windows: Windows) -> torch.Tensor:
    """Log-softmax in fp64 of the full logits, window by window, ``[n, L, V]``."""
    return torch.cat([model(ids[None], use_cache=False).logits.double().log_softmax(-1) for ids in windows.inputs])


def dense_nll(model: nn.Module, windows: Windows) -> np.ndarray:
    """Sums of the NLL over each window's scored tokens, fp64."""
    picked = dense_log_probabilities(model, windows).gather(-1, windows.targets[..., None])[..., 0]
    return -(picked * windows.scored).sum(1).numpy()


def dense_kl(clean: torch.Tensor, perturbed: torch.Tensor, windows: Windows) -> np.ndarray:
    per_token = (clean.exp() * (clean - perturbed)).sum(-1)
    return (per_token * windows.scored).sum(1).numpy()


@pytest.mark.parametrize("how", PROTOCOLS.values(), ids=PROTOCOLS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "cohere", "granite", "mixtral", "opt", "gpt_neox"])
def test_nll_equals_the_dense_fp64_sum_for_every_architecture_and_protocol(name, how):
    anatomy = zoo_anatomy(name)
    windows = cut(3, window=29, **how)

    result = Evaluator(anatomy, windows).nll()

    np.testing.assert_allclose(result.sums, dense_nll(anatomy.model, windows), rtol=1e-6)
    assert result.counts.tolist() == windows.scored.sum(1).tolist()
    assert result.mean == pytest.approx(result.sums.sum() / int(windows.scored.sum()), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_are_scored_in_full_precision(dtype):
    model = speaking_llama(dtype)
    windows = cut(4)

    result = Evaluator(examine(model), windows).nll()

    exact = dense_nll(model, windows)  # from the very same half-precision logits
    np.testing.assert_allclose(result.sums, exact, rtol=1e-6)
    with torch.no_grad():
        logits = model(windows.inputs, use_cache=False).logits
    assert logits.dtype == dtype
    rough = -(logits.log_softmax(-1).gather(-1, windows.targets[..., None])[..., 0] * windows.scored).sum(1)
    assert not np.allclose(rough.double().numpy(), exact, rtol=1e-5), "the oracle could not tell a rough softmax"


def test_a_float64_model_is_scored_in_float64():
    model = speaking_llama(torch.float64)
    windows = cut(3)

    np.testing.assert_allclose(Evaluator(examine(model), windows).nll().sums, dense_nll(model, windows), rtol=1e-13)


@pytest.mark.parametrize("how", PROTOCOLS.values(), ids=PROTOCOLS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 17, 31, 41, 1000])
def test_any_head_chunk_gives_the_same_nll(rows, how):
    anatomy = llama_anatomy()
    windows = cut(2, window=96, **how)

    chunked = Evaluator(anatomy, windows, rows=rows).nll()

    np.testing.assert_allclose(chunked.sums, dense_nll(anatomy.model, windows), rtol=1e-6)


@pytest.mark.parametrize("how", PROTOCOLS.values(), ids=PROTOCOLS)
def test_chunks_of_multiples_of_sixteen_rows_give_the_same_bits(how):
    anatomy = llama_anatomy()
    windows = cut(2, window=96, **how)

    results = [Evaluator(anatomy, windows, rows=rows).nll(keep_tokens=True) for rows in (16, 32, 48, 64, 96, 1024)]

    for result in results[1:]:
        assert result.sums.tobytes() == results[0].sums.tobytes()
        for one, other in zip(result.tokens, results[0].tokens, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_windows_in_batches_give_the_same_nll_in_the_same_order(batch):
    anatomy = llama_anatomy()
    windows = cut(5)

    one, many = Evaluator(anatomy, windows).nll(), Evaluator(anatomy, windows, batch=batch).nll()

    np.testing.assert_allclose(many.sums, one.sums, rtol=1e-6)
    assert np.ptp(one.windows) > 1e-3, "windows must differ for an order to show"


def test_per_token_values_are_those_of_the_scored_tokens_in_order():
    model = speaking_llama()
    windows = cut(3, protocol="strided", stride=7)

    result = Evaluator(examine(model), windows).nll(keep_tokens=True)

    exact = -dense_log_probabilities(model, windows).gather(-1, windows.targets[..., None])[..., 0]
    for index, tokens in enumerate(result.tokens):
        np.testing.assert_allclose(tokens, exact[index][windows.scored[index]].numpy(), rtol=1e-5)


class HeadTap:
    """Counts the rows of logits that a model's head makes in one call."""

    def __init__(self, head: nn.Module) -> None:
        self.rows: list[int] = []
        head.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        self.rows.append(output.numel() // output.shape[-1])


def test_full_logits_are_never_materialised():
    model = speaking_llama()
    anatomy = examine(model)
    windows = cut(3, window=96)
    tap = HeadTap(model.lm_head)
    evaluator = Evaluator(anatomy, windows, head_bytes=32 * 4 * anatomy.vocab_size)

    reference = evaluator.reference()
    passes = len(tap.rows)
    evaluator.response(reference)

    assert max(tap.rows) == 32  # clean rows beside perturbed ones count, too
    assert passes == 3 * 96 // 32
    assert len(tap.rows) == 3 * passes  # clean once, then clean and perturbed
    assert sum(state.numel() for state in reference.states) == 3 * 96 * model.config.hidden_size


def test_the_head_is_not_applied_to_tokens_that_are_not_scored():
    model = speaking_llama()
    anatomy = examine(model)
    windows = cut(4, window=96, protocol="strided", stride=16)
    tap = HeadTap(model.lm_head)

    Evaluator(anatomy, windows, rows=16).nll()

    assert sum(tap.rows) < windows.scored.numel() / 1.5
    assert sum(tap.rows) >= int(windows.scored.sum())


@pytest.mark.parametrize("mib", [1, 2, 32])
def test_the_default_chunk_respects_the_bound_and_is_a_multiple_of_sixteen(mib):
    anatomy = examine(tiny_llama(vocab_size=9000))

    evaluator = Evaluator(anatomy, cut(1), head_bytes=mib << 20)

    assert evaluator.rows % 16 == 0
    assert evaluator.chunk_bytes == evaluator.rows * 9000 * 4 <= mib << 20
    assert evaluator.chunk_bytes + 16 * 9000 * 4 > mib << 20


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("rows", [None, 16, 7])
def test_kl_equals_the_dense_fp64_divergence(dtype, rtol, rate, rows):
    model = speaking_llama(dtype)
    anatomy, windows = examine(model), cut(3, window=64)
    evaluator = Evaluator(anatomy, windows, rows=rows)
    reference, clean = evaluator.reference(), dense_log_probabilities(model, windows)

    with SignFlip(rate=rate, seed=3).applied(anatomy):
        response = evaluator.response(reference)
        perturbed = dense_log_probabilities(model, windows)
        exact_nll = dense_nll(model, windows)

    exact = dense_kl(clean, perturbed, windows)
    assert response.kl is not None
    np.testing.assert_allclose(response.kl.sums, exact, rtol=rtol)
    np.testing.assert_allclose(response.nll.sums, exact_nll, rtol=1e-6)
    assert (exact > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_kl_of_the_unperturbed_model_is_exactly_zero(name, dtype):
    evaluator = Evaluator(zoo_anatomy(name, dtype), cut(3, protocol="strided", stride=9))
    reference = evaluator.reference()

    response = evaluator.response(reference)

    assert response.kl is not None
    assert response.kl.sums.tolist() == [0.0] * 3
    assert response.nll.sums.tobytes() == reference.result.sums.tobytes()


@pytest.mark.parametrize("rows", [None, 41])
@pytest.mark.parametrize("entries", [1, 3, 30])
def test_kl_is_positive_and_accurate_for_a_handful_of_flips(entries, rows):
    """The smallest perturbation there is: its KL is far below the rounding of a log-softmax."""
    anatomy, windows = llama_anatomy(), cut(2, window=64)
    model = anatomy.model
    matrix = anatomy.matrix("model.layers.1.mlp.down_proj.weight")
    weakest = matrix.view().abs().flatten().argsort()[:entries]
    evaluator = Evaluator(anatomy, windows, rows=rows)
    reference, clean = evaluator.reference(), dense_log_probabilities(model, windows)
    matrix.flip_signs(weakest)
    try:
        kl = evaluator.response(reference).kl
        exact = dense_kl(clean, dense_log_probabilities(model, windows), windows)
    finally:
        matrix.flip_signs(weakest)

    assert kl is not None
    assert (exact > 0).all()
    assert (exact / kl.counts < 1e-4).all(), "not a small perturbation"
    # 1e-13 nat a token at one entry and 1e-10 at three, where single logits move by less, or little more, than their last bit
    np.testing.assert_allclose(kl.sums, exact, rtol={1: 2e-2, 3: 1e-3, 30: 1e-4}[entries])


def test_kl_of_a_wrecked_model_is_finite_and_right():
    """Log-probabilities hundreds apart: no exponential may overflow."""
    model = speaking_llama()
    anatomy, windows = examine(model), cut(2)
    evaluator = Evaluator(anatomy, windows)
    with torch.no_grad():
        model.lm_head.weight *= 40
    reference, clean = evaluator.reference(), dense_log_probabilities(model, windows)
    with SignFlip(rate=0.5).applied(anatomy):
        kl = evaluator.response(reference).kl
        exact = dense_kl(clean, dense_log_probabilities(model, windows), windows)

    assert kl is not None
    assert exact.max() / kl.counts.max() > 50
    np.testing.assert_allclose(kl.sums, exact, rtol=1e-5)


class Masked(nn.Module):
    """A head that rules out part of the vocabulary, as models with padded vocabularies do."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(states, self.weight)
        logits[..., 250:] = -math.inf
        return logits


def test_tokens_that_the_head_rules_out_count_for_nothing():
    model = speaking_llama()
    anatomy, windows = examine(model), cut(2)
    model.lm_head = Masked(model.lm_head).eval()
    evaluator = Evaluator(anatomy, windows)
    assert int(windows.targets.max()) < 250
    reference = evaluator.reference()
    with torch.no_grad():
        clean = model(windows.inputs).logits.double()[..., :250].log_softmax(-1)
    with SignFlip(rate=0.01).applied(anatomy), torch.no_grad():
        kl = evaluator.response(reference).kl
        perturbed = model(windows.inputs).logits.double()[..., :250].log_softmax(-1)

    assert kl is not None
    np.testing.assert_allclose(kl.sums, dense_kl(clean, perturbed, windows), rtol=2e-6)


class Overflowing(nn.Module):
    """An activation function that overflows at one token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(x)
        x[:, 5, 3] = math.inf
        return x


def test_a_clean_model_that_overflows_is_refused_by_module_token_and_value():
    model = speaking_llama()
    anatomy, windows = examine(model), cut(2)
    model.model.layers[1].mlp.act_fn = Overflowing().eval()

    with pytest.raises(NonFiniteError) as refused:
        Evaluator(anatomy, windows).nll()

    assert "model.layers.1.mlp.act_fn at token 5 (value inf)" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_clean_model_with_a_nan_weight_is_refused_by_weight_and_place():
    model = speaking_llama()
    anatomy, windows = examine(model), cut(2)
    token = int(windows.inputs[0][5])
    with torch.no_grad():
        model.model.embed_tokens.weight[token, 7] = math.nan

    with pytest.raises(NonFiniteError) as refused:
        Evaluator(anatomy, windows).nll()

    assert f"model.embed_tokens.weight holds nan at [{token}, 7]" in str(refused.value)


def test_a_perturbed_non_finite_model_is_a_result_not_an_error():
    model = speaking_llama()
    anatomy, windows = examine(model), cut(2)
    evaluator = Evaluator(anatomy, windows)
    reference = evaluator.reference()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.inf

    response = evaluator.response(reference)
    alone = evaluator.response_without_reference()

    assert not math.isfinite(response.nll.mean)
    assert response.kl is not None
    assert not math.isfinite(response.kl.mean)
    assert not math.isfinite(alone.nll.mean)
    assert alone.kl is None


def test_a_model_whose_head_cannot_be_chunked_is_refused():
    anatomy = examine(speaking_llama())
    check = anatomy.checks["chunked_head"]
    anatomy.checks["chunked_head"] = type(check)("chunked_head", False, 1.0, "it differs")

    with pytest.raises(ProbeError, match="cannot be computed in chunks"):
        Evaluator(anatomy, cut(1))


def test_perplexity_is_null_where_it_overflows():
    assert perplexity(math.log(7.5)) == pytest.approx(7.5)
    assert perplexity(1e4) is None


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_anatomy(demo_model: LoadedModel) -> Anatomy:
    return examine(demo_model.model)


@pytest.fixture(scope="module")
def demo_windows(demo_model: LoadedModel) -> Windows:
    return make_windows(read_text(), demo_model.tokenizer, protocol="strided", window=128, stride=96, windows=2)


@pytest.mark.slow
def test_nll_and_kl_of_the_demo_model_equal_the_dense_fp64_reference(demo_anatomy, demo_windows):
    model = demo_anatomy.model
    evaluator = Evaluator(demo_anatomy, demo_windows, rows=48)

    reference, clean = evaluator.reference(), dense_log_probabilities(model, demo_windows)
    with SignFlip(rate=0.002, seed=1).applied(demo_anatomy):
        response = evaluator.response(reference)
        perturbed = dense_log_probabilities(model, demo_windows)

    picked = clean.gather(-1, demo_windows.targets[..., None])[..., 0]
    np.testing.assert_allclose(reference.result.sums, -(picked * demo_windows.scored).sum(1).numpy(), rtol=1e-6)
    assert response.kl is not None
    np.testing.assert_allclose(response.kl.sums, dense_kl(clean, perturbed, demo_windows), rtol=1e-5)
    assert 2 < reference.result.mean < 6


@pytest.mark.slow
def test_head_chunks_of_the_demo_model_agree_bit_for_bit_at_multiples_of_sixteen(demo_anatomy, demo_windows):
    sixteen, many = (Evaluator(demo_anatomy, demo_windows, rows=rows).nll() for rows in (16, 112))
    odd = Evaluator(demo_anatomy, demo_windows, rows=41, batch=2).nll()

    assert sixteen.sums.tobytes() == many.sums.tobytes()
    np.testing.assert_allclose(odd.sums, sixteen.sums, rtol=1e-6)


# --- lm-eval -------------------------------------------------------------------------------------------------------


def rolling_by_lm_eval(model: Any, tokenizer: Any, content: str, window: int, softmax: str = "float32") -> float:
    """Log-likelihood of one document by the released harness."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=window,
        add_bos_token=False,
        softmax_dtype=softmax,
        batch_size=1,
        device="cpu",
    )
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(content,), idx=0)
    return float(lm.loglikelihood_rolling([request], disable_tqdm=True)[0])


@pytest.mark.parametrize("window", [16, 33, 64])
def test_rolling_nll_equals_lm_eval_on_a_tiny_model(window):
    loaded = loaded_llama()
    content = read_text().content[:700]
    windows = make_windows(Text(content, "start", "as is"), tokenizer(), protocol="rolling", window=window)

    result = Evaluator(examine(loaded.model), windows).nll()

    assert len(windows.inputs) > 2
    assert -result.sums.sum() == pytest.approx(rolling_by_lm_eval(loaded.model, tokenizer(), content, window), rel=1e-6)


@pytest.mark.slow
def test_rolling_nll_of_the_demo_model_equals_lm_eval(demo_model, demo_anatomy):
    content = read_text().content[:1100]
    text = Text(content, "start", "as is")
    windows = make_windows(text, demo_model.tokenizer, protocol="rolling", window=96)

    result = Evaluator(demo_anatomy, windows).nll()

    assert len(windows.inputs) > 2
    # torch's fp32 log_softmax over 49,152 entries is itself off by 2e-5 nat a token on a CPU (5e-6 of this sum)
    expected = rolling_by_lm_eval(demo_model.model, demo_model.tokenizer, content, 96, softmax="float64")
    assert -result.sums.sum() == pytest.approx(expected, rel=1e-6)


def test_command_line_and_library_hold_equally_many_logits_by_default():
    assert HEAD_MIB << 20 == HEAD_BYTES
