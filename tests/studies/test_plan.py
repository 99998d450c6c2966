"""What a study runs: options that are refused, and the recipe of every cell."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from small_study import changed, speaking_llama

from ternary_probe.anatomy import Anatomy, examine
from ternary_probe.errors import ProbeError
from ternary_probe.perturb import Magnitude, SignFlip
from ternary_probe.studies.plan import ARMS, LeverageOptions, make_cell, noise_cells, plan_cells
from ternary_probe.studies.published import DONG2026, DONG2026_RATES


@cache
def anatomy() -> Anatomy:
    return examine(speaking_llama())


def outlier(fraction: float = 0.1) -> dict[str, tuple[int, ...]]:
    """Made-up outlier columns: the last ones of each matrix."""
    return {
        m.name: tuple(range(m.in_features - int(fraction * m.in_features), m.in_features))
        for m in anatomy().block_matrices
    }


def plan(**fields: Any) -> list[Any]:
    return plan_cells(changed(**fields), anatomy().block_matrices, outlier())


def drawn(cell: Any) -> dict[str, set[int]]:
    """Entries of a flip cell, by matrix."""
    return {m.name: set(cell.recipe.draw(m).tolist()) for m in anatomy().block_matrices}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rates": (0.0,)}, r"rate 0 is not in \(0, 1\]"),
        ({"rates": (0.1, -0.01)}, r"rate -0.01 is not in \(0, 1\]"),
        ({"rates": (1.5,)}, r"rate 1.5 is not in \(0, 1\]"),
        ({"rates": (math.nan,)}, r"rate nan is not in \(0, 1\]"),
        ({"rates": (math.inf,)}, r"rate inf is not in \(0, 1\]"),
        ({"rates": ()}, "no rate given"),
        ({"rates": (0.1, 0.1)}, "--rates names one twice"),
        ({"fraction": 0.0}, r"fraction 0 is not in \(0, 1\)"),
        ({"fraction": 1.0}, r"fraction 1 is not in \(0, 1\)"),
        ({"fraction": math.nan}, r"fraction nan is not in \(0, 1\)"),
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": (-1, 0)}, "none negative"),
        ({"seeds": (3, 3)}, "--seeds names one twice"),
        ({"arms": ()}, "at least one arm"),
        ({"arms": ("outliers",)}, "unknown arm 'outliers'.*outlier, other, all"),
        ({"arms": ("all", "all")}, "--arms names one twice"),
        ({"matchings": ()}, "at least one arm and one matching"),
        ({"matchings": ("norm",)}, "unknown matching 'norm'.*count, rate, energy"),
        ({"confidence": 1.0}, "confidence 1 is not in"),
        ({"confidence": 0.05}, "confidence 0.05 is not in"),
    ],
    ids=str,
)
def test_options_that_could_only_give_a_wrong_number_are_refused(fields, message):
    with pytest.raises(ProbeError, match=message) as refused:
        changed(**fields)
    assert "\n" not in str(refused.value)


def test_defaults_are_the_sound_protocol():
    options = LeverageOptions()

    assert len(options.seeds) == 8
    assert options.matchings == ("count",)
    assert options.by == "energy"
    assert not options.paper_counts
    assert set(options.arms) == {"outlier", "other", "all"}


def test_there_is_one_cell_for_every_combination_and_whole_seeds_come_first():
    cells = plan(seeds=(4, 7), matchings=("count", "rate"), arms=ARMS)

    combinations = {(c.rate, c.arm, c.matching, c.seed) for c in cells}
    assert len(cells) == len(combinations) == 2 * 2 * 2 * len(ARMS)
    assert [c.seed for c in cells] == sorted(c.seed for c in cells)


def test_count_matching_flips_the_same_number_in_every_matrix_whatever_the_arm():
    cells = {c.arm: c for c in plan(rates=(0.05,), seeds=(0,))}

    for matrix in anatomy().block_matrices:
        wanted = round(0.05 * matrix.out_features * len(outlier()[matrix.name]))
        assert {arm: len(cell.recipe.draw(matrix)) for arm, cell in cells.items()} == dict.fromkeys(cells, wanted)


def test_rate_matching_flips_the_same_share_of_each_pool():
    cells = {c.arm: c for c in plan(rates=(0.05,), seeds=(0,), matchings=("rate",))}

    for matrix in anatomy().block_matrices:
        few = len(outlier()[matrix.name])
        pools = {"outlier": few, "other": matrix.in_features - few, "all": matrix.in_features}
        for arm, columns in pools.items():
            assert len(cells[arm].recipe.draw(matrix)) == round(0.05 * matrix.out_features * columns)


@pytest.mark.parametrize("matching", ["count", "rate", "energy"])
def test_arms_stay_in_their_columns_and_outlier_and_other_never_meet(matching):
    cells = {c.arm: c for c in plan(rates=(0.05,), seeds=(0,), matchings=(matching,))}

    for matrix in anatomy().block_matrices:
        n, few = matrix.in_features, set(outlier()[matrix.name])
        columns = {arm: {e % n for e in cell.recipe.draw(matrix).tolist()} for arm, cell in cells.items()}
        assert columns["outlier"] <= few
        assert not columns["other"] & few


def test_cells_that_change_the_same_entries_share_a_key_and_no_others_do():
    cells = plan(rates=(0.05,), seeds=(0,), matchings=("count", "rate", "energy"), arms=ARMS)

    by_key: dict[str, list[Any]] = {}
    for cell in cells:
        by_key.setdefault(cell.key, []).append(cell)
    shared = {frozenset((c.arm, c.matching) for c in group) for group in by_key.values() if len(group) > 1}
    assert shared == {
        frozenset({("outlier", "count"), ("outlier", "rate")}),
        frozenset({("magnitude_outlier", "count"), ("magnitude_outlier", "rate")}),
        frozenset({("all", "rate"), ("all", "energy")}),
        frozenset({("magnitude_all", "rate"), ("magnitude_all", "energy")}),
    }
    for group in by_key.values():
        flips = [c for c in group if isinstance(c.recipe, SignFlip)]
        assert all(drawn(c) == drawn(flips[0]) for c in flips)


def test_magnitude_arms_are_matched_to_the_flip_of_their_own_pool():
    cells = {c.arm: c for c in plan(rates=(0.05,), seeds=(3,), arms=ARMS)}

    for pool in ("outlier", "other", "all"):
        control, flip = cells[f"magnitude_{pool}"], cells[pool]
        assert isinstance(control.recipe, Magnitude)
        assert control.recipe.flip() == flip.recipe


def test_seeds_and_matrices_draw_different_entries():
    first, second = plan(rates=(0.05,), seeds=(0, 1), arms=("all",))
    masks = [drawn(first), drawn(second)]

    for name in masks[0]:
        assert masks[0][name] != masks[1][name]
    same_shape = [f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)]
    assert masks[0][same_shape[0]] != masks[0][same_shape[1]]


def test_a_cell_does_not_depend_on_what_else_is_planned():
    alone = make_cell(changed(), anatomy().block_matrices, outlier(), 0.05, "other", "count", 1)
    among = next(c for c in plan(seeds=(5, 1, 0), arms=ARMS) if (c.arm, c.rate, c.seed) == ("other", 0.05, 1))

    assert among == alone


def test_the_papers_counts_are_a_total_in_proportion_to_the_arms_own_pools():
    cells = {c.arm: c for c in plan(rates=(0.05,), seeds=(0,), paper_counts=True)}

    matrices = anatomy().block_matrices
    total = int(0.05 * sum(m.out_features * len(outlier()[m.name]) for m in matrices))
    for arm in ("outlier", "other"):
        counts = cells[arm].recipe.counts
        pools = np.array([
            m.out_features * (len(outlier()[m.name]) if arm == "outlier" else m.in_features - len(outlier()[m.name]))
            for m in matrices
        ])
        exact = total * pools / pools.sum()
        found = np.array([counts[m.name] for m in matrices])
        assert found.sum() == total
        assert (np.abs(found - exact) < 1).all()


def test_paper_counts_are_not_confused_with_rounding_in_each_matrix():
    cells = plan(rates=(0.05,), seeds=(0,), matchings=("count", "rate"), arms=("outlier",), paper_counts=True)

    assert len({c.key for c in cells}) == 2


def test_noise_cells_are_flips_at_a_tenth_of_the_lowest_rate():
    cells = noise_cells(changed(rates=(0.3, 0.2), seeds=tuple(range(6))), anatomy().block_matrices, outlier())

    assert [c.rate for c in cells] == [0.02] * 4
    assert [c.seed for c in cells] == [0, 1, 2, 3]
    assert {c.arm for c in cells} == {"other"}
    assert not {c.key for c in cells} & {c.key for c in plan(rates=(0.3, 0.2))}


def test_there_are_no_noise_cells_where_a_tenth_rounds_to_nothing():
    assert noise_cells(changed(rates=(0.001,)), anatomy().block_matrices, outlier()) == []


def test_the_papers_figures_are_those_of_its_table():
    assert [p.rate for p in DONG2026] == list(DONG2026_RATES) == [0.05, 0.005, 0.001, 0.0005, 0.0001]
    for published in DONG2026:
        assert published.ratio == pytest.approx(published.delta_nll_outlier / published.delta_nll_other, rel=0.03)
        assert published.flips == pytest.approx(48_277_500 * published.rate, rel=1e-3)
