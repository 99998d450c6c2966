"""Which entries a recipe touches: the same on every device, in every dtype, on every rank.

Positions depend on (seed, recipe kind, matrix name, shape) and on nothing else. The mapping, fixed for good and pinned by
golden digests in the tests:

1. key: the first 128 bits of SHA-256 over ``"ternary_probe/1|kind|seed|name|out x in"``, as the key of numpy's Philox4x64.
2. draw: `random_raw` words; the top ``b`` bits of each, ``b`` the bit length of ``pool - 1``; values >= pool are skipped.
3. set: the first ``count`` distinct values, in the order drawn. For ``count > pool / 2`` the complement is drawn instead.

numpy promises the raw Philox stream across versions; it does not promise `Generator.choice`, so that is not used. Draws
are nested: with one seed, the flips of a lower rate are a subset of those of a higher one (up to half the pool).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def stream(kind: str, seed: int, name: str, shape: tuple[int, int]) -> np.random.Philox:
    """Return the random stream of one matrix under one recipe.

    Args:
        kind: Recipe kind, ``"sign_flip"`` for example.
        seed: The user's seed.
        name: Qualified name of the matrix.
        shape: ``(out_features, in_features)``.

    Returns:
        A Philox bit generator, of which only `random_raw` is to be used.
    """
    label = f"ternary_probe/1|{kind}|{seed}|{name}|{shape[0]}x{shape[1]}"
    digest = hashlib.sha256(label.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def sample(bits: np.random.Philox, pool: int, count: int) -> Indices:
    """Draw a uniform random subset of ``range(pool)``, without replacement.

    Args:
        bits: The matrix's stream, fresh.
        pool: Size of the set drawn from.
        count: Size of the subset, at most ``pool``.

    Returns:
        Sorted distinct indices, shape ``[count]``, int64.

    Raises:
        ValueError: If ``count`` is negative or larger than ``pool``.
    """
    if not 0 <= count <= pool:
        raise ValueError(f"cannot draw {count} of {pool} without replacement")
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if count > pool // 2:
        keep = np.ones(pool, dtype=bool)
        keep[sample(bits, pool, pool - count)] = False
        return np.flatnonzero(keep)
    shift = np.uint64(64 - max(1, (pool - 1).bit_length()))
    # Drawing exactly as many values as are still missing never overshoots, so the union of the batches is the set of the
    # first `count` distinct values of the stream, and no record of the order is needed.
    chosen = np.empty(0, dtype=np.int64)
    while (missing := count - chosen.size) > 0:
        batch = _below(bits, pool, shift, missing)
        chosen = _distinct(batch if chosen.size == 0 else np.concatenate([chosen, batch]))
    return chosen


def _distinct(values: Indices) -> Indices:
    """Return the sorted distinct values. `np.unique` does the same, ten times slower on int64."""
    values = np.sort(values)
    keep = np.ones(values.size, dtype=bool)
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


def _below(bits: np.random.Philox, pool: int, shift: np.uint64, count: int) -> Indices:
    """Return the stream's next ``count`` values below ``pool``; each raw word is used or skipped exactly once."""
    kept: list[Indices] = []
    missing = count
    while missing > 0:
        words = (bits.random_raw(missing) >> shift).astype(np.int64)
        accepted = words[words < pool]
        kept.append(accepted)
        missing -= accepted.size
    return kept[0] if len(kept) == 1 else np.concatenate(kept)
