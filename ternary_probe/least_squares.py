"""Least-squares ternary fits of many units at once: one plane exactly, two planes by alternating least squares.

A unit is a row of ``x``, shape ``[units, size]``. Both fits need only the sorted magnitudes of a unit and their running
sums: codes carry the sign of their entry, so a fit is a set of thresholds on the magnitude and the scales that go with
it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ternary_probe.workspace import Workspace

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales below the smallest normal float32 vanish: they are stored as 0."""

# Starts of two planes in units of the one-plane scale. The first is the one-plane optimum, so two planes never do
# worse; the second is the Gaussian optimum, the third a uniform grid, the last ones serve units with an outlier.
_STARTS = ((1.0, 0.0), (1.13, 0.74), (1.14, 0.38), (1.0, 0.5), (1.4, 0.5), (1.5, 1.0), (2.0, 1.0), (2.5, 0.9))
_ROUNDS_EACH = 6
_ROUNDS_BEST = 60
_CONVERGED = 1e-7

# Codes of the five magnitudes of two planes in rising order, [order, plane, level]; order 1 is a1 - a2 < a2.
_LEVEL_CODES = torch.tensor(
    [[[0, 0, 1, 1, 1], [0, 1, -1, 0, 1]], [[0, 1, 0, 1, 1], [0, -1, 1, 0, 1]]], dtype=torch.int8
)


class PlaneFit(NamedTuple):
    """The best single plane of each unit."""

    threshold: Tensor
    """Smallest magnitude with a nonzero code, shape ``[units]``, dtype of the weights."""
    scale: Tensor
    """Least-squares scale, shape ``[units]``, float64."""


class TwoPlaneFit(NamedTuple):
    """Scales of two planes and the course of the alternation."""

    scales: Tensor
    """Larger first, not negative, shape ``[2, units]``, float64, rounded to float32 values."""
    explained: Tensor
    """``|w|^2`` minus the squared error after every round, from the start each unit ended with; never falls.

    Shape ``[rounds, units]``, float64.
    """


def fit_plane(x: Tensor, workspace: Workspace | None = None) -> PlaneFit:
    """Return the exact least-squares ternary fit of each unit.

    With the k largest magnitudes nonzero and their mean as scale the error is ``|w|^2 - S_k^2 / k``, ``S_k`` their sum:
    maximise over k.

    Args:
        x: Units, shape ``[units, size]``, float32 or float64.
        workspace: Scratch memory to reuse.

    Returns:
        Threshold and scale; both 0 for a unit of zeros, a NaN or infinite scale for a unit that is not finite.
    """
    workspace = workspace or Workspace(x.device)
    negated = _negated_magnitudes(x, workspace)
    return _best_prefix(negated, _running_sums(negated, workspace), workspace)


def fit_two_planes(x: Tensor, workspace: Workspace | None = None) -> TwoPlaneFit:
    """Return a two-plane fit of each unit: alternate the nearest of nine levels with a 2x2 solve for the scales.

    Both steps are exact, so the error never rises. The result is a local optimum, the best of several starts; it is
    never worse than the exact single plane, which is one of them.

    Args:
        x: Units, shape ``[units, size]``, float32 or float64.
        workspace: Scratch memory to reuse.

    Returns:
        Scales and the course of the alternation; NaN scales for a unit that is not finite.
    """
    workspace = workspace or Workspace(x.device)
    negated = _negated_magnitudes(x, workspace)
    sums = _running_sums(negated, workspace)
    single = _best_prefix(negated, sums, workspace).scale
    sums = pad(sums.neg_(), (1, 0))
    scales = single[:, None, None] * torch.tensor(_STARTS, dtype=torch.float64, device=x.device)  # [units, starts, 2]
    scales, first_course = _alternate(negated, sums, scales, _ROUNDS_EACH)
    best = first_course[-1].argmax(1, keepdim=True)
    scales = scales.gather(1, best[..., None].expand(-1, 1, 2))
    scales, last_course = _alternate(negated, sums, scales, _ROUNDS_BEST)
    course = torch.cat([first_course.gather(2, best.expand(len(first_course), -1, 1)), last_course])
    stored = scales[:, 0].float().double()
    return TwoPlaneFit(torch.where(stored < SMALLEST_SCALE, 0, stored).T.contiguous(), course[..., 0])


