"""Blocks and the residual stream, found by running."""

from __future__ import annotations

import pytest
import torch
import zoo
from made_models import IDS, Stack, seeded
from torch import nn

from ternary_probe import anatomy

KINDS = dict.fromkeys(zoo.NAMES, "pre") | {
    "gemma2": "sandwich",
    "gemma3": "sandwich",
    "olmo2": "sandwich",
    "cohere": "parallel",
    "phi": "parallel",
    "gpt_neox": "parallel",
    "opt_post": "post",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_kind_of_skip(name, dtype):
    found = zoo.examined(name, dtype)
    assert [block.kind for block in found.blocks] == [KINDS[name]] * 2
    assert [block.index for block in found.blocks] == [0, 1]
    assert found.residual_stream.kind == KINDS[name]
    assert found.residual_stream.identity_skips == (KINDS[name] in {"pre", "parallel"})
    assert (found.residual_stream.first_exception is None) == found.residual_stream.identity_skips


@pytest.mark.parametrize(
    ("rule", "kind", "skip"),
    [("pre", "pre", 1.0), ("scaled", "scaled", 0.5), ("none", "none", 0.0), ("post", "post", 0.0)],
)
def test_kind_and_coefficient_of_a_block_written_for_the_test(rule, kind, skip):
    block = anatomy.examine(seeded(Stack, "pre", rule, "pre"), input_ids=IDS).blocks[1]
    assert block.kind == kind
    assert block.skip == pytest.approx(skip, abs=1e-4)


def test_a_skip_that_is_no_combination_of_the_parts_is_called_not_measurable():
    block = anatomy.examine(seeded(Stack, "pre", "gated", "pre"), input_ids=IDS).blocks[1]
    assert block.kind == "not measurable"
    assert block.skip is None
    assert "no identity skip" in block.reason


def test_the_first_exception_is_named():
    stream = anatomy.examine(seeded(Stack, "pre", "pre", "scaled", "none"), input_ids=IDS).residual_stream
    assert stream.kind == "mixed"
    assert not stream.identity_skips
    assert stream.first_exception == "blocks.2: scaled (the input is multiplied by 0.5)"


def test_a_block_that_runs_twice_is_two_blocks_with_shared_matrices():
    model = seeded(Stack, "pre", "pre")
    model.blocks.append(model.blocks[0])
    found = anatomy.examine(model, input_ids=IDS)
    assert [block.name for block in found.blocks] == ["blocks.0", "blocks.1", "blocks.0"]
    assert [block.kind for block in found.blocks] == ["pre"] * 3
    assert [(m.name, m.block, m.shared_calls) for m in found.block_matrices] == [
        ("blocks.0.linear.weight", 0, 2),
        ("blocks.1.linear.weight", 1, 1),
    ]


def test_a_model_without_a_chain_says_so():
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)).eval().requires_grad_(False)
    found = anatomy.examine(model, input_ids=IDS)
    assert found.blocks == ()
    assert found.block_matrices == ()
    assert found.residual_stream.first_exception == "no chain of blocks was found"
    assert [m.name for m in found.matrices] == ["1.weight"]


def test_a_backbone_and_its_head_are_not_taken_for_two_blocks():
    """The state goes to the head as the very object the backbone returned."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Embedding(40, 16), *(nn.Linear(16, 16) for _ in range(3)))
            self.head = nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(ids))

    found = anatomy.examine(seeded(Wrapped), input_ids=IDS)
    assert [block.name for block in found.blocks] == ["backbone.1", "backbone.2", "backbone.3"]
    assert found.backbone_name == "backbone"
