"""`inspect` says what would be touched, and what would not."""

from __future__ import annotations

import pytest
import torch
import zoo
from small_study import bits, differing, loaded_llama, tokenizer

from ternary_probe.loading import wrap
from ternary_probe.records import InspectRecord
from ternary_probe.studies.inspection import run_inspection


def test_every_matrix_of_a_llama_is_listed_with_its_shape():
    model = loaded_llama(torch.bfloat16).model

    record = run_inspection(wrap(model, tokenizer()))

    two_dimensional = {
        name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name
    }
    assert {m.matrix: (m.out_features, m.in_features) for m in record.matrices} == two_dimensional
    assert {m.dtype for m in record.matrices} == {"bfloat16"}
    assert {m.block for m in record.matrices if "layers.1." in m.matrix} == {1}
    assert [m.block for m in record.matrices if m.matrix == "lm_head.weight"] == [None]
    assert record.blocks == ("model.layers.0", "model.layers.1")
    assert (record.backbone, record.head, record.final_norm) == ("model", "lm_head.weight", "model.norm")
    assert record.skip == "pre"
    assert record.unhandled == {}
    assert record.accounted == 1


def test_every_norm_is_listed_with_what_it_is():
    record = run_inspection(loaded_llama())

    assert [n.norm for n in record.norms] == [
        *(f"model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")),
        "model.norm",
    ]
    assert {n.kind for n in record.norms} == {"rms_norm"}
    assert [n.readers for n in record.norms] == [3, 2, 3, 2, 1]
    assert all(n.plantable for n in record.norms[:4])


def test_tied_storage_is_listed_once_with_its_other_name():
    record = run_inspection(wrap(zoo.build("llama_tied"), tokenizer()))

    tied = [m for m in record.matrices if {"lm_head.weight", "model.embed_tokens.weight"} & {m.matrix, *m.aliases}]
    assert len(tied) == 1
    assert {tied[0].matrix, *tied[0].aliases} == {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "opt_post"])
def test_inspection_changes_nothing_and_all_its_checks_pass(name):
    model = zoo.build(name)
    before = bits(model)

    record = run_inspection(wrap(model, tokenizer()))

    assert differing(model, before) == []
    assert [check.check for check in record.checks if check.passed is False] == []
    assert {"repeatable", "chunked_head", "negation", "undo", "causal"} <= {check.check for check in record.checks}
    assert InspectRecord.model_validate_json(record.model_dump_json()) == record
