"""Base against candidate, token by token, against dense logits in fp64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gates.candidates import OPTIONS, candidate_of, noisy, permuted, subject, with_nan
from small_study import loaded_llama, speaking_llama, tokenizer
from tiny import tiny_llama_folder, tiny_tokenizer

from ternary_probe.anatomy import NonFiniteError
from ternary_probe.errors import ProbeError
from ternary_probe.gates import GateOptions, Subject
from ternary_probe.gates._comparison import compare
from ternary_probe.loading import load, wrap
from ternary_probe.text import Windows


def dense(loaded, windows: Windows) -> torch.Tensor:
    """Log-probabilities of every scored token in fp64, ``[tokens, vocabulary]``."""
    with torch.no_grad():
        return loaded.model(windows.inputs).logits.double().log_softmax(-1)[windows.scored]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        GateOptions(window=32, windows=4, head_bytes=1),
        GateOptions(window=24, windows=5, protocol="strided"),
        GateOptions(window=32, windows=3, bos="every_window"),
    ],
    ids=["default", "small chunks", "strided", "bos"],
)
def test_every_figure_is_that_of_dense_logits(options: GateOptions) -> None:
    base, candidate = loaded_llama(), candidate_of(noisy(0.1))
    sides = subject(base, options), subject(candidate, options)
    found = compare(*sides)
    windows = sides[0].windows
    clean, now = dense(base, windows), dense(candidate, windows)
    targets = windows.targets[windows.scored][:, None]
    tops = [side.sort(-1, descending=True) for side in (clean, now)]

    expected = {
        "base_nll": -clean.gather(-1, targets)[:, 0],
        "candidate_nll": -now.gather(-1, targets)[:, 0],
        "delta_nll": (clean - now).gather(-1, targets)[:, 0],
        "kl": (clean.exp() * (clean - now)).sum(-1),
        "base_margin": tops[0].values[:, 0] - tops[0].values[:, 1],
        "candidate_margin": tops[1].values[:, 0] - tops[1].values[:, 1],
        "kept_margin": now.gather(-1, tops[0].indices[:, :1])[:, 0] - now.gather(-1, tops[0].indices[:, 1:2])[:, 0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value.numpy(), atol=1e-6, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found.same_top, (tops[0].indices[:, 0] == tops[1].indices[:, 0]).numpy())
    assert 0.2 < found.same_top.mean() < 1
    np.testing.assert_array_equal(np.stack([found.window, found.position]), windows.scored.nonzero().T.numpy())
    assert found.tokens == windows.protocol.tokens_scored
    assert not found.identical


def test_window_and_block_means_are_those_of_their_tokens() -> None:
    found = compare(subject(loaded_llama()), subject(candidate_of(noisy(0.1))))
    sums = found.window_sums(found.kl)

    assert found.windows == 10
    for index in range(found.windows):
        assert sums[index] == pytest.approx(found.kl[found.window == index].sum(), rel=1e-12)
    blocks = found.blocks(found.kl, size=8)
    assert len(blocks) == 10 * 4
    for block in blocks:
        inside = (found.window == block.window) & (found.position >= block.first) & (found.position <= block.last)
        assert block.last - block.first < 8
        assert block.mean == pytest.approx(found.kl[inside].mean(), rel=1e-12)


def test_a_model_against_itself_differs_in_nothing() -> None:
    found = compare(subject(loaded_llama()), subject(loaded_llama()))

    assert found.identical
    assert not found.kl.any()
    assert found.same_top.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_lossless_change_moves_no_mean_beyond_a_few_noise_floors(dtype: torch.dtype) -> None:
    found = compare(subject(loaded_llama(dtype)), subject(candidate_of(permuted, dtype=dtype)))

    # Some CPUs' bf16 kernels sum in fp32 and round the difference away.
    assert dtype == torch.bfloat16 or not found.identical
    assert 0 < found.nll_floor < (1e-5 if dtype == torch.float32 else 0.1)
    assert abs(found.delta_nll.mean()) < 5 * found.nll_floor
    assert found.kl.mean() < 5 * found.kl_floor


def test_a_packed_candidate_is_scored_whole_and_says_so(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the packed format is bitsandbytes'")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    assert bitsandbytes
    folder = tiny_llama_folder(tmp_path, hidden_size=64, intermediate_size=128)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    base, candidate = load(str(folder), device="cpu"), wrap(packed, tiny_tokenizer(), name="nf4")
    sides = subject(base), subject(candidate)

    found = compare(*sides)

    clean, now = dense(base, sides[0].windows), dense(candidate, sides[0].windows)
    np.testing.assert_allclose(found.kl, (clean.exp() * (clean - now)).sum(-1).numpy(), atol=1e-6)
    assert "a whole window at a time" in found.notes[0]
    assert found.kl.mean() > 0


def test_a_candidate_that_computes_nan_is_named() -> None:
    with pytest.raises(NonFiniteError, match=r"candidate.*layers\.1\.mlp\.up_proj"):
        compare(subject(loaded_llama()), subject(candidate_of(with_nan)))


def test_a_base_that_computes_nan_is_no_fault_of_the_candidates() -> None:
    with pytest.raises(ProbeError, match=r"the base .* is broken") as error:
        compare(subject(candidate_of(with_nan)), subject(loaded_llama()))

    assert not isinstance(error.value, NonFiniteError)


def test_a_broken_candidate_of_a_broken_base_is_still_broken() -> None:
    with pytest.raises(NonFiniteError, match="candidate"):
        compare(subject(candidate_of(with_nan)), subject(candidate_of(with_nan)))


def test_another_vocabulary_is_refused() -> None:
    other = wrap(speaking_llama(vocab_size=264), tokenizer(), name="other")

    with pytest.raises(ProbeError, match="has 256 logits and other 264"):
        compare(subject(loaded_llama()), subject(other))


def test_another_tokenizer_is_refused() -> None:
    words = tiny_tokenizer()
    words.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    other = wrap(speaking_llama(), words, name="other")

    with pytest.raises(ProbeError, match="cut text into different tokens"):
        compare(subject(loaded_llama()), subject(other))


def test_a_candidate_without_tokenizer_reads_its_bases_tokens() -> None:
    bare = wrap(candidate_of(noisy(0.1)).model, None, name="bare")
    with_tokenizer = compare(subject(loaded_llama()), subject(candidate_of(noisy(0.1))))

    found = compare(subject(loaded_llama()), subject(bare))

    np.testing.assert_array_equal(found.kl, with_tokenizer.kl)


def test_what_was_read_is_counted() -> None:
    sides = subject(loaded_llama()), subject(candidate_of(noisy(0.1)))
    compare(*sides)

    assert [side.evaluator.evaluations for side in sides] == [1, 1]
    assert isinstance(sides[0], Subject)


@pytest.mark.cuda
def test_cuda_gives_the_cpus_figures() -> None:
    def on(device: str) -> list[Subject]:
        models = (speaking_llama().to(device), candidate_of(noisy(0.1)).model.to(device))
        return [subject(wrap(model, tokenizer())) for model in models]

    ours, theirs = compare(*on("cpu")), compare(*on("cuda"))

    np.testing.assert_allclose(theirs.delta_nll, ours.delta_nll, atol=2e-3)
    np.testing.assert_allclose(theirs.kl, ours.kl, atol=2e-3)
    assert compare(on("cuda")[0], on("cuda")[0]).identical
