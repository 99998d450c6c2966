"""The chunked head gives the model's own logits, whatever the model does to them."""

from __future__ import annotations

import pytest
import torch
import zoo

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_logits_in_chunks_are_the_dense_logits(name, dtype):
    found = zoo.examined(name, dtype)
    model = found.model
    ids = zoo.token_ids(2, 32)
    dense = zoo.dense_logits(model, ids).flatten(0, 1)
    with torch.no_grad():
        states = found.head.states(ids)
        for size in (16, 32, 64):
            chunked = torch.cat([found.head.logits(part) for part in states.flatten(0, 1).split(size)]).float()
            assert (chunked - dense).abs().max() <= 1e-6 * dense.abs().max(), size
    assert states.shape[:2] == ids.shape
    assert found.vocab_size == found.head.vocab_size == dense.shape[-1]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite", "cohere", "phi"])
def test_the_plain_product_with_the_heads_matrix_is_wrong_so_the_test_above_says_something(name):
    found = zoo.examined(name)
    model = found.model
    with torch.no_grad():
        plain = found.head.states(zoo.token_ids()) @ found.head_matrix.view().T
    assert (plain - zoo.dense_logits(model, zoo.token_ids())).abs().max() > 0.1


def test_a_single_row_is_computed_as_in_a_pair():
    found = anatomy.examine(zoo.build("gemma2"))
    with torch.no_grad():
        rows = found.head.states(zoo.token_ids())[0]
        pair = found.head.logits(rows[3:4].expand(2, -1))
        single = found.head.logits(rows[3:4])
    assert single.shape == (1, found.vocab_size)
    assert torch.equal(single, pair[:1])


def test_the_head_is_not_run_when_only_states_are_asked_for():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    calls = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    found.head.states(zoo.token_ids())
    handle.remove()
    assert not calls


def test_a_fresh_head_can_be_applied_before_any_states_were_computed():
    model = zoo.build("gemma2")
    found = anatomy.examine(model)
    with torch.no_grad():
        rows = found.head.states(zoo.token_ids())[0]
        assert torch.equal(anatomy.ChunkedHead(found).logits(rows), found.head.logits(rows))


def test_gradients_flow_through_states_and_chunks_as_through_the_model():
    model = zoo.build("gemma2")
    found = anatomy.examine(model)
    ids = zoo.token_ids()
    weight = model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    model(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    expected, weight.grad = weight.grad, None
    rows = found.head.states(ids).flatten(0, 1)
    sum(found.head.logits(part).logsumexp(-1).sum() for part in rows.split(16)).backward()
    assert expected.abs().max() > 0
    assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_the_backbone_gets_its_own_forward_back_even_if_the_head_fails():
    model = zoo.build("llama")
    found = anatomy.examine(model)
    with pytest.raises(RuntimeError):
        found.head.logits(torch.zeros(4, 7))
    backbone = model.get_submodule(found.backbone_name)
    assert "forward" not in vars(backbone)
    assert not backbone._forward_hooks
    assert torch.isfinite(zoo.dense_logits(model, zoo.token_ids())).all()


def test_a_model_without_a_head_is_refused():
    found = anatomy.examine(zoo.build("llama").model)
    assert found.backbone_name is None
    assert found.head_name is None
    assert found.checks["chunked_head"].passed is None
    with pytest.raises(ProbeError, match="no language-model head"):
        _ = found.head


@pytest.mark.parametrize(
    ("name", "backbone", "head"),
    [
        ("llama", "model", "lm_head.weight"),
        ("gpt2", "transformer", "transformer.wte.weight"),
        ("gpt_neox", "gpt_neox", "lm_head.weight"),
        ("opt", "model.decoder", "lm_head.weight"),
        ("phi", "model", "lm_head.weight"),
    ],
)
def test_backbone_and_head_are_told_apart(name, backbone, head):
    found = zoo.examined(name)
    assert found.backbone_name == backbone
    assert found.head_name == head
    assert found.head_matrix is found.matrix(head)
