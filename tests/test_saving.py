"""Saved checkpoints: what loads is the model as quantized, bit for bit, or the folder does not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from tiny import tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ternary_probe import anatomy, saving, schemes
from ternary_probe.checkpoint import open_checkpoint
from ternary_probe.errors import ProbeError
from ternary_probe.loading import LoadedModel, load, wrap
from ternary_probe.perturb import Ternarize, from_description, sha256_weights
from ternary_probe.saving import SavingError, folder, save_quantized
from ternary_probe.saving.packed import Layout, pack, unpack
from ternary_probe.ternary import quantize

ROOT = Path(__file__).parents[1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def wrapped(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return wrap(zoo.build(name, dtype, **changes), tiny_tokenizer(), name=name)


def state_under(recipe: Ternarize, model: Any) -> dict[str, torch.Tensor]:
    with recipe.applied(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal_states(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def files(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def python(code: str, *arguments: object, plugin: bool) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *([str(ROOT / "plugins")] if plugin else [])]
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=paths[-1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


# ---- the packed form itself


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("codes_per_byte", [4, 5])
@pytest.mark.parametrize("scheme", ["absmean", "sign@row", "twn@g7", "optimal@g64", "planes:2@g5", "planes:2@row"])
@pytest.mark.parametrize("shape", [(3, 2), (1, 33), (5, 64), (4, 129)], ids=str)
def test_unpacking_gives_the_dense_values(shape, scheme, codes_per_byte, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    quantized = quantize(weight, scheme)
    layout = Layout(schemes.parse(scheme), *shape, codes_per_byte)

    packed = pack(quantized, dtype, codes_per_byte)

    assert (packed.weight.dtype, packed.weight_scale.dtype) == (torch.uint8, dtype)
    assert (tuple(packed.weight.shape), tuple(packed.weight_scale.shape)) == (layout.weight_shape, layout.scale_shape)
    assert packed.nbytes == layout.nbytes(dtype)
    assert torch.equal(unpack(packed, layout), quantized.dequantize(dtype))


@pytest.mark.parametrize("scheme", ["optimal@g7", "planes:2@g16"])
def test_a_cast_scale_gives_the_cast_values(scheme):
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = pack(quantize(weight, scheme), torch.bfloat16)
    layout = Layout(schemes.parse(scheme), 6, 40)
    for dtype in (torch.float32, torch.float16):
        cast = packed._replace(weight_scale=packed.weight_scale.to(dtype))
        assert torch.equal(unpack(cast, layout), unpack(packed, layout).to(dtype))


# ---- dense


@pytest.mark.parametrize(
    ("name", "dtype", "scheme"),
    [
        ("llama", torch.float32, "absmean@g24"),
        ("llama_tied", torch.bfloat16, "planes:2@g16"),
        ("qwen2", torch.float16, "optimal"),
        ("gpt2", torch.float32, "twn@g10"),
        ("opt", torch.bfloat16, "sign"),
        ("gpt_neox", torch.float32, "absmean+ls@row"),
        ("mixtral", torch.float32, "absmean"),
        ("gemma3", torch.bfloat16, "optimal@g8"),
    ],
    ids=lambda value: str(value),
)
def test_a_dense_folder_holds_the_model_as_quantized(tmp_path, name, dtype, scheme):
    loaded, recipe = wrapped(name, dtype), Ternarize(scheme=scheme)
    before = sha256_weights(loaded.model)

    saved = save_quantized(loaded, recipe, tmp_path / "saved")

    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert_equal_states(model.state_dict(), state_under(recipe, loaded.model))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sha256_weights(loaded.model) == before
    config = json.loads((saved / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["architectures"] == [type(loaded.model).__name__]


def test_fused_experts_are_saved_as_published(tmp_path):
    saved = save_quantized(wrapped("mixtral"), Ternarize(), tmp_path / "saved")
    assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in files(saved)


def test_names_that_need_several_tensors_at_once_stay_the_models_own(tmp_path, monkeypatch, caplog):
    loaded, recipe = wrapped("mixtral"), Ternarize()
    revert = saving.names.revert_weight_conversion

    def whole_only(model: Any, state: dict[str, torch.Tensor]) -> Any:
        if len(state) == 1:
            raise KeyError("the other half")
        return revert(model, state)

    monkeypatch.setattr(saving.names, "revert_weight_conversion", whole_only)
    saved = save_quantized(loaded, recipe, tmp_path / "saved")

    assert "own names" in caplog.text
    assert "model.layers.1.mlp.experts.down_proj" in files(saved)
    assert_equal_states(AutoModelForCausalLM.from_pretrained(saved).state_dict(), state_under(recipe, loaded.model))


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_the_folder_says_where_it_came_from(tmp_path, form):
    loaded = wrapped("llama")
    recipe = Ternarize(scheme="optimal@g16", roles=("up_proj", "down_proj"), exclude=("*.0.mlp.up*",))

    saved = save_quantized(loaded, recipe, tmp_path / "saved", form)

    found = json.loads((saved / "ternary_probe.json").read_text())
    assert from_description(found["recipe"]) == recipe
    assert found["format"] == form
    assert found["source"]["name"] == "llama"
    assert found["source"]["config_sha256"] == loaded.source.config_sha256
    assert found["source"]["weights_sha256"] == sha256_weights(loaded.model)
    assert {entry["matrix"] for entry in found["matrices"]} == {
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }
    assert all(entry["scheme"] == "optimal@g16" and entry["entries_changed"] for entry in found["matrices"])
    assert found["versions"].keys() >= {"ternary_probe", "torch", "transformers"}
    assert AutoTokenizer.from_pretrained(saved)("The river")["input_ids"] == tiny_tokenizer()("The river")["input_ids"]
    assert (saved / "generation_config.json").is_file()


def test_a_model_without_tokenizer_is_saved_and_says_so(tmp_path):
    saved = save_quantized(wrap(zoo.build("llama")), Ternarize(), tmp_path / "saved")
    assert "came without a tokenizer" in json.loads((saved / "ternary_probe.json").read_text())["tokenizer"]
    assert not list(saved.glob("tokenizer*"))


# ---- packed


@pytest.mark.parametrize(
    ("dtype", "group"),
    [(torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 64), (torch.float32, 128)],
    ids=str,
)
def test_a_ternarized_weight_takes_less_than_three_tenths_of_a_byte(tmp_path, dtype, group):
    model = tiny_llama(dtype=dtype, hidden_size=128, intermediate_size=256)
    saved = save_quantized(wrap(model), Ternarize(scheme=f"absmean@g{group}"), tmp_path / "saved", "packed")

    tensors = files(saved)
    packed = [name for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    assert len(packed) == 14
    held = sum(tensors[name].nbytes + tensors[f"{name}_scale"].nbytes for name in packed)
    assert held / sum(model.get_parameter(name).numel() for name in packed) < 0.3
    for name, tensor in tensors.items():
        if name not in packed and not name.endswith("_scale"):
            assert torch.equal(tensor, model.get_parameter(name)), name


def test_codes_have_a_shape_no_weight_has(tmp_path):
    loaded = wrapped("llama")
    one = files(save_quantized(loaded, Ternarize(), tmp_path / "one", "packed"))
    two = files(save_quantized(loaded, Ternarize(scheme="planes:2"), tmp_path / "two", "packed"))
    name = "model.layers.0.mlp.down_proj.weight"  # 32 rows of 48
    assert (one[name].shape, one[name].dtype) == ((32, 12), torch.uint8)
    assert (two[name].shape, two[name].dtype) == ((2, 32, 12), torch.uint8)


RELOAD = """
import hashlib, sys, torch, ternary_probe_transformers
from transformers import AutoModelForCausalLM
ids = torch.arange(3, 67).view(2, 32)
for path in sys.argv[1:]:
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        with torch.no_grad():
            logits = model(ids).logits
        nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).item()
        print(nll.hex(), hashlib.sha256((logits.float() + 0.0).numpy().tobytes()).hexdigest())
