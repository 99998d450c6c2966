"""Positions: pinned for good, equal to a slow rendering of their definition, uniform, nested, from their label alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from ternary_probe.perturb.positions import sample, stream

WORD = (1 << 64) - 1

# kind, seed, name, shape, pool, count, first 64 bits of SHA-256 over the positions as little-endian int64.
GOLDEN = [
    ("sign_flip", 0, "one", (1, 1), 1, 1, "af5570f5a1810b7a"),
    ("sign_flip", 0, "model.layers.0.self_attn.q_proj.weight", (32, 32), 1024, 10, "9885617e88d9c25a"),
    ("sign_flip", 1, "model.layers.0.self_attn.q_proj.weight", (32, 32), 1024, 10, "2485441e0177665d"),
    ("magnitude", 0, "model.layers.0.self_attn.q_proj.weight", (32, 32), 1024, 10, "e1fdc3ea93a9749b"),
    ("sign_flip", 0, "power.of.two", (256, 256), 65536, 655, "17c89ac2283f92f2"),
    ("sign_flip", 0, "one.above.a.power", (1, 65537), 65537, 655, "21c2e9934c18a18c"),
    ("sign_flip", 0, "half", (25, 40), 1000, 500, "d9a642dc48add1e1"),
    ("sign_flip", 0, "more.than.half", (25, 40), 1000, 501, "cf1a5d69e4279b70"),
    ("sign_flip", 0, "all.but.one", (25, 40), 1000, 999, "d868eef247d85080"),
    ("sign_flip", 0, "all", (25, 40), 1000, 1000, "702746827e553786"),
    ("sign_flip", 123456789, "model.layers.29.mlp.down_proj.weight", (576, 1536), 43776, 219, "9e4274b0334a876f"),
    ("sign_flip", 0, "huge", (100_000, 60_000), 6_000_000_000, 7, "c8cea2f5a50e0b12"),
    ("outlier_columns", 3, "model.layers.4.input_layernorm", (1, 576), 576, 8, "794bc4ee946d0276"),
    ("sign_flip", 0, "größe", (3, 5), 15, 4, "ddc81102d2391bc0"),
]


def ids(case):
    return f"{case[2]}-{case[4]}-{case[5]}"


def philox_words(key: int) -> Iterator[int]:
    """Philox4x64 with ten rounds, from its definition (Salmon et al., SC 2011); numpy counts from one."""
    block = 0
    while True:
        block += 1
        a, b, c, d = block & WORD, block >> 64 & WORD, 0, 0
        k0, k1 = key & WORD, key >> 64 & WORD
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = (second >> 64) ^ b ^ k0, second & WORD, (first >> 64) ^ d ^ k1, first & WORD
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
        yield from (a, b, c, d)


def slow_positions(kind, seed, name, shape, pool, count) -> list[int]:
    """The documented mapping, one word at a time."""
    digest = hashlib.sha256(f"ternary_probe/1|{kind}|{seed}|{name}|{shape[0]}x{shape[1]}".encode()).digest()
    words = philox_words(int.from_bytes(digest[:16], "little"))
    wanted = pool - count if count > pool / 2 else count
    width = max(1, (pool - 1).bit_length())
    drawn: set[int] = set()
    while len(drawn) < wanted:
        value = next(words) >> (64 - width)
        if value < pool:
            drawn.add(value)
    return sorted(drawn if wanted == count else set(range(pool)) - drawn)


def digest_of(positions) -> str:
    return hashlib.sha256(np.asarray(positions, dtype="<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("case", GOLDEN, ids=ids)
def test_the_mapping_never_changes(case):
    *label, pool, count, golden = case
    assert digest_of(sample(stream(*label), pool, count)) == golden


@pytest.mark.parametrize("case", GOLDEN, ids=ids)
def test_positions_equal_a_slow_rendering_of_their_definition(case):
    *label, pool, count, _ = case
    assert sample(stream(*label), pool, count).tolist() == slow_positions(*label, pool, count)


@pytest.mark.parametrize("pool", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_every_count_of_a_small_pool_equals_the_slow_rendering(pool):
    for count in range(pool + 1):
        for seed in range(5):
            label = ("sign_flip", seed, "small", (1, pool))
            got = sample(stream(*label), pool, count)
            assert got.dtype == np.int64
            assert got.tolist() == slow_positions(*label, pool, count)


@pytest.mark.parametrize(
    ("pool", "count"), [(1000, 1), (1000, 333), (1000, 500), (1000, 501), (4096, 4000), (10**12, 50)]
)
def test_positions_are_distinct_sorted_inside_the_pool_and_as_many_as_asked(pool, count):
    got = sample(stream("sign_flip", 0, "w", (10, 100)), pool, count)
    assert got.size == count
    assert (np.diff(got) > 0).all()
    assert got[0] >= 0
    assert got[-1] < pool


@pytest.mark.parametrize(("pool", "count"), [(10, 11), (10, -1), (0, 1)])
def test_more_than_the_pool_holds_is_refused(pool, count):
    with pytest.raises(ValueError, match=f"cannot draw {count} of {pool}"):
        sample(stream("sign_flip", 0, "w", (1, 10)), pool, count)


@pytest.mark.parametrize(("pool", "count", "bins"), [(65536, 4000, 64), (60_000, 25_000, 50), (50_000, 45_000, 50)])
def test_positions_are_uniform_over_the_pool(pool, count, bins):
    # Without replacement the bin counts vary less than multinomially, by (pool - count) / (pool - 1).
    statistic = 0.0
    seeds = 20
    for seed in range(seeds):
        got = sample(stream("sign_flip", seed, "w", (1, pool)), pool, count)
        observed = np.bincount(got * bins // pool, minlength=bins)
        expected = count * np.bincount(np.arange(pool) * bins // pool, minlength=bins) / pool
        statistic += float(((observed - expected) ** 2 / expected).sum()) * (pool - 1) / (pool - count)
    p_value = stats.chi2.sf(statistic, seeds * (bins - 1))
    assert 1e-4 < p_value < 1 - 1e-4


def test_every_entry_is_drawn_equally_often_over_seeds():
    hits = np.zeros(12)
    for seed in range(3000):
        hits[sample(stream("sign_flip", seed, "w", (3, 4)), 12, 5)] += 1
    variance = 3000 * (5 / 12) * (7 / 12)
    statistic = float(((hits - 1250) ** 2 / variance).sum()) * 11 / 12
    assert stats.chi2.sf(statistic, 11) > 1e-4


def test_a_lower_rate_draws_a_subset_of_a_higher_one_up_to_half_the_pool():
    label = ("sign_flip", 4, "w", (100, 100))
    draws = [set(sample(stream(*label), 10_000, count).tolist()) for count in (1, 10, 50, 500, 1000, 4999, 5000)]
    assert all(small < large for small, large in pairwise(draws))


def test_positions_do_not_depend_on_any_global_random_state_and_leave_it_alone():
    def draw():
        return sample(stream("sign_flip", 0, "w", (50, 50)), 2500, 100)

    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = draw()
    untouched = (np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, draw())
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    draw()
    np.testing.assert_array_equal(untouched[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(untouched[1], torch.get_rng_state())


def test_each_part_of_the_label_gives_another_stream():
    base = ("sign_flip", 0, "layers.0.w", (40, 25))
    others = [
        ("magnitude", 0, "layers.0.w", (40, 25)),
        ("sign_flip", 1, "layers.0.w", (40, 25)),
        ("sign_flip", 0, "layers.1.w", (40, 25)),
        ("sign_flip", 0, "layers.0.w", (25, 40)),
    ]
    draws = {tuple(sample(stream(*label), 1000, 100).tolist()) for label in (base, *others)}
    assert len(draws) == 5


def test_draws_of_two_matrices_overlap_as_independent_ones_do():
    pool, count = 10_000, 1000
    overlaps = []
    for seed in range(50):
        first = sample(stream("sign_flip", seed, "layers.0.w", (100, 100)), pool, count)
        second = sample(stream("sign_flip", seed, "layers.1.w", (100, 100)), pool, count)
        overlaps.append(np.intersect1d(first, second).size)
    exact = stats.hypergeom(pool, count, count)
    assert abs(np.mean(overlaps) - exact.mean()) < 5 * exact.std() / np.sqrt(50)
