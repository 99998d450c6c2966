"""Closed forms of the two-layer ReLU + RMSNorm model: what sign flips, magnitude noise and quantizers must do.

Everything here is a pure float64 function of numbers: no sampling, no torch. `ternary_probe.simulators` measures the
same quantities. Unless a docstring names a paper, a form was derived for this project (arc-cosine kernel) and is exact
as the width goes to infinity; with ``width`` it also carries the leading effect of a finite width. `PUBLISHED_RATIOS`,
`PUBLISHED_DEPTH` and `PUBLISHED_SIGN_RADIAL_FRACTION` hold figures printed by the paper: data, not results.

The model (arXiv 2605.18933, Sec. 3): ``y = W2 relu(W1 x)`` then RMSNorm, ``W1 ~ N(0, 1/n)``, ``W2 ~ N(0, 1/m)``, ``x``
on the unit sphere; only ``W1`` is perturbed. A clean pre-activation then is a standard Gaussian ``z`` and a perturbed
one ``z'`` has standard deviation ``s`` and correlation ``r`` with it. Energies are per unit of the clean
pre-activation's variance; the norm of the clean output is ``1/2``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from ternary_probe.errors import ProbeError

Floats = NDArray[np.float64]

PI_RATIO = math.pi / (math.pi - 2)
"""Sign-to-magnitude ratio of transverse energies as the rate goes to 0 (arXiv 2605.18933, Theorem 1): 2.7519."""

MEAN_ABS = math.sqrt(2 / math.pi)
"""``E|w|`` of a standard Gaussian weight."""


class Moments(NamedTuple):
    """A perturbed Gaussian pre-activation (or weight) beside the clean one of variance 1."""

    s: Floats
    """Standard deviation of the perturbed variable."""
    r: Floats
    """Its correlation with the clean variable, in [-1, 1]."""


class Displacement(NamedTuple):
    """The same perturbation as a difference ``z' - z``, which keeps its digits when the perturbation is small."""

    parallel: Floats
    """Component along the clean variable: ``s r - 1``."""
    orthogonal: Floats
    """Component independent of it, never negative: ``s sqrt(1 - r^2)``."""


class RatioForm(NamedTuple):
    """Transverse energy of sign flips over that of constant magnitude noise of equal norm, with radial fractions."""

    ratio: Floats
    radial_sign: Floats
    radial_magnitude: Floats


class QuantizerConstants(NamedTuple):
    """What a quantizer does to a standard Gaussian weight, in units of its standard deviation."""

    scheme: str
    cos2: float
    """Squared cosine between weight and quantized weight."""
    error_energy: float
    """``E[(q - w)^2]``."""
    radial_pre: float
    """Radial fraction of the error before the ReLU."""
    radial_post: float
    """Radial fraction of the error after ReLU and second layer: the share an RMSNorm removes."""
    output_cos2: float
    """Squared cosine between the clean output and the quantized one."""
    nonzero: float
    """Share of entries with a nonzero code (in any plane)."""
    thresholds: tuple[float, ...]
    """Magnitudes at which the code changes; empty for pure sign."""
    scales: tuple[float, ...]
    """Scale of each ternary plane."""


class PublishedRatio(NamedTuple):
    """One measured row of the paper's two-layer table (width 2048)."""

    rate: float
    ratio: float
    spread: float
    source: str


class PublishedDepth(NamedTuple):
    """One published depth series, L = 1..6, at rate 0.01 and width 2048."""

    name: str
    residual: bool
    ratios: tuple[float, ...]
    source: str


PUBLISHED_RATE_OF_DEPTH = 0.01
PUBLISHED_WIDTH = 2048
PUBLISHED_SIGN_RADIAL_FRACTION = 0.365
"""Radial fraction after the ReLU of pure sign with a row scale, as printed in arXiv 2605.18933, Theorem 4."""

_PAPER = "arXiv 2605.18933"

