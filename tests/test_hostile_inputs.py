"""Inputs that once gave a plausible number, and must give one clear sentence or a note instead."""

from __future__ import annotations

import json
import sqlite3

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_study import calibration, changed, cut, loaded_llama, speaking_llama, study
from tiny import tiny_llama, tiny_llama_folder, tiny_tokenizer
from transformers import BertConfig, BertForMaskedLM, OPTConfig, OPTForCausalLM

from ternary_probe import anatomy
from ternary_probe.anatomy import AnatomyError, HeadError
from ternary_probe.errors import ProbeError
from ternary_probe.loading import load
from ternary_probe.measure import Evaluator
from ternary_probe.perturb import SignFlip
from ternary_probe.studies.leverage import run_leverage
from ternary_probe.text import Text, make_windows


def rewritten(folder, change):
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_model_that_sees_the_next_token_gets_no_perplexity():
    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    found = anatomy.examine(BertForMaskedLM(config).eval())
    with pytest.raises(ProbeError, match="not causal"):
        Evaluator(found, cut(2))


def test_integers_without_a_scale_are_refused(tmp_path):
    def to_integers(tensors):
        return {n: (t * 100).to(torch.int8) if "down_proj" in n else t for n, t in tensors.items()}

    folder = rewritten(tiny_llama_folder(tmp_path), to_integers)
    with pytest.raises(ProbeError, match=r"down_proj\.weight as I8 .* names no quantization"):
        load(str(folder))


def test_data_that_were_never_written_are_refused(tmp_path):
    folder = rewritten(tiny_llama_folder(tmp_path), lambda ts: {n: torch.zeros_like(t) for n, t in ts.items()})
    with pytest.raises(ProbeError, match="every weight matrix"):
        load(str(folder))


def test_one_zero_matrix_is_named_in_the_notes(tmp_path):
    folder = rewritten(
        tiny_llama_folder(tmp_path), lambda ts: {n: t * 0 if "1.mlp.up_proj" in n else t for n, t in ts.items()}
    )
    assert any("model.layers.1.mlp.up_proj.weight" in note for note in load(str(folder)).source.notes)


def test_a_checkpoint_with_more_layers_than_its_config_is_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path, num_hidden_layers=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    with pytest.raises(ProbeError, match="leaves no place for"):
        load(str(folder))


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ProbeError, match="PEFT adapter"):
        load(str(folder))


def test_a_text_of_one_token_is_refused_when_scored():
    found = anatomy.examine(tiny_llama())
    windows = make_windows(Text("a" * 400, "test", "none"), tiny_tokenizer(), window=16, windows=1)
    if windows.distinct_tokens > 1:  # merges of the tokenizer
        windows.inputs[:] = windows.inputs[0, 0]
        windows.targets[:] = windows.inputs[0, 0]
    with pytest.raises(ProbeError, match="one token repeated"):
        Evaluator(found, windows)


def test_learned_positions_are_counted_before_the_forward():
    config = OPTConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    )
    torch.manual_seed(0)
    found = anatomy.examine(OPTForCausalLM(config).eval())
    Evaluator(found, cut(1, window=32)).nll()
    for window in (33, 34, 40):
        with pytest.raises(ProbeError, match="32 learned positions"):
            Evaluator(found, cut(1, window=window))


def test_rotary_positions_have_no_table_and_no_limit_of_that_kind():
    model = tiny_llama(max_position_embeddings=250)
    found = anatomy.examine(model)
    assert model.get_input_embeddings().num_embeddings == 256
    Evaluator(found, cut(1, window=260)).nll()


def test_kl_with_a_perturbed_head_is_refused_and_fine_again_afterwards():
    found = anatomy.examine(speaking_llama())
    evaluator = Evaluator(found, cut(2))
    reference = evaluator.reference()
    with SignFlip(rate=0.3, include=("*lm_head*",)).applied(found):
        with pytest.raises(ProbeError, match="makes the logits and is perturbed"):
            evaluator.response(reference)
        assert evaluator.response_without_reference().kl is None
    response = evaluator.response(reference)
    assert response.kl is not None
    assert response.kl.mean == 0


def test_one_submodule_in_training_mode_is_noticed():
    model = tiny_llama()
    model.model.layers[1].mlp.train()
    with pytest.raises(AnatomyError, match="training mode"):
        anatomy.examine(model)
    model.eval()
    evaluator = Evaluator(anatomy.examine(model), cut(1))
    model.train()
    with pytest.raises(ProbeError, match="training mode"):
        evaluator.nll()


def test_seeds_that_change_the_same_bits_are_one_experiment():
    record = study(options=changed(rates=(1.0,), arms=("outlier", "all"), matchings=("rate",), seeds=(0, 1, 2)))
    assert {mean.seeds for mean in record.means} == {1}
    assert {item.status for item in record.leverage} == {"inconclusive"}
    assert all(mean.ci_low is None for mean in record.means)


def test_a_damaged_cell_is_one_sentence(tmp_path):
    study(out=tmp_path)
    database = sqlite3.connect(tmp_path / "cells.sqlite")
    with database:
        database.execute("UPDATE cells SET value = '{' WHERE key LIKE 'outlier%'")
    database.close()
    with pytest.raises(ProbeError, match="damaged: delete the file"):
        study(out=tmp_path)


def test_a_single_block_is_called_that_and_not_a_missing_head():
    found = anatomy.examine(tiny_llama(num_hidden_layers=1))
    with pytest.raises(HeadError, match="two or more blocks"):
        _ = found.head


def test_a_grid_is_said_by_every_study():
    loaded = loaded_llama(hidden_size=64, intermediate_size=128)
    with torch.no_grad():
        for matrix in anatomy.examine(loaded.model).block_matrices:
            view = matrix.view()
            groups = view.reshape(view.shape[0], -1, 32)
            step = groups.abs().amax(-1, keepdim=True) / 7
            view.copy_(((groups / step).round() * step).reshape(view.shape))
    scored = cut(2)
    record = run_leverage(loaded, scored, calibration(scored), changed(rates=(0.2,)))
    assert any("4-bit grid, groups of 32" in note for note in record.notes)