"""


def test_in_a_new_process_packed_and_dense_give_the_same_bits(tmp_path):
    cases = [
        wrapped("llama", torch.float32, intermediate_size=45),  # odd rows, and groups that do not divide them
        wrapped("llama_tied", torch.bfloat16),
        wrapped("qwen2", torch.float32),
    ]
    paths = []
    for number, (loaded, scheme) in enumerate(zip(cases, ["absmean@g8", "planes:2@g10", "optimal@row"], strict=True)):
        for form in ("dense", "packed"):
            paths.append(save_quantized(loaded, Ternarize(scheme=scheme), tmp_path / f"{form}{number}", form))

    done = python(RELOAD, *paths, plugin=True)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 4 * len(cases)
    for first in range(0, len(lines), 4):
        assert lines[first : first + 2] == lines[first + 2 : first + 4]
    assert len(set(lines)) == 2 * len(cases)


STOCK = """
import sys, warnings
warnings.simplefilter("error")
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
disable_progress_bar()
for path in sys.argv[1:]:
    AutoModelForCausalLM.from_pretrained(path)
    AutoTokenizer.from_pretrained(path)
assert "ternary_probe" not in sys.modules
"""


def test_dense_folders_load_in_stock_transformers_without_a_word(tmp_path):
    paths = [
        save_quantized(wrapped(name), Ternarize(), tmp_path / name)
        for name in ("llama", "llama_tied", "gpt2", "mixtral")
    ]
    done = python(STOCK, *paths, plugin=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tied_weights_are_stored_once(tmp_path):
    for form in ("dense", "packed"):
        tensors = files(save_quantized(wrapped("llama_tied"), Ternarize(), tmp_path / form, form))
        assert "model.embed_tokens.weight" in tensors
        assert "lm_head.weight" not in tensors


def test_our_own_loader_opens_a_packed_folder_as_the_dense_model(tmp_path):
    loaded, recipe = wrapped("llama_tied", torch.bfloat16), Ternarize(scheme="planes:2@g16")
    packed = load(str(save_quantized(loaded, recipe, tmp_path / "packed", "packed")), device="cpu")

    assert_equal_states(packed.model.state_dict(), state_under(recipe, loaded.model))
    assert packed.source.dtype == "bfloat16"
    assert any("planes:2@g16" in note for note in packed.source.notes)
    assert getattr(packed.model.config, "quantization_config", None) is None
    assert len(anatomy.examine(packed.model).block_matrices) == 14
    again = save_quantized(
        packed, Ternarize(scheme="optimal@row"), tmp_path / "again", "dense"
    )  # and can be saved again
    assert "quantization_config" not in json.loads((again / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_the_demo_model_comes_back_as_quantized(tmp_path, demo_model, form):
    recipe = Ternarize(scheme="absmean@g128")
    examined = anatomy.examine(demo_model.model)
    ids = torch.arange(1000, 1016)[None]
    with torch.no_grad(), recipe.applied(examined):
        expected = demo_model.model(ids).logits

    saved = save_quantized(demo_model, recipe, tmp_path / "saved", form, anatomy=examined)

    back = load(str(saved), device="cpu")
    with torch.no_grad():
        assert torch.equal(back.model(ids).logits, expected)
    assert back.tokenizer is not None
    if form == "packed":
        entries = json.loads((saved / "ternary_probe.json").read_text())["matrices"]
        assert max(entry["bytes_per_weight"] for entry in entries) < 0.3


# ---- writing


def test_shards_stay_below_their_limit_and_are_indexed(tmp_path, monkeypatch):
    loaded, recipe, limit = wrapped("llama"), Ternarize(), 20_000
    written = []
    monkeypatch.setattr(
        folder,
        "save_file",
        lambda tensors, *rest, **more: (written.append(dict(tensors)), save_file(tensors, *rest, **more)),
    )

    saved = save_quantized(loaded, recipe, tmp_path / "saved", max_shard_size=limit)

    sizes = [sum(t.nbytes for t in shard.values()) for shard in written]
    assert len(sizes) > 2
    assert all(size <= limit or len(shard) == 1 for size, shard in zip(sizes, written, strict=True))
    checkpoint = open_checkpoint(saved)  # index and headers agree, nothing is left over
    assert len(checkpoint.files) == len(sizes)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_equal_states(AutoModelForCausalLM.from_pretrained(saved).state_dict(), state_under(recipe, loaded.model))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"]
)
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, error):
    loaded, calls = wrapped("llama"), []
    before = sha256_weights(loaded.model)

    def failing(tensors: Any, *rest: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error
        save_file(tensors, *rest, **more)

    monkeypatch.setattr(folder, "save_file", failing)
    expected = SavingError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        save_quantized(loaded, Ternarize(), tmp_path / "saved", max_shard_size=20_000)

    if isinstance(error, OSError):
        assert str(caught.value) == f"{tmp_path / 'saved'} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []
    assert sha256_weights(loaded.model) == before


def test_a_folder_that_holds_something_is_never_touched(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(SavingError, match="exists and is not an empty folder"):
            save_quantized(wrapped("llama"), Ternarize(), tmp_path / name)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_an_empty_or_nested_folder_is_made_and_readable(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b"):
        saved = save_quantized(wrapped("llama"), Ternarize(), path)
        assert saved == path
        modes = {file.name: file.stat().st_mode & 0o777 for file in saved.iterdir()}
        assert modes["model.safetensors"] == modes["config.json"]


# ---- refusals


@pytest.mark.parametrize(
    ("name", "include", "message"),
    [
        ("gpt2", (), r"transformer\.h\.0\.attn\.c_attn\.weight belongs to a Conv1D.*--exclude.*--format dense"),
        (
            "mixtral",
            ("*experts.down_proj*",),
            r"experts\.down_proj\[0\].*and 5 more.*one of several matrices in one parameter",
        ),
        ("llama_tied", ("lm_head*", "*embed_tokens*"), r"is tied with"),
    ],
    ids=["Conv1D", "experts", "tied"],
)
def test_what_cannot_be_packed_is_named(tmp_path, name, include, message):
    with pytest.raises(SavingError, match=message):
        save_quantized(wrapped(name), Ternarize(include=include), tmp_path / "saved", "packed")
    assert list(tmp_path.iterdir()) == []


def test_one_input_feature_is_not_packed_since_its_shape_would_not_tell(tmp_path):
    model = tiny_llama(intermediate_size=1)
    with pytest.raises(SavingError, match=r"layers\.0\.mlp\.down_proj\.weight has one input feature"):
        save_quantized(wrap(model), Ternarize(), tmp_path / "saved", "packed")


def test_a_quantized_model_is_not_quantized_again(tmp_path):
    __import__("ternary_probe_transformers")
    packed = save_quantized(wrapped("llama"), Ternarize(), tmp_path / "packed", "packed")
    model = AutoModelForCausalLM.from_pretrained(packed)
    with pytest.raises(SavingError, match="is quantized already"):
        save_quantized(wrap(model), Ternarize(), tmp_path / "again")


@pytest.mark.parametrize("options", [{"format": "gguf"}, {"max_shard_size": 0}], ids=str)
def test_options_without_meaning_are_refused(tmp_path, options):
    with pytest.raises(SavingError):
        save_quantized(wrapped("llama"), Ternarize(), tmp_path / "saved", **options)


def test_storage_shared_behind_the_configs_back_is_refused(tmp_path):
    loaded = wrapped("llama")
    layers = loaded.model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(SavingError, match="share storage"):
        save_quantized(loaded, Ternarize(), tmp_path / "saved")


# ---- damaged packed folders


def damage(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = files(path)
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("", lambda t: t | 3, "unused 2-bit code"),
        ("", lambda t: t[:, :-1].contiguous(), "does not hold a fitting|does not fit"),
        ("_scale", lambda t: None, "does not hold a fitting|lacks"),
        ("_scale", lambda t: t * torch.nan, "not finite"),
    ],
    ids=["byte", "shape", "no scale", "NaN scale"],
)
def test_a_damaged_packed_folder_is_an_error(tmp_path, suffix, change, message):
    path = save_quantized(wrapped("llama"), Ternarize(), tmp_path / "saved", "packed")
    name = f"model.layers.1.mlp.up_proj.weight{suffix}"
    damage(path, name, change(files(path)[name]))
    with pytest.raises(ProbeError, match=message):
        load(str(path), device="cpu")


def test_without_the_plugin_our_loader_says_what_is_missing(tmp_path, monkeypatch):
    path = save_quantized(wrapped("llama"), Ternarize(), tmp_path / "saved", "packed")
    monkeypatch.setitem(sys.modules, "ternary_probe_transformers", None)
    with pytest.raises(ProbeError, match="ternary_probe_transformers, which reads it, cannot be imported"):
        load(str(path), device="cpu")
