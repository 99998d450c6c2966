"""A name becomes a model whose every weight is the checkpoint's, or one sentence on why it does not."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hub_server import COMMIT, serve
from safetensors.torch import load_file, save_file
from tiny import tiny_gguf, tiny_llama, tiny_llama_config, tiny_llama_folder, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ternary_probe.checkpoint import SINGLE
from ternary_probe.errors import ProbeError
from ternary_probe.loading import load, require_tokenizer, wrap

NORM = "model.norm.weight"


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, *, without: str | None = None, **changes: torch.Tensor) -> None:
    tensors = stored_weights(folder) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, folder / SINGLE, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def complaint(source: str | Path, **options: Any) -> str:
    with pytest.raises(ProbeError) as caught:
        load(str(source), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# ---- folders


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_folder_gives_every_stored_bit(tmp_path, dtype, shards):
    folder = tiny_llama_folder(tmp_path, dtype, shards)

    loaded = load(str(folder), device="cpu")

    expected = stored_weights(folder)
    assert expected.keys() == dict(loaded.model.named_parameters()).keys()
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, expected[name]), name
        assert not parameter.requires_grad
    assert not loaded.model.training
    assert loaded.source.kind == "folder"
    assert loaded.source.path == str(folder.resolve())
    assert loaded.source.dtype == str(dtype).removeprefix("torch.")
    assert loaded.source.device == "cpu"
    assert loaded.source.revision is None
    assert loaded.source.notes == ()
    assert loaded.source.config_sha256 == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert require_tokenizer(loaded)("The river")["input_ids"] == tiny_tokenizer()("The river")["input_ids"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
    ],
)
def test_the_dtype_asked_for_is_the_dtype_loaded(tmp_path, name, dtype):
    loaded = load(str(tiny_llama_folder(tmp_path, torch.bfloat16)), dtype=name, device="cpu")

    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert loaded.source.dtype == str(dtype).removeprefix("torch.")


def test_auto_says_when_the_config_overrules_the_stored_dtype(tmp_path):
    folder = tiny_llama_folder(tmp_path, torch.float32)
    edit_config(folder, dtype="float16")

    loaded = load(str(folder), device="cpu")

    assert loaded.source.dtype == "float16"
    assert "21 as F32 are stored, and loaded as float16" in loaded.source.notes[0]


def test_tied_weights_stored_once_are_complete_and_shared(tmp_path):
    folder = tiny_llama_folder(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in stored_weights(folder)

    model = load(str(folder), device="cpu").model

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, stored_weights(folder)["model.embed_tokens.weight"])


def test_a_head_that_is_tied_in_the_config_only_is_kept_apart_and_said(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    edit_config(folder, tie_word_embeddings=True)

    loaded = load(str(folder), device="cpu")

    assert torch.equal(loaded.model.lm_head.weight, stored_weights(folder)["lm_head.weight"])
    assert any("kept apart" in note for note in loaded.source.notes)


def test_a_missing_weight_is_an_error_and_never_random(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    rewrite(folder, without=NORM)

    assert f"lacks 1 weights of the model, which would be random: {NORM}" in complaint(folder)


def test_a_misshapen_weight_is_named_with_both_shapes(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    edit_config(folder, intermediate_size=48)

    message = complaint(folder)

    assert "[32, 64] on disk and [32, 48] in the model (6 such weights)" in message


@pytest.mark.parametrize("name", ["q_proj.bias", "q_proj.weight_scale"])
def test_a_weight_of_a_layer_that_would_be_dropped_is_an_error(tmp_path, name):
    folder = tiny_llama_folder(tmp_path)
    rewrite(folder, **{f"model.layers.0.self_attn.{name}".replace(".", "__"): torch.ones(32)})

    message = complaint(folder)

    assert f"holds 1 weights that its config leaves no place for: model.layers.0.self_attn.{name}" in message


def test_weights_outside_the_model_are_noted(tmp_path, caplog):
    folder = tiny_llama_folder(tmp_path)
    rewrite(folder, vision__tower__weight=torch.ones(3))

    with caplog.at_level(logging.WARNING):
        loaded = load(str(folder), device="cpu")

    assert loaded.source.notes == ("1 tensors on disk are not part of the model: vision.tower.weight",)
    assert "vision.tower.weight" in caplog.text


def test_a_damaged_file_is_found_before_a_model_is_built(tmp_path, monkeypatch):
    folder = tiny_llama_folder(tmp_path)
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was built"))

    assert f"{file} is truncated: 1 of" in complaint(folder)


def test_pickles_need_permission(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    expected = stored_weights(folder)
    torch.save(expected, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()

    assert "--allow-pickle" in complaint(folder)
    model = load(str(folder), device="cpu", allow_pickle=True).model
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_safetensors_win_over_a_pickle_even_where_pickles_are_allowed(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    expected = stored_weights(folder)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, folder / "pytorch_model.bin")

    model = load(str(folder), device="cpu", allow_pickle=True).model

    assert torch.equal(model.model.norm.weight, expected[NORM])
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])


def test_code_of_a_checkpoint_is_not_run_unasked(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})

    assert "--trust-remote-code" in complaint(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))

    assert "is not a causal language model" in complaint(folder)


def test_an_unknown_architecture_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    edit_config(folder, model_type="quux")

    assert "quux" in complaint(folder)


def test_loading_writes_nothing_to_the_terminal(tmp_path, capfd):
    folder = tiny_llama_folder(tmp_path)
    capfd.readouterr()

    load(str(folder), device="cpu")

    assert capfd.readouterr() == ("", "")


# ---- names


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "name is empty"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("./missing", "there is no folder ./missing"),
        ("../missing", "there is no folder ../missing"),
        ("~/no-such-folder-at-all", "there is no folder ~/no-such-folder-at-all"),
        ("missing/", "there is no folder missing/"),
        ("a/b/c", "there is no folder a/b/c"),
        ("missing.gguf", "there is no file missing.gguf"),
        ("not a name!", "neither a folder here nor a model on the Hub"),
        ("org/unknown", "'org/unknown' is neither a folder here nor in the local Hub cache, and HF_HUB_OFFLINE is set"),
        ("gpt2", "'gpt2' is neither a folder here nor in the local Hub cache"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_why(source, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    assert expected in complaint(source)


def test_a_folder_without_config_and_a_bare_file_are_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    assert "give the folder that holds it" in complaint(folder / SINGLE)
    (folder / "config.json").unlink()
    assert "has no config.json" in complaint(folder)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "int7"}, "dtype 'int7' is not known"),
        ({"device": "tpu!"}, "device 'tpu!' is not known"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"device": "cuda:97"}, "device 'cuda:97' cannot be used"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"revision": "main"}, "drop --revision"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_met_is_refused(tmp_path, options, expected):
    assert expected in complaint(tiny_llama_folder(tmp_path), **options)


def test_cuda_without_a_gpu_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert "this machine has no CUDA device" in complaint(tiny_llama_folder(tmp_path), device="cuda")
    assert load(str(tmp_path / "tiny-llama"), device="auto").source.device == "cpu"


@pytest.mark.cuda
def test_a_model_on_cuda_has_the_same_bits_as_on_the_cpu(tmp_path):
    folder = tiny_llama_folder(tmp_path, torch.bfloat16)

    loaded = load(str(folder), device="cuda")

    assert loaded.source.device == "cuda:0"
    expected = stored_weights(folder)
    assert all(torch.equal(parameter.cpu(), expected[name]) for name, parameter in loaded.model.named_parameters())


# ---- device maps and the meta device


def test_a_device_map_is_passed_on(tmp_path):
    loaded = load(str(tiny_llama_folder(tmp_path)), device_map="cpu")

    assert loaded.source.device == "cpu"
    assert not any(parameter.is_meta for parameter in loaded.model.parameters())


def test_offloaded_parameters_are_noted(tmp_path, monkeypatch):
    folder = tiny_llama_folder(tmp_path)
    original = AutoModelForCausalLM.from_pretrained
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}

    def spread(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **(options | {"device_map": device_map, "offload_folder": str(tmp_path / "off")}))

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spread)
    loaded = load(str(folder), device_map="auto")

    assert loaded.source.device == "cpu,disk"
    assert "9 parameters are offloaded by the device map: model.layers.1." in loaded.source.notes[0]
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.model(tokens).logits, tiny_llama()(tokens).logits)


def test_parameters_left_on_meta_without_a_device_map_are_an_error(tmp_path, monkeypatch):
    folder = tiny_llama_folder(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_llama_config())
    info: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, info))

    assert "left 21 parameters on the meta device" in complaint(folder, device="cpu")
    with pytest.raises(ProbeError, match="21 parameters on the meta device"):
        wrap(model)


def test_a_model_in_memory_is_described():
    model = tiny_llama(dtype=torch.bfloat16).train()

    loaded = wrap(model, tiny_tokenizer(), name="mine")

    assert loaded.model is model
    assert not model.training
    assert (loaded.source.name, loaded.source.kind, loaded.source.path) == ("mine", "memory", None)
    assert loaded.source.dtype == "bfloat16"
    assert loaded.source.config_sha256 == wrap(tiny_llama(dtype=torch.bfloat16)).source.config_sha256
    assert (
        loaded.source.config_sha256 != wrap(tiny_llama(dtype=torch.bfloat16, num_hidden_layers=3)).source.config_sha256
    )
    with pytest.raises(ProbeError, match="model in memory came without a tokenizer"):
        require_tokenizer(wrap(model))


# ---- tokenizers


def test_a_missing_tokenizer_is_an_error_only_when_needed(tmp_path):
    loaded = load(str(tiny_llama_folder(tmp_path, tokenizer=False)), device="cpu")

    assert loaded.tokenizer is None
    with pytest.raises(ProbeError, match="has no tokenizer: save one"):
        require_tokenizer(loaded)


def test_a_broken_tokenizer_is_an_error_only_when_needed_and_says_so(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{")

    loaded = load(str(folder), device="cpu")

    with pytest.raises(ProbeError, match=r"the tokenizer of .* cannot be loaded"):
        require_tokenizer(loaded)


def test_a_tokenizer_without_its_vocabulary_is_an_error(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "tokenizer.json").unlink()

    with pytest.raises(ProbeError, match="tokenizer"):
        require_tokenizer(load(str(folder), device="cpu"))


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_an_error(tmp_path):
    largest = max(tiny_tokenizer().get_vocab().values())
    fitting = load(str(tiny_llama_folder(tmp_path, name="fits", vocab_size=largest + 1)), device="cpu")
    short = load(str(tiny_llama_folder(tmp_path, name="short", vocab_size=largest)), device="cpu")

    assert require_tokenizer(fitting) is fitting.tokenizer
    with pytest.raises(ProbeError, match=f"has id {largest}, and the vocabulary ends at {largest - 1}"):
        require_tokenizer(short)


def test_an_added_token_beyond_the_vocabulary_is_tolerated_but_a_bos_there_is_an_error():
    largest = max(tiny_tokenizer().get_vocab().values())
    model = tiny_llama(vocab_size=largest + 1)
    padded, begun = tiny_tokenizer(), tiny_tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    begun.add_special_tokens({"bos_token": "[BEGIN]"})

    assert require_tokenizer(wrap(model, padded)) is padded
    with pytest.raises(ProbeError, match=rf"its token '\[BEGIN\]' has id {largest + 1}"):
        require_tokenizer(wrap(model, begun))


# ---- GGUF


@pytest.mark.parametrize("quantized", [True, False])
def test_a_gguf_is_unpacked_to_the_values_its_blocks_hold(tmp_path, quantized):
    file = tiny_gguf(tmp_path / "tiny.gguf", quantized=quantized)

    loaded = load(str(file), device="cpu")

    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for gguf_name, name in names.items():
        tensor = packed[gguf_name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(loaded.model.get_parameter(name).numpy(), expected.reshape(tensor.shape[::-1])), name
    assert loaded.source.kind == "gguf"
    assert loaded.source.path == str(file.resolve())
    assert loaded.source.dtype == "float32"
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert require_tokenizer(loaded).decode(require_tokenizer(loaded)("The mill").input_ids) == "The mill"
    expected_note = "weights lie on a 4-bit grid: from a GGUF with Q4_1 (100% of the entries)"
    assert loaded.source.notes == ((expected_note.replace("100%", "99%"),) if quantized else ())


def test_an_unpacked_gguf_can_be_saved_and_makes_no_claim_to_be_quantized(tmp_path):
    loaded = load(str(tiny_gguf(tmp_path / "tiny.gguf")), device="cpu")

    loaded.model.save_pretrained(tmp_path / "saved")

    assert not hasattr(loaded.model.config, "quantization_config")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = load(str(tmp_path / "saved"), device="cpu").model
    tokens = torch.arange(16)[None]
    assert torch.equal(again(tokens).logits, loaded.model(tokens).logits)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda content: content[:-64], "is truncated or damaged"),
        (lambda content: content[:200], "is truncated or damaged"),
        (lambda _: b"", "is empty"),
        (lambda _: b"\x00" * 64, "is not a GGUF file"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
    ids=["tail missing", "header cut", "empty", "zeroed", "pointer"],
)
def test_a_damaged_gguf_is_named(tmp_path, damage, expected):
    file = tiny_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(damage(file.read_bytes()))

    assert f"{file} {expected}" in complaint(file)


# ---- the Hub, played by a server on this machine

ASK = """
import dataclasses, json, sys
from ternary_probe.errors import ProbeError
from ternary_probe.loading import load
answers = []
for name, options in json.loads(sys.argv[1]):
    try:
        loaded = load(name, device="cpu", **options)
        answer = dataclasses.asdict(loaded.source) | {"tokenizer": loaded.tokenizer is not None}
        answer["sum"] = sum(float(parameter.double().sum()) for parameter in loaded.model.parameters())
        answers.append(answer)
    except ProbeError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def ask(requests: list[tuple[str, dict[str, Any]]], home: Path, **environment: str) -> list[Any]:
    """Load models in a fresh process, since the hub's library reads its settings on import."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(requests)],
        env=inherited | settings | environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answers: list[Any] = json.loads(process.stdout)
    return answers


def test_hub_models_are_pinned_checked_and_found_again_offline(tmp_path):
    sharded = tiny_llama_folder(tmp_path, torch.bfloat16, 3, name="sharded")
    bare = tiny_llama_folder(tmp_path, name="bare", tokenizer=False)
    pickled = tiny_llama_folder(tmp_path, name="pickled")
    torch.save(stored_weights(pickled), pickled / "pytorch_model.bin")
    (pickled / SINGLE).unlink()
    broken = shutil.copytree(sharded, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    index["weight_map"].pop(NORM)
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    unconfigured = tmp_path / "unconfigured"
    unconfigured.mkdir()
    folders = {"sharded": sharded, "bare": bare, "pickled": pickled, "broken": broken, "unconfigured": unconfigured}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("org/sharded", {"revision": "v1"}),
        ("org/sharded", {}),
        ("org/bare", {"dtype": "float64"}),
        ("org/pickled", {"allow_pickle": True}),
        ("org/pickled", {}),
        ("org/broken", {}),
        ("org/unconfigured", {}),
        ("org/sharded", {"revision": "v9"}),
        ("org/unknown", {}),
    ]

    with serve({f"org/{name}": folder for name, folder in folders.items()}) as endpoint:
        online = ask(requests, tmp_path / "home", HF_ENDPOINT=endpoint)
    offline = ask(requests[:4] + requests[8:], tmp_path / "home", HF_HUB_OFFLINE="1")

    total = sum(float(tensor.double().sum()) for tensor in stored_weights(sharded).values())
    for answer in online[:2]:
        assert answer["kind"] == "hub"
        assert answer["revision"] == COMMIT
        assert answer["dtype"] == "bfloat16"
        assert answer["tokenizer"] is True
        assert answer["sum"] == pytest.approx(total, rel=1e-12)
        assert answer["config_sha256"] == hashlib.sha256((sharded / "config.json").read_bytes()).hexdigest()
    assert online[2]["dtype"] == "float64"
    assert online[2]["tokenizer"] is False
    assert online[3]["sum"] == pytest.approx(online[2]["sum"], rel=1e-6)
    assert "org/pickled on the Hub has no safetensors: if you trust its pickle, pass --allow-pickle" in online[4]
    assert f"holds '{NORM}', which model.safetensors.index.json does not list" in online[5]
    assert online[6] == "org/unconfigured on the Hub is not a transformers checkpoint: it has no config.json"
    assert online[7] == "org/sharded has no revision 'v9'"
    assert online[8].startswith("'org/unknown' is neither a folder here nor a model on the Hub")
    assert offline[:4] == online[:4]
    assert "HF_HUB_OFFLINE is set" in offline[4]
