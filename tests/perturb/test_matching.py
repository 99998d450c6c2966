"""How arms are made comparable: by count, by rate, by energy, and by the paper's proportional counts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_oracle import assert_bit_identical, changed, fake_matrix, first_columns, logical, logical_all, snapshot

from ternary_probe import anatomy
from ternary_probe.errors import ProbeError
from ternary_probe.measure import Activations, InputMoments
from ternary_probe.perturb import ColumnFlip, Columns, NoEffectError, SignFlip
from ternary_probe.perturb.draw import proportional_counts


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama")


@pytest.fixture(scope="module")
def found(llama):
    return anatomy.examine(llama)


def arm(found, select, matching, *, rate=0.1, fraction=0.2, seed=0):
    matrices = list(found.block_matrices)
    columns = Columns(select=select, fraction=fraction)
    recipe = SignFlip(rate=rate, columns=columns, matching=matching, seed=seed)
    return recipe.resolved_with(matrices, first_columns(matrices, fraction))


@pytest.mark.parametrize("select", ["outlier", "other", "all"])
def test_matched_by_count_every_arm_flips_the_outlier_arms_number_in_every_matrix(llama, found, select):
    before = logical_all(llama, [m.name for m in found.block_matrices])
    with arm(found, select, "count").applied(found) as done:
        hit = changed(llama, before)
    for name, entries in hit.items():
        rows, width = before[name].shape
        outliers = int(0.2 * width)
        assert entries.size == round(0.1 * rows * outliers)
        columns = entries % width
        if select != "all":
            assert ((columns < outliers) == (select == "outlier")).all()
    assert done.entries == sum(entries.size for entries in hit.values())


@pytest.mark.parametrize("select", ["outlier", "other", "all"])
def test_matched_by_rate_every_arm_flips_the_same_share_of_its_own_pool(llama, found, select):
    before = logical_all(llama, [m.name for m in found.block_matrices])
    with arm(found, select, "rate").applied(found):
        hit = changed(llama, before)
    for name, entries in hit.items():
        rows, width = before[name].shape
        outliers = int(0.2 * width)
        pool = rows * {"outlier": outliers, "other": width - outliers, "all": width}[select]
        assert entries.size == round(0.1 * pool)


@pytest.mark.parametrize("select", ["outlier", "other", "all"])
def test_matched_by_energy_every_arm_has_the_norm_of_the_flip_over_all_columns(llama, found, select):
    names = [m.name for m in found.block_matrices]
    before, whole = logical_all(llama, names), snapshot(llama)
    with SignFlip(rate=0.1).applied(found):
        wanted = {name: float((logical(llama, name) - before[name]).double().norm()) for name in names}
    recipe = arm(found, select, "energy")
    with recipe.applied(found) as done:
        hit = changed(llama, before)
        for name in names:
            moved = logical(llama, name).double() - before[name].double()
            assert float(moved.norm()) == pytest.approx(wanted[name], rel=1e-6)
            rows, width = before[name].shape
            outliers = int(0.2 * width)
            pool = rows * {"outlier": outliers, "other": width - outliers, "all": width}[select]
            assert hit[name].size == round(0.1 * pool)
            # One factor for the whole matrix, and for `all` it is the pure flip.
            factors = (moved.reshape(-1) / before[name].double().reshape(-1))[hit[name]].numpy()
            np.testing.assert_allclose(factors, factors[0], rtol=1e-4)
            if select == "all":
                np.testing.assert_array_equal(factors, -2)
        assert done.delta_energy == pytest.approx(sum(value**2 for value in wanted.values()), rel=1e-5)
    assert_bit_identical(llama, whole)


def test_the_energy_arm_flips_the_entries_the_rate_arm_flips(llama, found):
    before = logical_all(llama, [m.name for m in found.block_matrices])
    with arm(found, "outlier", "energy").applied(found):
        scaled = changed(llama, before)
    with arm(found, "outlier", "rate").applied(found):
        plain = changed(llama, before)
    assert all(np.array_equal(scaled[name], plain[name]) for name in before)


def test_more_flips_than_the_selected_columns_hold_is_refused(llama, found):
    recipe = arm(found, "other", "count", rate=1.0, fraction=0.6)
    whole = snapshot(llama)
    with pytest.raises(ProbeError, match="entries to flip but only"), recipe.applied(found):
        pass
    assert_bit_identical(llama, whole)


@pytest.mark.parametrize("kind", ["sign_flip", "column_flip"])
def test_a_fraction_below_one_column_is_refused(found, kind):
    columns = Columns(select="outlier", fraction=0.01)
    recipe = SignFlip(rate=0.1, columns=columns) if kind == "sign_flip" else ColumnFlip(columns=columns)
    moments = {m.name: InputMoments(np.ones(m.in_features), np.ones(m.in_features), 5) for m in found.block_matrices}
    with pytest.raises(ProbeError, match=r"no outlier column selected.*raise --fraction"):
        recipe.resolve(found, Activations(moments))


@pytest.mark.parametrize("kind", ["sign_flip", "column_flip"])
def test_a_matrix_no_token_reached_is_named(found, kind):
    columns = Columns(select="outlier")
    recipe = SignFlip(rate=0.1, columns=columns) if kind == "sign_flip" else ColumnFlip(columns=columns)
    with pytest.raises(ProbeError, match=r"no activation reached model.layers.0.self_attn.q_proj.weight .*and 13 more"):
        recipe.resolve(found, Activations({}))


def test_a_rate_that_rounds_to_no_entry_anywhere_has_no_effect(llama, found):
    whole = snapshot(llama)
    with (
        pytest.raises(NoEffectError, match="selects no entry"),
        arm(found, "outlier", "count", rate=1e-5).applied(found),
    ):
        pass
    assert_bit_identical(llama, whole)


def shapes(blocks, width, inner, kv):
    for block in range(blocks):
        for role, rows, columns in (
            ("q", width, width),
            ("k", kv, width),
            ("v", kv, width),
            ("o", width, width),
            ("gate", inner, width),
            ("up", inner, width),
            ("down", width, inner),
        ):
            yield fake_matrix(f"layers.{block}.{role}.weight", rows, columns)


@pytest.mark.parametrize(("rate", "flips"), [(0.001, 5_160), (0.005, 25_950), (0.02, 103_740)])
@pytest.mark.parametrize("select", ["outlier", "other", "all"])
def test_smollm2_shapes_give_the_known_count_matched_totals(rate, flips, select):
    matrices = list(shapes(30, 576, 1536, 192))
    recipe = SignFlip(rate=rate, matching="count", columns=Columns(select=select))
    ready = recipe.resolved_with(matrices, first_columns(matrices, 0.05))
    assert sum(ready.counts.values()) == flips
    assert sum(ready.draw(matrix).numel() for matrix in matrices) == flips


@pytest.mark.parametrize(
    ("rate", "flips"), [(0.05, 2_413_875), (0.005, 241_387), (0.001, 48_277), (0.0005, 24_138), (0.0001, 4_827)]
)
@pytest.mark.parametrize("select", ["outlier", "other", "all"])
def test_tinyllama_shapes_give_the_papers_totals_allocated_in_proportion(rate, flips, select):
    matrices = list(shapes(22, 2048, 5632, 256))
    assert len(matrices) == 154
    outlier = first_columns(matrices, 0.05)
    recipe = SignFlip(rate=rate, matching="count", columns=Columns(select=select)).resolved_with(matrices, outlier)
    counts = proportional_counts(recipe, matrices, outlier)
    assert sum(counts.values()) == flips
    sizes = {
        m.name: m.out_features
        * {"outlier": len(outlier[m.name]), "other": m.in_features - len(outlier[m.name]), "all": m.in_features}[select]
        for m in matrices
    }
    for name, count in counts.items():
        assert abs(count - Fraction(flips * sizes[name], sum(sizes.values()))) < 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 60)), min_size=1, max_size=8),
    st.floats(1e-4, 1),
    st.floats(0.05, 0.95),
)
def test_proportional_counts_follow_the_largest_remainders(sizes, rate, fraction):
    matrices = [fake_matrix(f"m{i}", *size) for i, size in enumerate(sizes)]
    outlier = first_columns(matrices, fraction)
    if not any(outlier.values()):
        return
    recipe = SignFlip(rate=rate, columns=Columns(select="other"), matching="count").resolved_with(matrices, outlier)
    counts = list(proportional_counts(recipe, matrices, outlier).values())
    total = int(rate * sum(m.out_features * len(outlier[m.name]) for m in matrices))
    pools = [m.out_features * (m.in_features - len(outlier[m.name])) for m in matrices]
    exact = [Fraction(total * pool, sum(pools)) for pool in pools]
    assert sum(counts) == total
    assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    raised = [share - int(share) for count, share in zip(counts, exact, strict=True) if count > int(share)]
    kept = [share - int(share) for count, share in zip(counts, exact, strict=True) if count == int(share)]
    assert float(min(raised, default=1)) >= float(max(kept, default=0)) - 1e-9


def test_proportional_counts_of_columns_without_an_entry_are_refused():
    matrices = [fake_matrix("m", 4, 10)]
    recipe = SignFlip(rate=0.1, columns=Columns(select="outlier", outlier={"m": ()}), matching="count")
    with pytest.raises(ProbeError, match="hold no entry"):
        proportional_counts(recipe, matrices, {"m": (1,)})


def test_counts_of_the_paper_are_what_is_flipped(llama, found):
    matrices = list(found.block_matrices)
    outlier = first_columns(matrices, 0.2)
    recipe = arm(found, "other", "count", rate=0.05)
    counts = proportional_counts(recipe, matrices, outlier)
    before = logical_all(llama, list(counts))
    with recipe.model_copy(update={"counts": counts}).applied(found):
        hit = changed(llama, before)
    assert {name: entries.size for name, entries in hit.items()} == counts
