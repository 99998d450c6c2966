"""The closed forms against the printed tables, against direct integration, and at the edges of their domain."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import integrate, stats

from ternary_probe import theory
from ternary_probe.errors import ProbeError

# THEORY 1.2: rate, exact c, R_sign, R_mag, the authors' c(p), each as printed.
TWO_LAYER_TABLE = [
    ("0.001", "2.7334", "0.00099", "0.6385", "2.7123"),
    ("0.01", "2.6683", "0.00958", "0.6421", "2.610"),
    ("0.02", "2.6141", "0.0188", "0.6441", "2.538"),
    ("0.05", "2.4790", "0.0452", "0.6477", "2.378"),
    ("0.10", "2.2920", "0.0864", "0.6511", "2.176"),
]

# THEORY 1.3: scheme, cos², error energy, R before and after the ReLU, output cos².
QUANTIZER_TABLE = [
    ("sign", "0.63662", "0.36338", "0.36338", "0.36489", "0.68135"),
    ("absmean", "0.78696", "0.26338", "0.64472", "0.65918", "0.80740"),
    ("absmean+ls", "0.78696", "0.21304", "0.21304", "0.21358", "0.80740"),
    ("twn", "0.80838", "0.19162", "0.19162", "0.19206", None),
    ("optimal", "0.80983", "0.19017", "0.19017", "0.19060", None),
]

SIGN_FAMILY = (
    theory.sign_flip,
    theory.constant_magnitude,
    theory.half_normal_magnitude,
    theory.multiplicative_gaussian,
)


def as_printed(value: float, printed: str) -> str:
    return f"{value:.{len(printed.partition('.')[2])}f}"


@pytest.mark.parametrize(("rate", "exact", "radial_sign", "radial_magnitude", "authors"), TWO_LAYER_TABLE)
def test_two_layer_table_is_reproduced_to_its_printed_digits(rate, exact, radial_sign, radial_magnitude, authors):
    form = theory.exact_ratio(float(rate))

    assert as_printed(form.ratio, exact) == exact
    assert as_printed(form.radial_sign, radial_sign) == radial_sign
    assert as_printed(form.radial_magnitude, radial_magnitude) == radial_magnitude
    assert as_printed(theory.authors_ratio(float(rate)).ratio, authors) == authors


@pytest.mark.parametrize(("scheme", "cos2", "error", "pre", "post", "output"), QUANTIZER_TABLE)
def test_quantizer_table_is_reproduced_to_its_printed_digits(scheme, cos2, error, pre, post, output):
    constants = theory.gaussian_quantizer(scheme)

    printed = {"cos2": cos2, "error_energy": error, "radial_pre": pre, "radial_post": post, "output_cos2": output}
    for field, text in printed.items():
        assert text is None or as_printed(getattr(constants, field), text) == text, field


def test_optimal_and_absmean_grids_have_the_printed_thresholds_scales_and_shares():
    optimal, twn = theory.gaussian_quantizer("optimal"), theory.gaussian_quantizer("twn")

    assert as_printed(optimal.thresholds[0], ".6120") == "0.6120"
    assert as_printed(optimal.scales[0], "1.2240") == "1.2240"
    assert as_printed(100 * optimal.nonzero, "54.05") == "54.05"
    assert as_printed(100 * twn.nonzero, "57.6") == "57.6"
    assert as_printed(100 * theory.gaussian_quantizer("absmean").nonzero, "68.99") == "68.99"
    assert as_printed(theory.gaussian_quantizer("absmean+ls").scales[0], "1.0680") == "1.0680"


def test_depth_series_are_reproduced_to_their_printed_digits():
    plain = ("3.627", "3.511", "3.394", "3.279", "3.169", "3.065")
    residual = ("1.223", "1.267", "1.337", "1.410", "1.477", "1.537")

    assert tuple(f"{c:.3f}" for c in theory.depth_ratio(0.01, 6, residual=False)) == plain
    assert tuple(f"{c:.3f}" for c in theory.depth_ratio(0.01, 6, residual=True)) == residual


@pytest.mark.parametrize("perturbation", SIGN_FAMILY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rate", [0.003, 0.2, 0.9])
def test_energies_equal_the_integral_over_the_bivariate_gaussian(perturbation, rate):
    change = perturbation(rate)
    s, r = theory.moments(change)
    x, y, weight = gauss_grid()
    clean, perturbed = np.maximum(x, 0), np.maximum(s * (r * x + np.sqrt(1 - r**2) * y), 0)
    total = weight @ (perturbed - clean) ** 2
    radial = (weight @ ((perturbed - clean) * clean)) ** 2 / (weight @ clean**2)

    assert theory.post_relu_energy(s, r) == pytest.approx(total, rel=1e-5)
    assert theory.radial_energy(s, r) == pytest.approx(radial, rel=1e-5, abs=1e-9)
    assert theory.transverse_energy(s, r) == pytest.approx(total - radial, rel=1e-5)
    assert theory.radial_share(change) == pytest.approx(radial / total, rel=1e-5, abs=1e-7)


def gauss_grid() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Polar coordinates: the ReLU's kinks are rays, so a fine periodic rule in the angle does the work.
    radius, weights = np.polynomial.laguerre.laggauss(8)
    angle = (np.arange(40_000) + 0.5) * 2 * np.pi / 40_000
    r, phi = np.meshgrid(np.sqrt(2 * radius), angle, indexing="ij")
    return (r * np.cos(phi)).ravel(), (r * np.sin(phi)).ravel(), np.repeat(weights, len(angle)) / len(angle)


@pytest.mark.parametrize("scheme", theory.GAUSSIAN_SCHEMES)
def test_quantizer_constants_equal_numeric_integrals_of_the_staircase(scheme):
    constants = theory.gaussian_quantizer(scheme)
    scales, edges = constants.scales, (0.0, *constants.thresholds)
    levels = [0.0, *sorted({abs(sum(scales)), *scales, abs(scales[0] - scales[-1])} - {0.0})]
    if scheme == "sign":
        edges, levels = (0.0,), [scales[0]]
    w = np.linspace(0, 9, 900_001)
    q = np.array(levels)[np.searchsorted(edges, w, side="right") - 1]
    density = 2 * stats.norm.pdf(w)
    inner, energy, error = (integrate.simpson(f * density, x=w) for f in (w * q, q * q, (q - w) ** 2))

    assert constants.cos2 == pytest.approx(inner**2 / energy, rel=1e-4)
    assert constants.error_energy == pytest.approx(error, rel=1e-3)
    assert constants.radial_pre == pytest.approx((inner - 1) ** 2 / error, rel=1e-3)
    s, r = np.sqrt(energy), inner / np.sqrt(energy)
    assert constants.radial_post == pytest.approx(theory.radial_fraction(s, r), rel=1e-3)


def test_two_planes_scales_are_at_a_minimum_of_the_error():
    best = theory.gaussian_quantizer("planes:2")
    w = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)

    def error(a: float, b: float) -> float:
        levels = np.array([i * a + j * b for i in (-1, 0, 1) for j in (-1, 0, 1)])
        return float((np.abs(w[:, None] - levels).min(axis=1) ** 2).mean())

    a, b = best.scales
    assert error(a, b) == pytest.approx(best.error_energy, rel=2e-3)
    grid = [(a1, a2) for a1 in np.arange(0.6, 2.4, 0.15) for a2 in np.arange(0.1, a1, 0.15)]
    assert min(error(*pair) for pair in grid) >= error(a, b)


def test_small_rates_keep_their_digits_and_reach_the_papers_limit():
    assert theory.exact_ratio(1e-12).ratio == pytest.approx(theory.PI_RATIO, rel=1e-5)
    # To second order T_sign = 2p - 8 p^1.5 / (3 pi); the naive form 1 - 2 kappa(1 - 2p) has lost this at 1e-12.
    s, r = theory.sign_flip(1e-10)
    total = 2 * 1e-10 - 8 * 1e-15 / (3 * np.pi)
    assert theory.post_relu_energy(*theory.moments(theory.Displacement(s, r))) == pytest.approx(total, rel=1e-5)


def test_rates_are_vectorised_and_keep_their_shape():
    rates = np.array([[0.001, 0.01], [0.05, 0.1]])

    assert theory.exact_ratio(rates).ratio.shape == (2, 2)
    assert theory.exact_ratio(rates).ratio[1, 0] == theory.exact_ratio(0.05).ratio
    assert theory.exact_ratio(rates, width=512).radial_sign.shape == (2, 2)
    assert theory.leading_ratio(rates)[0, 1] == pytest.approx(0.99 / (1 - 2 / np.pi))
    assert theory.leverage_of_entry(np.array([0.0, 0.1]), 100)[1] == pytest.approx(1 - 0.4 / (3 * np.pi))


@pytest.mark.parametrize(("rate", "width"), [(0.001, 512), (0.01, 2048), (0.4, 64), (0.999, 16)])
def test_flipped_energy_has_the_moments_of_a_random_mask_on_a_sphere(rate, width):
    values, weights = theory._flipped_energy(rate, width)

    assert weights.sum() == pytest.approx(1, abs=1e-9)
    assert weights @ values == pytest.approx(rate, rel=1e-8)
    # Var of sum_j b_j x_j^2 is p (1-p) E[sum x_j^4], and E[x_j^4] = 3 / (n (n+2)) on the sphere.
    assert weights @ values**2 - rate**2 == pytest.approx(rate * (1 - rate) * 3 / (width + 2), rel=1e-6)


def test_finite_width_form_equals_a_direct_average_over_masks():
    rng = np.random.default_rng(0)
    width, rate = 64, 0.02
    x = rng.standard_normal((100_000, width))
    share = ((x**2) * (rng.random(x.shape) < rate)).sum(1) / (x**2).sum(1)
    deficit = (1 - 2 * theory.kappa(1 - 2 * share)).mean()
    s, r = theory.moments(theory.constant_magnitude(rate))
    expected = (deficit - deficit**2 / 2) / theory.transverse_energy(s, r)

    assert theory.exact_ratio(rate, width=width).ratio == pytest.approx(expected, rel=0.01)
    assert theory.exact_ratio(rate).ratio > 1.02 * expected  # so the form does see the width


def test_finite_width_forms_approach_the_infinite_ones():
    for residual in (False, True):
        wide, infinite = (theory.depth_ratio(0.01, 4, residual=residual, width=w) for w in (10**7, None))
        np.testing.assert_allclose(wide, infinite, rtol=1e-5)
    assert theory.exact_ratio(0.01, width=10**7).ratio == pytest.approx(theory.exact_ratio(0.01).ratio, rel=1e-5)


def test_published_figures_stay_within_a_few_percent_of_the_exact_forms():
    for row in theory.PUBLISHED_RATIOS:
        assert row.ratio == pytest.approx(theory.exact_ratio(row.rate).ratio, rel=0.012)
    for series in theory.PUBLISHED_DEPTH[:2]:
        exact = theory.depth_ratio(theory.PUBLISHED_RATE_OF_DEPTH, len(series.ratios), residual=series.residual)
        np.testing.assert_allclose(series.ratios, exact, rtol=0.013)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.exact_ratio(0.0),
        lambda: theory.exact_ratio([0.1, float("nan")]),
        lambda: theory.authors_ratio(1.5),
        lambda: theory.exact_ratio(0.1, width=1),
        lambda: theory.kappa(1.1),
        lambda: theory.post_relu_energy(-1.0, 0.5),
        lambda: theory.radial_fraction(1.0, 1.0),
        lambda: theory.leverage_of_entry(1.2, 10),
        lambda: theory.leverage_of_entry(0.1, 0),
        lambda: theory.depth_ratio(0.01, 0, residual=False),
        lambda: theory.gaussian_quantizer("ternary"),
        lambda: theory.quantizer_constants("x", inner=2.0, energy=1.0, nonzero=1.0, thresholds=(), scales=()),
    ],
)
def test_arguments_outside_the_domain_are_refused(call):
    with pytest.raises(ProbeError):
        call()


def test_theory_does_not_import_torch():
    code = "import sys, ternary_probe.theory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