PUBLISHED_RATIOS = (
    PublishedRatio(0.01, 2.639, 0.012, _PAPER),
    PublishedRatio(0.02, 2.583, 0.010, _PAPER),
    PublishedRatio(0.05, 2.465, 0.010, _PAPER),
    PublishedRatio(0.10, 2.299, 0.008, _PAPER),
)

PUBLISHED_DEPTH = (
    PublishedDepth("random weights", residual=False, ratios=(3.617, 3.494, 3.351, 3.250, 3.141, 3.061), source=_PAPER),
    PublishedDepth("random weights", residual=True, ratios=(1.220, 1.265, 1.335, 1.405, 1.472, 1.535), source=_PAPER),
    PublishedDepth(
        "trained gate_proj crops", residual=False, ratios=(3.494, 3.355, 3.192, 3.160, 2.952, 2.966), source=_PAPER
    ),
)


# Perturbations


def sign_flip(rate: ArrayLike) -> Displacement:
    """Return what flipping each sign with probability ``rate`` does to a pre-activation: ``s = 1``, ``r = 1 - 2p``.

    Args:
        rate: Probability of a flip, in (0, 1], any shape.

    Returns:
        Displacement of the pre-activation, shape of ``rate``.
    """
    p = _rates(rate)
    return Displacement(-2 * p, 2 * np.sqrt(p * (1 - p)))


def constant_magnitude(rate: ArrayLike) -> Displacement:
    """Return what ``dW = delta sign(W)`` does, one constant ``delta`` with the norm of a sign flip at ``rate``.

    In units of the weight's standard deviation ``delta`` is ``D = 2 sqrt(p)``.

    Args:
        rate: Rate of the sign flip whose norm is matched, in (0, 1], any shape.

    Returns:
        Displacement of the pre-activation, shape of ``rate``.
    """
    d = 2 * np.sqrt(_rates(rate))
    return Displacement(d * MEAN_ABS, d * math.sqrt(1 - 2 / math.pi))


def half_normal_magnitude(rate: ArrayLike) -> Displacement:
    """Return what ``dW = D |g| sign(W)``, ``g`` standard Gaussian, does at the norm of a sign flip at ``rate``.

    Args:
        rate: Rate of the sign flip whose norm is matched, in (0, 1], any shape.

    Returns:
        Displacement of the pre-activation, shape of ``rate``.
    """
    d = 2 * np.sqrt(_rates(rate))
    return Displacement(d * MEAN_ABS**2, d * math.sqrt(1 - MEAN_ABS**4))


def multiplicative_gaussian(rate: ArrayLike) -> Displacement:
    """Return what ``dW = D g W``, ``g`` standard Gaussian, does at the norm of a sign flip at ``rate``.

    It has no radial part before the ReLU.

    Args:
        rate: Rate of the sign flip whose norm is matched, in (0, 1], any shape.

    Returns:
        Displacement of the pre-activation, shape of ``rate``.
    """
    d = 2 * np.sqrt(_rates(rate))
    return Displacement(np.zeros_like(d), d)


def moments(displacement: Displacement) -> Moments:
    """Return standard deviation and correlation of the displaced variable.

    Args:
        displacement: Parallel and orthogonal parts, one shape.

    Returns:
        ``s`` and ``r``; where ``s`` is 0 the correlation is undefined and returned as 0.
    """
    along = 1 + np.asarray(displacement.parallel, dtype=np.float64)
    s = np.hypot(along, displacement.orthogonal)
    return Moments(s, np.divide(along, s, out=np.zeros_like(s), where=s > 0))


def displacement(s: ArrayLike, r: ArrayLike) -> Displacement:
    """Return the displacement of a variable of standard deviation ``s`` and correlation ``r`` with the clean one.

    Args:
        s: Standard deviation, not negative, any shape.
        r: Correlation, in [-1, 1], broadcast against ``s``.

    Returns:
        Parallel and orthogonal parts.
    """
    s, r = _deviations(s), _correlations(r)
    return Displacement(s * r - 1, s * np.sqrt((1 - r) * (1 + r)))


# Energies after the ReLU


