"""Suffix re-runs against full runs, bit for bit, under a change in every block; one column a batch entry."""

from __future__ import annotations

import pytest
import torch
import zoo

from ternary_probe.anatomy import InputError, examine, first_affected, negate_each, record_blocks
from ternary_probe.perturb import ColumnFlip, Columns, SignFlip

KINDS = [k for k in zoo.NAMES if k != "gpt2"] + ["gpt2"]


def ids(count=2, length=16, seed=0):
    return torch.randint(0, zoo.VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rerun_of_the_later_blocks_is_a_full_run(kind, dtype):
    found = examine(zoo.build(kind, dtype))
    assert found.checks["suffix"].passed is True, found.checks["suffix"]
    with torch.no_grad():
        recording = record_blocks(found, ids())
        for block in range(len(found.blocks)):
            matrices = [m for m in found.block_matrices if m.block == block and m.rows_seen and not m.also_lookup]
            start = first_affected(found, matrices)
            assert start == block
            assert torch.equal(recording.resume(start), recording.states)
            with SignFlip(rate=0.2, include=tuple(m.name.replace("[", "[[]") for m in matrices)).applied(found):
                full = found.head.states(ids())
                assert torch.equal(recording.resume(start), full)
                assert not torch.equal(full, recording.states)
        assert torch.equal(found.head.states(ids()), recording.states)


def test_blocks_before_the_change_do_not_run():
    found = examine(zoo.build("llama", num_hidden_layers=4))
    recording = record_blocks(found, ids())
    ran = []
    handles = [
        block.module.self_attn.register_forward_hook(lambda *_, i=block.index: ran.append(i)) for block in found.blocks
    ]
    recording.resume(2)
    for handle in handles:
        handle.remove()
    assert ran == [2, 3]
    assert not any("forward" in block.module.__dict__ for block in found.blocks)


def test_a_failing_rerun_leaves_the_blocks_their_own_forward():
    found = examine(zoo.build("llama"))
    recording = record_blocks(found, ids())

    def broken(*_):
        raise RuntimeError("stop")

    handle = found.blocks[1].module.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="stop"):
        recording.resume(1)
    handle.remove()
    assert not any("forward" in block.module.__dict__ for block in found.blocks)
    assert torch.equal(recording.resume(0), recording.states)


def test_what_lies_outside_the_blocks_means_a_full_run():
    tied, untied = examine(zoo.build("llama_tied")), examine(zoo.build("llama"))
    assert first_affected(untied, [untied.head_matrix]) == 0
    assert first_affected(tied, [tied.head_matrix]) == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "opt", "gemma2", "phi"])
def test_a_column_a_batch_entry_is_the_flipped_column(kind):
    found = examine(zoo.build(kind))
    with torch.no_grad():
        recording = record_blocks(found, ids(count=1))
        for matrix in found.block_matrices:
            if matrix.input_of is None or matrix.also_lookup:
                continue
            columns = [0, matrix.in_features - 1, 3]
            with negate_each(found, matrix, [None, *columns]):
                states = recording.resume(first_affected(found, [matrix]), copies=4)
            apart = recording.resume(first_affected(found, [matrix]), copies=4)
            assert torch.equal(states[0], apart[0])
            for entry, column in enumerate(columns, start=1):
                flip = ColumnFlip(
                    columns=Columns(select="listed", listed=(column,)), include=(matrix.name.replace("[", "[[]"),)
                )
                with flip.applied(found):
                    flipped = recording.resume(first_affected(found, [matrix]), copies=4)
                assert torch.equal(states[entry], flipped[entry])


def test_batch_entries_that_cannot_be_told_apart_are_refused():
    found = examine(zoo.build("mixtral"))
    expert = next(m for m in found.block_matrices if m.input_of is None)
    with pytest.raises(InputError, match="product"), negate_each(found, expert, [None, 1]):
        pass
    tied = examine(zoo.build("llama_tied"))
    with pytest.raises(InputError, match="embedding"), negate_each(tied, tied.head_matrix, [None, 1]):
        pass
    llama = examine(zoo.build("llama"))
    matrix = llama.block_matrices[0]
    with pytest.raises(InputError, match="does not divide"), negate_each(llama, matrix, [None] * 7):
        llama.head.states(ids())
