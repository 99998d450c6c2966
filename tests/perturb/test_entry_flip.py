"""Named single entries: flipped or removed, in any layout and dtype, and put back bit for bit."""

from __future__ import annotations

import pytest
import torch
import zoo

from ternary_probe.anatomy import examine
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import EntryFlip, NoEffectError, SignFlip, from_description, parse, sha256_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("to", ["negative", "zero"])
def test_only_the_named_entries_change_and_all_come_back(kind, dtype, to):
    model = zoo.build(kind, dtype)
    found = examine(model)
    first, last = found.block_matrices[0], found.block_matrices[-1]
    clean = {m.name: m.view().clone() for m in found.matrices}
    before = sha256_weights(model)
    recipe = EntryFlip(entries={first.name: ((0, 1), (3, 2)), last.name: ((1, 0),)}, to=to)
    with recipe.applied(found) as done:
        assert done.entries == 3
        for matrix in found.matrices:
            changed = (matrix.view() != clean[matrix.name]).nonzero().tolist()
            expected = sorted(map(list, recipe.entries.get(matrix.name, ())))
            assert sorted(changed) == expected
            for row, column in recipe.entries.get(matrix.name, ()):
                was = clean[matrix.name][row, column]
                assert matrix.view()[row, column] == (-was if to == "negative" else 0)
        energy = sum(float(clean[n][r, c].double() ** 2) for n, where in recipe.entries.items() for r, c in where)
        assert done.delta_energy == pytest.approx(energy * (4 if to == "negative" else 1))
    assert sha256_weights(model) == before


def test_text_and_json_are_read_back():
    recipe = EntryFlip(entries={"a.b[3]": ((0, 1), (3, 2)), "c": ((7, 9),)}, to="zero")
    assert parse(str(recipe)) == recipe
    assert from_description(recipe.describe()) == recipe
    assert parse("entry_flip:entries=c@7@9").to == "negative"
    both = parse("entry_flip:entries=c@7@9+sign_flip:rate=0.5")
    assert parse(str(both)) == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entry_flip:entries=c@7", "matrix@row@column"),
        ("entry_flip:entries=", "no entry"),
        ("entry_flip:entries=c@7@9;c@7@9", "twice"),
        ("entry_flip:entries=c@7@9,to=one", "to"),
        ("entry_flip:entry=c@7@9", "did you mean entries"),
        ("entry_flip", "entries"),
    ],
)
def test_a_text_that_names_no_entry_is_refused(text, message):
    with pytest.raises(ProbeError, match=message):
        parse(text)


def test_entries_the_model_does_not_have_are_refused():
    found = examine(zoo.build("llama"))
    name = found.block_matrices[0].name
    for entries, message in (({"nowhere": ((0, 0),)}, "no weight matrix"), ({name: ((0, 9999),)}, "does not exist")):
        with pytest.raises(ProbeError, match=message), EntryFlip(entries=entries).applied(found):
            pass


def test_an_entry_that_is_zero_already_is_no_effect():
    model = zoo.build("llama")
    found = examine(model)
    matrix = found.block_matrices[0]
    with torch.no_grad():
        matrix.view()[1, 1] = 0.0
    for to in ("negative", "zero"):
        with pytest.raises(NoEffectError), EntryFlip(entries={matrix.name: ((1, 1),)}, to=to).applied(found):
            pass


def test_spared_entries_are_drawn_like_any_other_and_left_alone():
    found = examine(zoo.build("llama"))
    matrix = found.block_matrices[0]
    plain = SignFlip(rate=0.3, seed=4)
    drawn = plain.draw(matrix)
    untouched = next(entry for entry in range(matrix.numel) if entry not in set(drawn.tolist()))
    spared = (*(int(entry) for entry in drawn[::3]), untouched)
    bulk = plain.model_copy(update={"spared": {matrix.name: spared}})
    assert set(bulk.draw(matrix).tolist()) == set(drawn.tolist()) - set(spared)
    other = found.block_matrices[1]
    assert torch.equal(bulk.draw(other), plain.draw(other))
    assert from_description(bulk.describe()) == bulk