def kappa(r: ArrayLike) -> Floats:
    """Return ``E[relu(z) relu(z')]`` for standard Gaussians of correlation ``r`` (Cho & Saul 2009, degree 1).

    Args:
        r: Correlation, in [-1, 1], any shape.

    Returns:
        ``(sqrt(1 - r^2) + r (pi - arccos r)) / (2 pi)``, shape of ``r``; 1/2 at ``r = 1``.
    """
    r = _correlations(r)
    return (np.sqrt((1 - r) * (1 + r)) + r * (np.pi - np.arccos(r))) / (2 * np.pi)


def post_relu_energy(s: ArrayLike, r: ArrayLike) -> Floats:
    """Return the energy ``T = s^2/2 + 1/2 - 2 s kappa(r)`` of the output's change, radial part included.

    Args:
        s: Standard deviation of the perturbed pre-activation, not negative.
        r: Its correlation with the clean one, in [-1, 1].

    Returns:
        ``T``, broadcast shape.
    """
    return _total(displacement(s, r))


def radial_energy(s: ArrayLike, r: ArrayLike) -> Floats:
    """Return the energy ``2 (s kappa(r) - 1/2)^2`` of the change along the clean output: the part an RMSNorm removes.

    Args:
        s: Standard deviation of the perturbed pre-activation, not negative.
        r: Its correlation with the clean one, in [-1, 1].

    Returns:
        Radial energy, broadcast shape.
    """
    return _radial(displacement(s, r))


def transverse_energy(s: ArrayLike, r: ArrayLike) -> Floats:
    """Return the energy across the clean output, ``T`` minus its radial part: the part that survives an RMSNorm.

    Args:
        s: Standard deviation of the perturbed pre-activation, not negative.
        r: Its correlation with the clean one, in [-1, 1].

    Returns:
        Transverse energy, broadcast shape.
    """
    change = displacement(s, r)
    return _total(change) - _radial(change)


def radial_fraction(s: ArrayLike, r: ArrayLike) -> Floats:
    """Return ``R``, the radial share of the output's change, for any perturbation or quantizer of a Gaussian weight.

    Args:
        s: Standard deviation of the perturbed pre-activation (of a quantizer: ``std(q)`` over ``std(w)``), not
            negative.
        r: Its correlation with the clean one (of a quantizer: ``cos(w, q)``), in [-1, 1].

    Returns:
        ``R`` in [0, 1], broadcast shape.

    Raises:
        ProbeError: If a pair is ``(1, 1)``: nothing changed, so there is no share.
    """
    change = displacement(s, r)
    total = _total(change)
    if np.any(total <= 0):
        raise ProbeError(
            "the radial fraction of an unperturbed pre-activation (s = 1, r = 1) is 0/0; pass a real change"
        )
    return _radial(change) / total


def radial_share(change: Displacement) -> Floats:
    """Return the radial fraction after the ReLU of a displacement; keeps its digits down to rates of 1e-12.

    Args:
        change: Parallel and orthogonal parts, not both 0.

    Returns:
        ``R`` in [0, 1].
    """
    return _radial(change) / _total(change)


def energy_ratio(numerator: Displacement, denominator: Displacement) -> Floats:
    """Return the ratio of transverse energies of two perturbations.

    Args:
        numerator: First perturbation, e.g. `sign_flip(rate)`.
        denominator: Second one, e.g. `constant_magnitude(rate)`.

    Returns:
        ``c``, broadcast shape.
    """
    return (_total(numerator) - _radial(numerator)) / (_total(denominator) - _radial(denominator))


# The ratio of sign flip to magnitude


