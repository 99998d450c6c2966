"""Monte Carlo of the models `ternary_probe.theory` solves: the two-layer block and the stack of layers.

Ratios are ratios of sums over inputs, one per seed, so that a caller can form intervals over seeds (arXiv 2605.18933).
All draws come from CPU generators keyed by (seed, purpose, layer): the same numbers on every device, and no arm shifts
another arm's draws. Weights are held for one layer and one arm at a time; the two-layer model takes its inputs in chunks,
the stack carries the states of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ternary_probe.errors import ProbeError

Quantizer = Callable[[Tensor], Tensor]
"""A function from a weight matrix ``[out, in]`` to its quantized values, same shape."""

NOISES = ("sign_flip", "constant", "half_normal", "multiplicative")
"""Perturbations known by name; the last three get the flip's Frobenius norm in each draw. The paper's is constant."""

_WEIGHT, _SECOND, _INPUT, _FLIP, _HALF_NORMAL, _MULTIPLICATIVE = range(6)


class Estimate(NamedTuple):
    """A quantity measured once per seed; every field may carry a leading axis after the seeds (layers)."""

    value: Tensor
    """Mean over seeds, float64."""
    standard_error: Tensor
    """Standard error of that mean, float64; NaN with a single seed."""
    per_seed: Tensor
    """One value per seed, shape ``[seeds, ...]``, float64."""

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return Student's t interval of the mean over seeds.

        Args:
            confidence: Coverage, in (0, 1).

        Returns:
            Lower and upper end.

        Raises:
            ProbeError: If there is one seed only or the confidence is not in (0, 1).
        """
        seeds = len(self.per_seed)
        if seeds < 2 or not 0 < confidence < 1:
            raise ProbeError(
                f"an interval needs at least 2 seeds and a confidence in (0, 1); got {seeds} seeds and {confidence}"
            )
        half = float(stats.t.ppf((1 + confidence) / 2, seeds - 1)) * self.standard_error
        return self.value - half, self.value + half


class TwoLayerSample(NamedTuple):
    """Energies of the output's change, summed over inputs, per arm and seed."""

    arms: tuple[str, ...]
    transverse: Tensor
    """Energy across the clean output, shape ``[arms, seeds]``, float64."""
    radial: Tensor
    """Energy along the clean output, shape ``[arms, seeds]``, float64."""
    clean: Tensor
    """Energy of the clean output, shape ``[seeds]``, float64."""
    inner: Tensor
    """Inner product of the change with the clean output, shape ``[arms, seeds]``, float64."""

    def ratio(self, numerator: str = "sign_flip", denominator: str = "constant") -> Estimate:
        """Return the ratio of transverse energies of two arms.

        Args:
            numerator: Name of an arm.
            denominator: Name of an arm.

        Returns:
            Estimate over seeds.
        """
        return _estimate(self.transverse[self._index(numerator)] / self.transverse[self._index(denominator)])

    def radial_fraction(self, arm: str) -> Estimate:
        """Return the radial share of an arm's energy.

        Args:
            arm: Name of an arm.

        Returns:
            Estimate over seeds.
        """
        radial = self.radial[self._index(arm)]
        return _estimate(radial / (radial + self.transverse[self._index(arm)]))

    def output_cos2(self, arm: str) -> Estimate:
        """Return the share of the perturbed output's energy that lies along the clean output.

        Args:
            arm: Name of an arm.

        Returns:
            Estimate over seeds of the squared cosine, as a ratio of sums.
        """
        row = self._index(arm)
        along = self.clean + 2 * self.inner[row] + self.radial[row]
        return _estimate(along / (along + self.transverse[row]))

    def _index(self, arm: str) -> int:
        if arm not in self.arms:
            raise ProbeError(f"no arm '{arm}' was simulated; there are {', '.join(self.arms)}")
        return self.arms.index(arm)


