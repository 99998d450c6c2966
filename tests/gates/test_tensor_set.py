"""The tensors check: config against tensors and blocks against each other, without a table of architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gates.checkpoints import DEPTH, VOCABULARY, WIDTH, judge, tensors, write


def deep(blocks: int) -> dict[str, torch.Tensor]:
    found = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH)}
    for block in range(blocks):
        for name in ("q", "k", "v"):
            found[f"model.layers.{block}.{name}.weight"] = torch.zeros(WIDTH, WIDTH)
    return found


def test_a_consistent_checkpoint_passes(tmp_path: Path) -> None:
    (found,) = judge("tensors", write(tmp_path, tensors()))

    assert found.status == "pass"


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    content = {name: value for name, value in tensors().items() if ".layers.2." not in name}

    found = judge("tensors", write(tmp_path, content))

    assert any(one.status == "fail" and "lacks block 2" in one.message for one in found)


def test_a_surplus_block_fails_unless_the_config_declares_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "surplus", tensors(), num_hidden_layers=DEPTH - 1)
    ahead = write(tmp_path / "ahead", tensors(), num_hidden_layers=DEPTH - 1, num_nextn_predict_layers=1)

    (found,) = judge("tensors", folder)

    assert found.status == "fail"
    assert f"block {DEPTH - 1}" in found.message
    assert [one.status for one in judge("tensors", ahead)] == ["pass"]


def test_of_two_blocks_it_is_not_known_which_is_right(tmp_path: Path) -> None:
    content = {
        name: value for name, value in tensors().items() if ".layers.2." not in name and ".layers.3." not in name
    }
    del content["model.layers.1.mlp.up_proj.weight"]

    (found,) = judge("tensors", write(tmp_path, content, num_hidden_layers=2))

    assert found.status == "warn"
    assert "model.layers.1.mlp.up_proj.weight" in found.message


def test_a_first_block_without_a_norm_is_a_warning_and_one_without_a_matrix_fails(tmp_path: Path) -> None:
    norm, matrix = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
    without = {name: {key: value for key, value in tensors().items() if key != name} for name in (norm, matrix)}

    (first,) = judge("tensors", write(tmp_path / "norm", without[norm]))
    (second,) = judge("tensors", write(tmp_path / "matrix", without[matrix]))

    assert (first.status, second.status) == ("warn", "fail")


def test_an_expert_short_of_a_tensor_in_every_block_is_named(tmp_path: Path) -> None:
    content = tensors()
    for block in range(DEPTH):
        for expert in range(4):
            content[f"model.layers.{block}.experts.{expert}.w1"] = torch.ones(2, WIDTH)
            if expert != 2:
                content[f"model.layers.{block}.experts.{expert}.w2"] = torch.ones(2, WIDTH)

    found = judge("tensors", write(tmp_path, content))

    assert {one.status for one in found} == {"fail"}
    assert {one.subject for one in found} == {f"model.layers.{block}.experts.2" for block in range(DEPTH)}


def test_broken_files_leave_the_set_of_tensors_undecided(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()

    (found,) = judge("tensors", folder)

    assert found.status == "inconclusive"
    assert "model-00002-of-00003.safetensors" in found.message


def test_weights_stored_as_integers_need_a_quantization_config(tmp_path: Path) -> None:
    content = tensors() | {"model.layers.1.mlp.up_proj.weight": torch.ones(2 * WIDTH, WIDTH, dtype=torch.int8)}

    (bare,) = judge("tensors", write(tmp_path / "bare", content))
    (named,) = judge("tensors", write(tmp_path / "named", content, quantization_config={"quant_method": "x"}))

    assert (bare.status, named.status) == ("fail", "pass")
    assert "I8" in bare.message


def test_a_tied_head_stored_otherwise_is_a_warning_and_a_copy_is_not(tmp_path: Path) -> None:
    content = tensors()
    embedding = content["model.embed_tokens.weight"]

    copied = judge("tensors", write(tmp_path / "copy", content | {"lm_head.weight": embedding.clone()}))
    changed = judge("tensors", write(tmp_path / "other", content | {"lm_head.weight": embedding + 1}))

    assert [one.status for one in copied] == ["pass"]
    assert [one.status for one in changed] == ["warn"]


def test_the_language_part_of_a_larger_config_is_the_one_that_counts(tmp_path: Path) -> None:
    content = tensors() | {f"vision.blocks.{n}.w.weight": torch.ones(3, 3) for n in range(9)}
    inner = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "vocab_size": VOCABULARY}

    right = judge("tensors", write(tmp_path / "right", content, text_config=inner, hidden_size=3, num_hidden_layers=9))
    wrong = judge("tensors", write(tmp_path / "wrong", content, text_config=inner | {"num_hidden_layers": 7}))

    assert [one.status for one in right] == ["pass"]
    assert any(one.status == "fail" for one in wrong)


def test_a_block_that_lacks_a_tensor_is_named_with_it(tmp_path: Path) -> None:
    content = tensors()
    del content["model.layers.1.mlp.up_proj.weight"]

    (found,) = judge("tensors", write(tmp_path, content))

    assert found.status == "fail"
    assert found.subject == "model.layers.1"
    assert "mlp.up_proj.weight" in found.message


def test_a_missing_expert_tensor_is_named(tmp_path: Path) -> None:
    content = tensors()
    for block in range(DEPTH):
        for expert in range(3):
            content[f"model.layers.{block}.experts.{expert}.w"] = torch.zeros(2, WIDTH)
    del content["model.layers.3.experts.1.w"]

    (found,) = judge("tensors", write(tmp_path, content))

    assert found.status == "fail"
    assert "experts.1.w" in found.message


def test_an_extra_tensor_of_one_block_is_a_warning(tmp_path: Path) -> None:
    (found,) = judge("tensors", write(tmp_path, tensors() | {"model.layers.0.extra.weight": torch.zeros(WIDTH)}))

    assert found.status == "warn"
    assert "extra.weight" in found.message


def test_blocks_of_two_kinds_are_healthy(tmp_path: Path) -> None:
    content = deep(6)
    for block in range(6):
        kind = "attention" if block % 3 == 0 else "mamba"
        content[f"model.layers.{block}.{kind}.weight"] = torch.zeros(WIDTH, WIDTH)

    assert [one.status for one in judge("tensors", write(tmp_path, content, num_hidden_layers=6))] == ["pass"]


def test_blocks_that_share_keys_and_values_are_healthy(tmp_path: Path) -> None:
    content = {
        name: value
        for name, value in deep(10).items()
        if not (name.split(".")[-2] in {"k", "v"} and int(name.split(".")[2]) >= 6)
    }

    assert [one.status for one in judge("tensors", write(tmp_path, content, num_hidden_layers=10))] == ["pass"]


def test_a_first_dense_block_before_expert_blocks_is_healthy(tmp_path: Path) -> None:
    content = deep(10)
    for block in range(10):
        kind = "dense" if block == 0 else "experts.0"
        content[f"model.layers.{block}.{kind}.weight"] = torch.zeros(WIDTH, WIDTH)

    assert [one.status for one in judge("tensors", write(tmp_path, content, num_hidden_layers=10))] == ["pass"]


def test_a_block_of_another_shape_is_a_warning(tmp_path: Path) -> None:
    content = tensors()
    content["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3 * WIDTH, WIDTH)

    (found,) = judge("tensors", write(tmp_path, content))

    assert found.status == "warn"
    assert found.subject == "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 999}, "vocabulary has 999 entries"),
        ({"hidden_size": 999}, "width is 999"),
        ({"tie_word_embeddings": False}, "drawn at random"),
    ],
)
def test_a_config_of_another_model_is_caught(tmp_path: Path, config: dict[str, object], words: str) -> None:
    found = [one for one in judge("tensors", write(tmp_path, tensors(), **config)) if one.status == "fail"]

    assert len(found) == 1
    assert words in found[0].message


def test_an_untied_head_that_is_there_passes(tmp_path: Path) -> None:
    content = tensors() | {"lm_head.weight": torch.zeros(VOCABULARY, WIDTH)}

    assert [one.status for one in judge("tensors", write(tmp_path, content, tie_word_embeddings=False))] == ["pass"]


def test_many_faults_are_counted_not_listed(tmp_path: Path) -> None:
    content = deep(40)
    for block in range(0, 40, 10):
        for name in ("q", "k", "v"):
            content[f"model.layers.{block}.{name}.weight"] = torch.zeros(WIDTH, WIDTH + block)

    found = judge("tensors", write(tmp_path, content, num_hidden_layers=60, vocab_size=999, hidden_size=998))

    assert len(found) <= 11
    assert any(one.status == "fail" for one in found)