def decide_two_planes(x: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of the nearest of the nine levels ``c1 a1 + c2 a2``.

    Args:
        x: Units, shape ``[units, size]``, float32 or float64, finite.
        scales: Larger first, not negative, shape ``[2, units]``, float64; a plane of scale 0 gets codes 0.

    Returns:
        int8 codes, shape ``[2, units, size]``.
    """
    magnitude = x.abs()
    edges = _edges(scales.T).to(x.dtype)
    level = (magnitude > edges[:, 0:1]).long()
    for place in range(1, 4):
        level += magnitude > edges[:, place : place + 1]
    order = (scales[0] < 2 * scales[1]).long()
    table = _LEVEL_CODES.to(x.device)[order] * (scales.T > 0).to(torch.int8)[..., None]  # [units, planes, levels]
    sign = x.sign().to(torch.int8)
    return torch.stack([table[:, plane].gather(1, level).mul_(sign) for plane in range(2)])


def _alternate(negated: Tensor, sums: Tensor, scales: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Return improved scales ``[units, starts, 2]`` and what each round explained, ``[rounds, units, starts]``."""
    course: list[Tensor] = []
    for _ in range(rounds):
        normal = _normal_equations(negated, sums, scales)
        solved = normal.solve(scales)
        course.append(normal.explained(solved))
        scales = solved.abs().sort(dim=-1, descending=True).values  # the same nine levels with a1 >= a2 >= 0
        if len(course) > 1 and bool((course[-1] - course[-2] <= _CONVERGED * course[-1]).all()):
            break
    return scales, torch.stack(course)


class _NormalEquations(NamedTuple):
    """Gram matrix and right-hand side for the codes nearest to given scales; each ``[units, starts]``, float64."""

    g11: Tensor
    g12: Tensor
    g22: Tensor
    b1: Tensor
    b2: Tensor

    def solve(self, fallback: Tensor) -> Tensor:
        """Return the scales of least error; the fallback where the codes do not determine two scales."""
        determinant = (self.g11 * self.g22 - self.g12**2)[..., None]  # an integer
        first = self.g22 * self.b1 - self.g12 * self.b2
        second = self.g11 * self.b2 - self.g12 * self.b1
        return torch.where(determinant > 0.5, torch.stack([first, second], dim=2) / determinant.clamp(min=1), fallback)

    def explained(self, scales: Tensor) -> Tensor:
        """Return ``|w|^2`` minus the squared error of these codes with these scales."""
        a1, a2 = scales.unbind(2)
        return 2 * (self.b1 * a1 + self.b2 * a2) - (self.g11 * a1**2 + 2 * self.g12 * a1 * a2 + self.g22 * a2**2)


def _normal_equations(negated: Tensor, sums: Tensor, scales: Tensor) -> _NormalEquations:
    units, starts, _ = scales.shape
    edges = _edges(scales).to(negated.dtype).view(units, starts * 4)
    above = torch.searchsorted(negated, edges.neg_())
    counts, totals = (
        values - pad(values[..., 1:], (0, 1))
        for values in (above.double().view(units, starts, 4), sums.gather(1, above).view(units, starts, 4))
    )
    # The two lowest levels are a2 and a1 - a2, in one order or the other.
    swapped = (scales[..., 0] < 2 * scales[..., 1]).long()[..., None]
    n_second, s_second = (values.gather(2, swapped)[..., 0] for values in (counts, totals))
    n_difference, s_difference = (values.gather(2, 1 - swapped)[..., 0] for values in (counts, totals))
    n_first, n_sum, s_first, s_sum = counts[..., 2], counts[..., 3], totals[..., 2], totals[..., 3]
    return _NormalEquations(
        g11=n_difference + n_first + n_sum,
        g12=n_sum - n_difference,
        g22=n_second + n_difference + n_sum,
        b1=s_difference + s_first + s_sum,
        b2=s_second - s_difference + s_sum,
    )


def _edges(scales: Tensor) -> Tensor:
    """Return the midpoints between the magnitudes 0, a2, a1 - a2, a1, a1 + a2 in rising order: ``[..., 4]``."""
    a1, a2 = scales.unbind(-1)
    low, high = torch.minimum(a2, a1 - a2), torch.maximum(a2, a1 - a2)
    return torch.stack([low / 2, (low + high) / 2, (high + a1) / 2, a1 + a2 / 2], dim=-1)


def _best_prefix(negated: Tensor, sums: Tensor, workspace: Workspace) -> PlaneFit:
    size = negated.shape[1]
    counts = torch.arange(1, size + 1, dtype=torch.float64, device=negated.device)
    gain = torch.mul(sums, sums, out=workspace.take("gain", sums.shape, sums.dtype)).div_(counts)
    last = gain.argmax(1, keepdim=True)
    threshold, following = negated.gather(1, last), negated.gather(1, (last + 1).clamp(max=size - 1))
    # Equal magnitudes are in or out together: along such a run S^2/k is convex, so its maximum lies at an end of the
    # run; only rounding can stop inside.
    if bool(((following == threshold) & (last < size - 1)).any()):
        last = (negated <= threshold).sum(1, keepdim=True) - 1
    return PlaneFit(-threshold.squeeze(1), -(sums.gather(1, last) / (last + 1)).squeeze(1))


def _running_sums(negated: Tensor, workspace: Workspace) -> Tensor:
    out = workspace.take("sums", negated.shape, torch.float64)
    return torch.cumsum(negated, 1, dtype=torch.float64, out=out)


def _negated_magnitudes(x: Tensor, workspace: Workspace) -> Tensor:
    """Return ``-|x|`` sorted upwards along each unit: the largest magnitude first."""
    negated = torch.abs(x, out=workspace.take("magnitudes", x.shape, x.dtype)).neg_()
    if negated.device.type != "cpu":
        return negated.sort(dim=1).values
    negated.numpy().sort(axis=1)  # in place; with SIMD, 10 times faster than torch on rows of 4096
    return negated