def exact_ratio(rate: ArrayLike, *, width: int | None = None) -> RatioForm:
    """Return the sign-to-magnitude ratio, exact at every rate for infinite width.

    A finite width lowers it (see `flip_transverse_energy`): by 0.7 % at p = 0.001 and 0.25 % at p = 0.01 for width 2048.
    Both radial fractions gain ``3 (1 - R) / n``: 1/n because the clean output is one of n directions, 2/n because hidden
    units that carry it also carry the change.

    Args:
        rate: Flip rate, in (0, 1], any shape.
        width: Number of inputs, hidden units and outputs; infinite by default.

    Returns:
        Ratio and both radial fractions, shape of ``rate``; the ratio goes to `PI_RATIO` as the rate goes to 0.
    """
    flip, magnitude = sign_flip(rate), constant_magnitude(rate)
    ratio = flip_transverse_energy(rate, width=width) / (_total(magnitude) - _radial(magnitude))
    shares = radial_share(flip), radial_share(magnitude)
    if width is not None:
        shares = shares[0] + 3 * (1 - shares[0]) / width, shares[1] + 3 * (1 - shares[1]) / width
    return RatioForm(ratio, *shares)


def flip_transverse_energy(rate: ArrayLike, *, width: int | None = None) -> Floats:
    """Return the transverse energy of sign flips after the ReLU.

    At finite width the share ``P`` of a unit's input energy that meets flipped entries varies from unit to unit, and the
    energy is concave in it. Given k flips among the n entries of a row, ``P`` is ``Beta(k/2, (n-k)/2)`` (inputs uniform
    on the sphere), so the average is a binomial mixture. Noise on every entry has no such effect to leading order.

    Args:
        rate: Flip rate, in (0, 1], any shape.
        width: Number of inputs of a unit; infinite by default.

    Returns:
        Energy, shape of ``rate``, in the units of `transverse_energy`.
    """
    if width is None:
        flip = sign_flip(rate)
        return _total(flip) - _radial(flip)
    n, p = _whole_width(width), _rates(rate)
    loss = np.array([_average_deficit(_flipped_energy(float(q), n)) for q in p.ravel()]).reshape(p.shape)
    energy: Floats = loss - loss**2 / 2
    return energy


def authors_ratio(rate: ArrayLike) -> RatioForm:
    """Return the authors' finite-rate form (arXiv 2605.18933): ``(1 - R_s) / (1 - 2/pi) * (1 - 4 sqrt(p) / (3 pi))``.

    An asymptotic form in ``sqrt(p)``: 1 % below the exact ratio at p = 0.001 and 5 % at p = 0.1.

    Args:
        rate: Flip rate, in (0, 1], any shape.

    Returns:
        Ratio with ``R_s = p - 4 p^1.5 / (3 pi)`` and the limit ``2/pi`` as the radial fraction of magnitude noise.
    """
    p = _rates(rate)
    radial_sign = p - 4 * p**1.5 / (3 * np.pi)
    ratio = (1 - radial_sign) / (1 - 2 / np.pi) * (1 - 4 * np.sqrt(p) / (3 * np.pi))
    return RatioForm(ratio, radial_sign, np.full_like(p, 2 / np.pi))


def leading_ratio(rate: ArrayLike) -> Floats:
    """Return the papers' leading form ``(1 - p) / (1 - 2/pi)`` (arXiv 2605.18933).

    Args:
        rate: Flip rate, in (0, 1], any shape.

    Returns:
        Ratio, shape of ``rate``.
    """
    return (1 - _rates(rate)) / (1 - 2 / np.pi)