class DepthSample(NamedTuple):
    """Transverse energies after each layer, summed over inputs."""

    sign: Tensor
    """Of the sign-flipped stack, shape ``[seeds, layers]``, float64."""
    magnitude: Tensor
    """Of the stack with constant sign-preserving noise, shape ``[seeds, layers]``, float64."""

    def ratio(self) -> Estimate:
        """Return C_1..C_L, the ratio of transverse energies after each layer.

        Returns:
            Estimate over seeds, one value per layer.
        """
        return _estimate(self.sign / self.magnitude)


def two_layer(
    rate: float,
    *,
    noises: Sequence[str] = ("sign_flip", "constant"),
    quantizers: Mapping[str, Quantizer] | None = None,
    width: int = 2048,
    inputs: int = 400,
    seeds: Sequence[int] = tuple(range(8)),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk: int = 512,
) -> TwoLayerSample:
    """Simulate ``y = W2 relu(W1 x)`` with ``W1`` perturbed, and split the change of ``y`` along and across ``y``.

    Args:
        rate: Probability of a flip, in (0, 1]; also sets the norm of the matched noises.
        noises: Arms among `NOISES`.
        quantizers: More arms by name: functions of ``W1``.
        width: Number of inputs, hidden units and outputs.
        inputs: Number of input vectors per seed, on the unit sphere.
        seeds: One independent draw of weights, inputs and noise each.
        device: Where to compute; the draws do not depend on it.
        dtype: Floating type of the products; sums are float64.
        chunk: Number of input vectors held at once.

    Returns:
        Transverse and radial energies per arm and seed.
    """
    quantizers = quantizers or {}
    arms = (*noises, *quantizers)
    _check_run(rate, width=width, inputs=inputs, seeds=seeds, chunk=chunk)
    _check_names(noises, arms)
    transverse, radial, inner = torch.zeros(3, len(arms), len(seeds), dtype=torch.float64)
    clean = torch.zeros(len(seeds), dtype=torch.float64)
    for column, seed in enumerate(seeds):
        first = _gaussian((width, width), seed, _WEIGHT).div_(math.sqrt(width)).to(device, dtype)
        second = _gaussian((width, width), seed, _SECOND).div_(math.sqrt(width)).to(device, dtype)
        x = torch.nn.functional.normalize(_gaussian((inputs, width), seed, _INPUT), dim=1).to(device, dtype)
        clean[column] = sum(_energy(torch.relu(part @ first.T) @ second.T) for part in torch.split(x, chunk))
        flips = _flip_mask(first, rate, seed)
        norm = _flip_norm(first, flips)
        for row, arm in enumerate(arms):
            perturbed = quantizers[arm](first) if arm in quantizers else _perturb(arm, first, flips, norm, seed)
            for part in torch.split(x, chunk):
                hidden = torch.relu(part @ first.T)
                # The difference is taken before the second layer, where it is exact to rounding of the hidden units.
                change = (torch.relu(part @ perturbed.T) - hidden) @ second.T
                split = _split_energy(change, hidden @ second.T)
                transverse[row, column] += split.transverse
                radial[row, column] += split.radial
                inner[row, column] += split.inner
    return TwoLayerSample(arms, transverse, radial, clean, inner)


