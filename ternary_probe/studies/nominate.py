"""Screens nominate, measurements decide: which columns and which single weights are worth an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ternary_probe.anatomy import tap_inputs
from ternary_probe.measure.activations import column_energy

if TYPE_CHECKING:
    from ternary_probe.anatomy import Anatomy, WeightMatrix
    from ternary_probe.measure.activations import Activations
    from ternary_probe.measure.fisher import FisherScreen
    from ternary_probe.text import Windows

Vector = NDArray[np.float64]
Scores = Mapping[str, Vector]

SCREENS = ("joint", "fisher", "first_order", "amplitude")


class Nominated(NamedTuple):
    """A column to be measured, and who named it."""

    matrix: str
    column: int
    by: tuple[str, ...]


class Spike(NamedTuple):
    """The weight between the largest input and the largest output of a matrix at its most extreme token."""

    matrix: str
    row: int
    column: int
    score: float
    """``|w_ij x_j|`` over the root mean square of the matrix's outputs at that token, times its share of ``y_i``."""


def column_scores(
    screen: FisherScreen, activations: Activations, matrices: Sequence[WeightMatrix]
) -> dict[str, dict[str, Vector]]:
    """Return every screen's score of every column.

    Args:
        screen: The Fisher pass.
        activations: Input moments of the matrices.
        matrices: The matrices, all of them screened.

    Returns:
        Screen to matrix name to ``[in_features]``, larger is worse: ``joint`` the second order of the whole column,
        ``fisher`` the sum over its entries, ``first_order`` ``|sum 2 w g|``, ``amplitude`` ``E[x_j^2] ||W_:j||^2``.
    """
    scores: dict[str, dict[str, Vector]] = {name: {} for name in SCREENS}
    for matrix in matrices:
        found = screen.columns[matrix.name]
        scores["joint"][matrix.name] = found.whole_column
        scores["fisher"][matrix.name] = found.second
        scores["first_order"][matrix.name] = np.abs(found.first)
        energy = activations.moments[matrix.name].energy if matrix.name in activations.moments else 0.0
        scores["amplitude"][matrix.name] = column_energy(matrix) * energy
    return scores


def nominate_columns(scores: Mapping[str, Scores], top: int, random: int, seed: int = 0) -> list[Nominated]:
    """Return the union of every screen's top columns, and a random sample of the rest.

    The amplitude score has no common unit between matrices, so it is compared as a share of its matrix's sum.

    Args:
        scores: From `column_scores`.
        top: Columns from each screen, over all matrices.
        random: Columns drawn at random from those nobody named.
        seed: Seed of the sample.

    Returns:
        Columns in the order of matrix and column; each with the screens that named it, or ``random``.
    """
    names = list(next(iter(scores.values())))
    sizes = [len(scores["fisher"][name]) for name in names]
    places = [(name, column) for name, size in zip(names, sizes, strict=True) for column in range(size)]
    named: dict[int, list[str]] = {}
    for screen in SCREENS:
        flat = np.concatenate([share(scores[screen][n]) if screen == "amplitude" else scores[screen][n] for n in names])
        for index in np.argsort(-flat, kind="stable")[:top]:
            if flat[index] > 0:
                named.setdefault(int(index), []).append(screen)
    rest = [index for index in range(len(places)) if index not in named]
    generator = np.random.Generator(np.random.Philox(key=seed))
    for position in generator.permutation(len(rest))[:random]:
        named[rest[int(position)]] = ["random"]
    return [Nominated(*places[index], tuple(by)) for index, by in sorted(named.items())]


def share(values: Vector) -> Vector:
    """Return values as shares of their sum.

    Args:
        values: Not negative.

    Returns:
        Shares; all 0 where the sum is.
    """
    total = float(values.sum())
    return values / total if total > 0 else np.zeros_like(values)


@torch.no_grad()
def find_spikes(anatomy: Anatomy, windows: Windows, matrices: Sequence[WeightMatrix], top: int) -> list[Spike]:
    """Find the weights that join a spike at a matrix's input to a spike at its output.

    At the token with the largest ``|x|`` the output is ``W x``; the entry between its largest coordinate and the largest
    input makes most of it where a single weight does. A weight of which that is not so scores low.

    Args:
        anatomy: The model's anatomy.
        windows: Text.
        matrices: Matrices to watch.
        top: How many to return.

    Returns:
        At most one a matrix, largest score first.
    """
    peak: dict[str, tuple[float, torch.Tensor]] = {}

    def watch(matrix: WeightMatrix, x: torch.Tensor) -> None:
        largest, token = x.abs().amax(-1).max(0)
        if matrix.name not in peak or float(largest) > peak[matrix.name][0]:
            peak[matrix.name] = float(largest), x[token].clone()

    with tap_inputs(anatomy, matrices, watch):
        for row in windows.inputs:
            anatomy.head.states(row[None].to(anatomy.input_device))
    spikes = []
    for matrix in matrices:
        if matrix.name not in peak:
            continue
        x = peak[matrix.name][1]
        weight = matrix.view()
        y = weight.float() @ x.float()
        column, row = int(x.abs().argmax()), int(y.abs().argmax())
        rms = float(y.square().mean().sqrt())
        part = abs(float(weight[row, column]) * float(x[column]))
        if rms > 0:
            spikes.append(Spike(matrix.name, row, column, part / rms * min(1.0, part / abs(float(y[row])))))
    return sorted(spikes, key=lambda spike: -spike.score)[:top]
