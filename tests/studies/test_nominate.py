"""Screens nominate the columns they should, and spikes the weight between them."""

from __future__ import annotations

import numpy as np
import torch
from small_study import cut, speaking_llama

from ternary_probe.anatomy import examine
from ternary_probe.studies.nominate import SCREENS, find_spikes, nominate_columns, share


def scores(**changed):
    base = {name: {"a": np.zeros(6), "b": np.zeros(4)} for name in SCREENS}
    for screen, (matrix, values) in changed.items():
        base[screen][matrix] = np.array(values, dtype=float)
    return base


def test_the_union_of_the_screens_is_nominated_with_who_named_what():
    found = nominate_columns(
        scores(joint=("a", [0, 5, 0, 3, 0, 0]), fisher=("a", [0, 9, 0, 0, 0, 0]), first_order=("b", [0, 0, 2, 0])), 2, 0
    )
    assert [(n.matrix, n.column, n.by) for n in found] == [
        ("a", 1, ("joint", "fisher")),
        ("a", 3, ("joint",)),
        ("b", 2, ("first_order",)),
    ]


def test_amplitude_is_compared_as_a_share_of_its_matrix():
    found = nominate_columns(scores(amplitude=("b", [1e-6, 0, 0, 0])) | {}, 1, 0)
    assert [(n.matrix, n.column) for n in found] == [("b", 0)]
    assert share(np.zeros(3)).tolist() == [0, 0, 0]


def test_random_columns_are_none_of_the_nominated_and_repeat_with_the_seed():
    given = scores(joint=("a", [1, 2, 3, 4, 5, 6]))
    one, two, other = (nominate_columns(given, 3, 4, seed) for seed in (0, 0, 1))
    assert one == two != other
    random = [(n.matrix, n.column) for n in one if n.by == ("random",)]
    assert len(random) == 4
    assert len(set(random)) == 4
    assert not {("a", 3), ("a", 4), ("a", 5)} & set(random)
    assert len(nominate_columns(given, 3, 99)) == 10


def test_the_weight_between_two_spikes_is_found():
    model = speaking_llama()
    found = examine(model)
    matrix = next(m for m in found.block_matrices if m.role == "down_proj" and m.block == 1)
    up = next(m for m in found.block_matrices if m.role == "up_proj" and m.block == 1)
    with torch.no_grad():
        up.view()[17] *= 30.0  # input spike of down_proj
        matrix.view()[:, 17] *= 0.01
        matrix.view()[5, 17] = 8.0
    down = [m for m in found.block_matrices if m.role == "down_proj"]
    spikes = find_spikes(found, cut(2), down, 3)
    assert len(spikes) == 2
    assert (spikes[0].matrix, spikes[0].row, spikes[0].column) == (matrix.name, 5, 17)
    assert spikes[0].score > 3