def leverage_of_entry(alpha: ArrayLike, n: ArrayLike) -> Floats:
    """Return the leverage of one flipped entry over the average entry (arXiv 2605.18933).

    Args:
        alpha: Amplitude of the entry's input dimension, ``sqrt(E[x_j^2] / E|x|^2)``, in [0, 1].
        n: Input width, at least 1, broadcast against ``alpha``.

    Returns:
        ``n alpha^2 (1 - 4 alpha / (3 pi))``; for small amplitudes ``n alpha^2``.

    Raises:
        ProbeError: If an amplitude lies outside [0, 1] or a width is below 1.
    """
    alpha, n = np.asarray(alpha, dtype=np.float64), np.asarray(n, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ProbeError(
            f"amplitude {_first(alpha, (alpha >= 0) & (alpha <= 1))} is not in [0, 1]; it is sqrt(E[x_j^2] / E|x|^2)"
        )
    if not np.all((n >= 1) & np.isfinite(n)):
        raise ProbeError(f"input width {_first(n, (n >= 1) & np.isfinite(n))} is not a positive number of dimensions")
    leverage: Floats = n * alpha**2 * (1 - 4 * alpha / (3 * np.pi))
    return leverage


# Depth


def depth_ratio(rate: float, layers: int, *, residual: bool, width: int | None = None) -> Floats:
    """Return the sign-to-magnitude ratio C_1..C_L of a stack whose every layer is perturbed.

    Without residual ``y_l = relu(W_l y_{l-1})`` over its norm; with residual
    ``y_l = y_{l-1} + relu(W_l y_{l-1} / |y_{l-1}|)``, compared raw (never normalised). ``C_L`` is the ratio of
    transverse energies against the clean output (the depth experiment of arXiv 2605.18933).

    Args:
        rate: Flip rate, in (0, 1].
        layers: Number of layers, at least 1.
        residual: Whether each layer adds to a stream.
        width: Width of the layers; infinite by default. A finite one averages over the flips that a unit meets, as in
            `exact_ratio`: exact in the first layer, by matching two moments of the flipped energy in later ones.

    Returns:
        Ratios for L = 1..layers, shape ``[layers]``.

    Raises:
        ProbeError: If ``layers`` is below 1.
    """
    if layers < 1:
        raise ProbeError(f"a depth of {layers} layers has no series; ask for at least 1 layer")
    energies = _residual_energies if residual else _plain_energies
    p = float(_rates(rate))
    if width is None:
        flips = [_Mixture(np.array([p]), np.array([1.0]))] * layers
    else:
        n = _whole_width(width)
        flips = [_flipped_energy(p, n)]
        flips += [_flipped_energy_of_states(p, n, _spread(layer, residual=residual)) for layer in range(1, layers)]
    magnitude = constant_magnitude(p)
    noise = [_Mixture(np.sin(_angle(magnitude) / 2).reshape(1) ** 2, np.array([1.0]))] * layers
    return energies(1.0, flips) / energies(float(moments(magnitude).s), noise)


def _plain_energies(s: float, layers: Sequence[_Mixture]) -> Floats:
    """Return the transverse energy ``1 - c_l^2`` of the normalised output after each layer, whatever ``s``.

    Correlations are carried as deficits ``1 - c``, which keep their digits.
    """
    del s
    deficit, energies = 0.0, np.empty(len(layers))
    for layer, half_first in enumerate(layers):
        deficit = _average_deficit(half_first, deficit)
        energies[layer] = deficit * (2 - deficit)
    return energies


def _residual_energies(s: float, layers: Sequence[_Mixture]) -> Floats:
    """Return the transverse energy ``N' - X^2/N`` of the raw stream after each layer.

    With ``A = l/2 + l(l-1)/(2 pi)``, ``N = 1 + A``, ``N' = 1 + s^2 A`` and ``X = 1 + s A - s E`` (``E`` half the summed
    kernel deficits), ``N N' - X^2 = A (1-s)^2 + 2 s E (1 + s A) - s^2 E^2``: the cancelling terms are gone.
    """
    deficit, lost, energies = 0.0, 0.0, np.empty(len(layers))
    for layer, half_first in enumerate(layers, start=1):
        lost += _average_deficit(half_first, deficit) / 2
        a = layer / 2 + layer * (layer - 1) / (2 * math.pi)
        gap = a * (1 - s) ** 2 + 2 * s * lost * (1 + s * a) - (s * lost) ** 2
        norms = math.sqrt((1 + a) * (1 + s**2 * a))
        deficit = gap / (norms * (norms + 1 + s * a - s * lost))
        energies[layer - 1] = gap / (1 + a)
    return energies


# Flips at finite width


class _Mixture(NamedTuple):
    """Values of ``(1 - r) / 2`` for one unit (for flips: the flipped share of its input energy) and their weights."""

    values: Floats
    weights: Floats


def _average_deficit(half_deficits: _Mixture, earlier: float = 0.0) -> float:
    """Return the mean of ``1 - 2 kappa`` over units whose inputs already differ by the deficit ``earlier``."""
    half = half_deficits.values + (1 - 2 * half_deficits.values) * earlier / 2
    angles = 2 * np.arcsin(np.sqrt(np.clip(half, 0, 1)))
    return float(half_deficits.weights @ _kernel_deficit(angles))


def _flipped_energy(rate: float, width: int) -> _Mixture:
    """Return the law of the flipped input energy: ``Beta(k/2, (n-k)/2)`` mixed over ``k ~ Binomial(n, p)``."""
    spread = 10 * math.sqrt(width * rate * (1 - rate)) + 30
    low, high = max(1, math.floor(width * rate - spread)), min(width - 1, math.ceil(width * rate + spread))
    flips = np.arange(low, high + 1)[:, None]
    # In the angle with P = sin^2 the density is sin^(k-1) cos^(n-k-1): smooth for every k, and about sqrt(1/2n) wide.
    centre, reach = np.arcsin(np.sqrt(flips / width)), 9 / math.sqrt(2 * width)
    bottom, top = np.clip(centre - reach, 0, np.pi / 2), np.clip(centre + reach, 0, np.pi / 2)
    nodes, lengths = np.polynomial.legendre.leggauss(64)
    angle = bottom + (top - bottom) * (nodes + 1) / 2
    log_density = (flips - 1) * np.log(np.sin(angle)) + (width - flips - 1) * np.log(np.cos(angle))
    density = np.exp(log_density - log_density.max(axis=1, keepdims=True)) * lengths
    share = density / density.sum(axis=1, keepdims=True) * stats.binom.pmf(flips, width, rate)
    values = np.concatenate([np.sin(angle).ravel() ** 2, [0.0, 1.0]])  # no entry flipped, every entry flipped
    return _Mixture(values, np.concatenate([share.ravel(), stats.binom.pmf([0, width], width, rate)]))


def _flipped_energy_of_states(rate: float, width: int, spread: float) -> _Mixture:
    """Return a Gamma law with the first two moments of the flipped energy of hidden states, as a Gauss quadrature.

    Its variance is ``p (1-p) sum x_j^4``, and ``spread`` is ``n sum x_j^4`` of a unit state.
    """
    variance = spread * rate * (1 - rate) / width
    shape = rate**2 / variance if variance > 0 else math.inf
    if shape > 100:  # close to Gaussian, where the Laguerre weights overflow
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        values = rate + math.sqrt(variance) * nodes
    else:
        nodes, weights = special.roots_genlaguerre(40, shape - 1)
        values = rate * nodes / shape
    return _Mixture(np.clip(values, 0, 1), weights / weights.sum())


def _spread(layer: int, *, residual: bool) -> float:
    """Return ``E[y^4] / E[y^2]^2`` of the coordinates of a state after ``layer`` layers, from their cumulants."""
    mean = 1 / math.sqrt(2 * math.pi)
    second, third, fourth = 1 / 2, 2 * mean, 3 / 2  # raw moments of relu(z), z standard Gaussian
    variance = second - mean**2
    k3 = third - 3 * second * mean + 2 * mean**3
    k4 = fourth - 4 * third * mean - 3 * second**2 + 12 * second * mean**2 - 6 * mean**4
    if not residual:
        return fourth / second**2
    k1, k2, k3, k4 = layer * mean, 1 + layer * variance, layer * k3, layer * k4
    return (k4 + 4 * k3 * k1 + 3 * k2**2 + 6 * k2 * k1**2 + k1**4) / (k2 + k1**2) ** 2


# Quantizers of a Gaussian weight


def gaussian_quantizer(scheme: str) -> QuantizerConstants:
    """Return what a quantizer does to a standard Gaussian weight, by closed form or one-dimensional root finding.

    Args:
        scheme: ``sign``, ``absmean``, ``absmean+ls``, ``twn``, ``optimal`` or ``planes:2``, each at the limit of large
            groups.

    Returns:
        Its constants, in units of the weight's standard deviation.

    Raises:
        ProbeError: If the scheme is unknown.
    """
    match scheme:
        case "sign":
            return _ternary_constants(scheme, threshold=0.0, scale=MEAN_ABS)
        case "absmean":
            return _ternary_constants(scheme, threshold=MEAN_ABS / 2, scale=MEAN_ABS)
        case "absmean+ls":
            return _ternary_constants(scheme, threshold=MEAN_ABS / 2, scale=_least_squares_scale(MEAN_ABS / 2))
        case "twn":
            return _ternary_constants(scheme, threshold=0.7 * MEAN_ABS, scale=_least_squares_scale(0.7 * MEAN_ABS))
        case "optimal":
            # At the least-squares optimum each code is the nearest level, so the threshold is half the scale it leads
            # to.
            threshold = float(optimize.brentq(lambda t: t - _least_squares_scale(t) / 2, 0.1, 2.0, xtol=1e-15))
            return _ternary_constants(scheme, threshold=threshold, scale=2 * threshold)
        case "planes:2":
            return _two_plane_constants(scheme)
    raise ProbeError(f"no Gaussian constants for scheme '{scheme}'; use one of {', '.join(GAUSSIAN_SCHEMES)}")


GAUSSIAN_SCHEMES = ("sign", "absmean", "absmean+ls", "twn", "optimal", "planes:2")


def quantizer_constants(
    scheme: str,
    *,
    inner: float,
    energy: float,
    nonzero: float,
    thresholds: tuple[float, ...],
    scales: tuple[float, ...],
) -> QuantizerConstants:
    """Return the constants of any quantizer of a standard Gaussian weight from its two moments.

    Args:
        scheme: Name to carry.
        inner: ``E[w q]``.
        energy: ``E[q^2]``, positive.
        nonzero: Share of nonzero entries, carried.
        thresholds: Where the codes change, carried.
        scales: Plane scales, carried.

    Returns:
        Its constants.

    Raises:
        ProbeError: If ``energy`` is not positive or violates Cauchy-Schwarz (``inner^2 > energy``).
    """
    if not energy > 0 or inner**2 > energy * (1 + 1e-12):
        raise ProbeError(
            f"E[wq] = {inner} and E[q^2] = {energy} are no moments of a quantizer of a unit Gaussian; check their scale"
        )
    cos2 = min(inner**2 / energy, 1.0)
    s, r = math.sqrt(energy), math.copysign(math.sqrt(cos2), inner)
    error = 1 + energy - 2 * inner
    return QuantizerConstants(
        scheme=scheme,
        cos2=cos2,
        error_energy=error,
        radial_pre=(inner - 1) ** 2 / error,
        radial_post=float(radial_fraction(s, r)),
        output_cos2=float((2 * kappa(r)) ** 2),
        nonzero=nonzero,
        thresholds=thresholds,
        scales=scales,
    )


def _ternary_constants(scheme: str, *, threshold: float, scale: float) -> QuantizerConstants:
    nonzero = float(special.erfc(threshold / math.sqrt(2)))
    return quantizer_constants(
        scheme,
        inner=2 * scale * _density(threshold),
        energy=scale**2 * nonzero,
        nonzero=nonzero,
        thresholds=(threshold,) if threshold > 0 else (),
        scales=(scale,),
    )


def _two_plane_constants(scheme: str) -> QuantizerConstants:
    """Return the constants of two planes whose scales minimise the error, every weight at the nearest level."""
    starts = ((1.4, 0.47), (1.2, 0.6), (1.4, 0.9), (1.6, 0.9))
    tight = {"xatol": 1e-9, "fatol": 1e-15}
    fits = [
        optimize.minimize(lambda a: -_nine_levels(*a).gain, start, method="Nelder-Mead", options=tight)
        for start in starts
    ]
    scales = tuple(sorted((float(abs(a)) for a in min(fits, key=lambda fit: float(fit.fun)).x), reverse=True))
    levels = _nine_levels(*scales)
    return quantizer_constants(
        scheme,
        inner=levels.inner,
        energy=levels.energy,
        nonzero=float(special.erfc(levels.edges[0] / math.sqrt(2))),
        thresholds=levels.edges,
        scales=scales,
    )


class _NineLevels(NamedTuple):
    inner: float
    energy: float
    edges: tuple[float, ...]

    @property
    def gain(self) -> float:
        return 2 * self.inner - self.energy


def _nine_levels(first: float, second: float) -> _NineLevels:
    """Return the moments ``E[wq]``, ``E[q^2]`` and the thresholds of rounding to the nearest sum of two planes."""
    levels = sorted({0.0, abs(second), abs(first), abs(abs(first) - abs(second)), abs(first) + abs(second)})
    edges = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
    inner = energy = 0.0
    for level, low, high in zip(levels[1:], edges, [*edges[1:], math.inf], strict=True):
        inner += 2 * level * (_density(low) - _density(high))
        energy += level**2 * float(special.erfc(low / math.sqrt(2)) - special.erfc(high / math.sqrt(2)))
    return _NineLevels(inner, energy, tuple(edges))


def _least_squares_scale(threshold: float) -> float:
    """Return the scale ``E[|w| : |w| > t] / P(|w| > t)`` of least error for a ternary grid of that threshold."""
    return 2 * _density(threshold) / float(special.erfc(threshold / math.sqrt(2)))


def _density(x: float) -> float:
    return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


# Pieces that keep their digits when a perturbation is small


def _total(change: Displacement) -> Floats:
    """Return ``s^2/2 + 1/2 - 2 s kappa = (s-1)^2/2 + s (1 - 2 kappa)``."""
    s = moments(change).s
    return _stretch(change) ** 2 / 2 + s * _kernel_deficit(_angle(change))


def _radial(change: Displacement) -> Floats:
    s = moments(change).s
    return (_stretch(change) - s * _kernel_deficit(_angle(change))) ** 2 / 2


def _stretch(change: Displacement) -> Floats:
    """Return ``s - 1`` without the cancellation."""
    u, v = change
    stretch: Floats = (u * (2 + u) + v**2) / (1 + np.hypot(1 + u, v))
    return stretch


def _angle(change: Displacement) -> Floats:
    return np.asarray(np.arctan2(change.orthogonal, 1 + change.parallel), dtype=np.float64)


def _kernel_deficit(angle: Floats) -> Floats:
    """Return ``1 - 2 kappa(cos angle) = (1 - cos) - (sin - angle cos) / pi``."""
    return 2 * np.sin(angle / 2) ** 2 - (np.sin(angle) - angle * np.cos(angle)) / np.pi


# Domains


def _rates(rate: ArrayLike) -> Floats:
    p = np.asarray(rate, dtype=np.float64)
    good = (p > 0) & (p <= 1)
    if not np.all(good):
        raise ProbeError(f"flip rate {_first(p, good)} is not in (0, 1]; as it goes to 0 the ratio goes to pi/(pi-2)")
    return p


def _correlations(r: ArrayLike) -> Floats:
    r = np.asarray(r, dtype=np.float64)
    good = np.abs(r) <= 1 + 1e-12  # a correlation computed from data may overshoot by rounding
    if not np.all(good):
        raise ProbeError(f"correlation {_first(r, good)} is not in [-1, 1]")
    return np.asarray(np.clip(r, -1, 1))


def _deviations(s: ArrayLike) -> Floats:
    s = np.asarray(s, dtype=np.float64)
    good = (s >= 0) & np.isfinite(s)
    if not np.all(good):
        raise ProbeError(f"standard deviation {_first(s, good)} is not a finite number >= 0")
    return s


def _whole_width(width: int) -> int:
    if width < 2:
        raise ProbeError(f"width {width} is no network; use at least 2")
    return width


def _first(values: Floats, good: NDArray[np.bool_]) -> float:
    return float(values[~good].flat[0])