def depth(
    layers: int,
    rate: float,
    *,
    residual: bool,
    width: int = 2048,
    inputs: int = 400,
    seeds: Sequence[int] = tuple(range(8)),
    matrices: Sequence[Tensor] | None = None,
    hidden_states: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DepthSample:
    """Simulate a stack with every layer perturbed: sign flips against constant magnitude noise, matched layer by layer.

    Without residual ``y_l = relu(W_l y_{l-1})`` over its norm; with residual ``y_l = y_{l-1} + relu(W_l y_{l-1} /
    |y_{l-1}|)``, compared raw. The perturbed stacks carry their own state; ``T`` is the energy of the difference across
    the clean output (the depth experiment of arXiv 2605.18933).

    Args:
        layers: Number of layers, at least 1.
        rate: Probability of a flip, in (0, 1].
        residual: Whether each layer adds to a stream.
        width: Width of every layer; ignored where ``matrices`` are given.
        inputs: Number of input vectors per seed; ignored where ``hidden_states`` are given.
        seeds: One independent draw each; on real matrices and inputs only the flips differ between seeds.
        matrices: Square weights ``[width, width]`` in (out, in) order, one per layer, e.g. from `square_crops`; else
            ``N(0, 1/width)``.
        hidden_states: Inputs ``[inputs, width]`` of the first layer, normalised here; else uniform on the sphere.
        device: Where to compute; the draws do not depend on it.
        dtype: Floating type of the products; sums are float64.

    Returns:
        Transverse energies per seed and layer.

    Raises:
        ProbeError: If a parameter is out of range, the matrices or inputs do not fit, or an output vanishes.
    """
    if layers < 1:
        raise ProbeError(f"a depth of {layers} layers has no series; ask for at least 1 layer")
    if matrices is not None:
        width = _square_width(matrices, layers)
    _check_run(rate, width=width, inputs=inputs, seeds=seeds, chunk=1)
    if hidden_states is not None and (
        hidden_states.ndim != 2 or hidden_states.shape[1] != width or not len(hidden_states)
    ):
        raise ProbeError(
            f"hidden states of shape {list(hidden_states.shape)} do not fit a width of {width}; pass [inputs, {width}]"
        )
    sign, magnitude = torch.zeros(2, len(seeds), layers, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        start = _gaussian((inputs, width), seed, _INPUT) if hidden_states is None else hidden_states.float()
        clean = _normalised(start.to(device, dtype), layer=0)
        states = {"sign_flip": clean, "constant": clean}
        for layer in range(layers):
            if matrices is None:
                weight = _gaussian((width, width), seed, _WEIGHT, layer).div_(math.sqrt(width)).to(device, dtype)
            else:
                weight = matrices[layer].to(device, dtype)
            flips = _flip_mask(weight, rate, seed, layer)
            norm = _flip_norm(weight, flips)
            clean = _advance(clean, weight, layer, residual=residual)
            for arm, sums in (("sign_flip", sign), ("constant", magnitude)):
                perturbed = _perturb(arm, weight, flips, norm, seed)
                states[arm] = _advance(states[arm], perturbed, layer, residual=residual)
                sums[row, layer] = _split_energy(states[arm] - clean, clean).transverse
    return DepthSample(sign, magnitude)


def square_crops(matrices: Sequence[Tensor], width: int | None = None) -> list[Tensor]:
    """Cut the leading square out of each weight matrix, so that real layers can be stacked.

    Args:
        matrices: Weights ``[out, in]``.
        width: Side of the squares; by default the smallest dimension among the matrices.

    Returns:
        Views ``[width, width]``.

    Raises:
        ProbeError: If there is no matrix, one is not 2-D, or one is smaller than ``width``.
    """
    if not matrices or any(m.ndim != 2 for m in matrices):
        raise ProbeError("square crops need at least one matrix, each with 2 dimensions (out, in)")
    smallest = min(min(m.shape) for m in matrices)
    width = smallest if width is None else width
    if not 1 <= width <= smallest:
        raise ProbeError(
            f"a crop of width {width} does not fit the smallest matrix, of {smallest}; ask for 1 to {smallest}"
        )
    return [m[:width, :width] for m in matrices]


# Perturbations


def _perturb(noise: str, weight: Tensor, flips: Tensor, norm: float, seed: int) -> Tensor:
    """Return the perturbed weight; all noises but the flip get the flip's Frobenius norm in this very draw."""
    if noise == "sign_flip":
        return torch.where(flips, -weight, weight)
    if noise == "constant":
        change = weight.sign()
    elif noise == "half_normal":
        change = _gaussian(weight.shape, seed, _HALF_NORMAL).to(weight).abs_().mul_(weight.sign())
    else:
        change = _gaussian(weight.shape, seed, _MULTIPLICATIVE).to(weight).mul_(weight)
    return weight.add(change, alpha=norm / math.sqrt(_energy(change)))


def _flip_mask(weight: Tensor, rate: float, seed: int, layer: int = 0) -> Tensor:
    return (torch.rand(weight.shape, generator=_stream(seed, _FLIP, layer)) < rate).to(weight.device)


def _flip_norm(weight: Tensor, flips: Tensor) -> float:
    energy = 4 * _energy(torch.where(flips, weight, 0))
    if energy == 0:
        raise ProbeError(f"no nonzero entry of a {list(weight.shape)} matrix was flipped; raise the rate or the width")
    return math.sqrt(energy)


def _advance(state: Tensor, weight: Tensor, layer: int, *, residual: bool) -> Tensor:
    if residual:
        return state + torch.relu(_normalised(state, layer) @ weight.T)
    return _normalised(torch.relu(state @ weight.T), layer + 1)


def _normalised(state: Tensor, layer: int) -> Tensor:
    norm = torch.linalg.vector_norm(state, dim=1, keepdim=True)
    if not bool(torch.all(norm > 0)) or not bool(torch.isfinite(norm).all()):
        raise ProbeError(
            f"an input vector has zero or non-finite norm after {layer} layers; use other inputs or matrices"
        )
    unit: Tensor = state / norm
    return unit


# Energies and streams


class _Split(NamedTuple):
    transverse: float
    radial: float
    inner: float


def _split_energy(change: Tensor, clean: Tensor) -> _Split:
    clean, change = clean.double(), change.double()
    direction = torch.nn.functional.normalize(clean, dim=1)
    along = (direction * change).sum(1, keepdim=True)
    inner = (along * torch.linalg.vector_norm(clean, dim=1, keepdim=True)).sum()
    return _Split(_energy(change - along * direction), _energy(along), float(inner))


def _energy(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _estimate(per_seed: Tensor) -> Estimate:
    error = per_seed.std(0) / math.sqrt(len(per_seed)) if len(per_seed) > 1 else torch.full_like(per_seed[0], torch.nan)
    return Estimate(per_seed.mean(0), error, per_seed)


def _gaussian(shape: Sequence[int], seed: int, purpose: int, layer: int = 0) -> Tensor:
    return torch.randn(tuple(shape), generator=_stream(seed, purpose, layer))


def _stream(seed: int, purpose: int, layer: int = 0) -> torch.Generator:
    key = np.random.SeedSequence([seed, purpose, layer]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(key))


# Domains


def _check_run(rate: float, *, width: int, inputs: int, seeds: Sequence[int], chunk: int) -> None:
    if not 0 < rate <= 1:
        raise ProbeError(f"flip rate {rate} is not in (0, 1]")
    if min(width, inputs, chunk, len(seeds)) < 1 or any(seed < 0 for seed in seeds):
        raise ProbeError(
            f"a simulation needs width, inputs and chunk >= 1 and seeds >= 0; "
            f"got {width}, {inputs}, {chunk} and {list(seeds)}"
        )
    if len(set(seeds)) < len(seeds):
        raise ProbeError(f"seeds {list(seeds)} repeat; repeated draws would make the interval too narrow")


def _check_names(noises: Sequence[str], arms: Sequence[str]) -> None:
    unknown = [noise for noise in noises if noise not in NOISES]
    if unknown:
        raise ProbeError(f"unknown noise '{unknown[0]}'; use {', '.join(NOISES)} or pass a quantizer function")
    if not arms or len(set(arms)) < len(arms):
        raise ProbeError(f"arms {list(arms)} are empty or repeat a name; give each arm its own")


def _square_width(matrices: Sequence[Tensor], layers: int) -> int:
    if len(matrices) != layers:
        raise ProbeError(f"{len(matrices)} matrices were given for {layers} layers; pass one per layer")
    shapes = {tuple(m.shape) for m in matrices}
    if len(shapes) != 1 or len(set(shape := shapes.pop())) != 1 or len(shape) != 2:
        raise ProbeError("the matrices of a stack must be square and of one size; cut them with square_crops")
    return shape[0]
