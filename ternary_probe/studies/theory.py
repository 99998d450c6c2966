"""Closed forms against simulation: the two-layer model, quantizers of Gaussian weights, and depth (THEORY 1.1 to 1.4)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from ternary_probe import simulators, ternary, theory
from ternary_probe.errors import ProbeError
from ternary_probe.records import (
    DepthRatio,
    Environment,
    GaussianQuantizer,
    ModelInfo,
    NoiseShape,
    ProtocolInfo,
    Simulated,
    TheoryRecord,
    Timing,
    TwoLayerRatio,
)
from ternary_probe.studies.intervals import mean_interval
from ternary_probe.studies.leverage import Progress, model_info

if TYPE_CHECKING:
    from ternary_probe.loading import LoadedModel
    from ternary_probe.studies.real_stack import RealStack
    from ternary_probe.text import Windows

Seeds = NDArray[np.float64]

FAMILY_ALPHA = 0.01
"""Chance that a correct program misses any closed form; shared out over all comparisons (Bonferroni)."""

COARSEST = 0.1
"""A ratio whose family-wise interval is wider than this share of it on either side tests nothing."""

_FEWEST_FLIPS = 100
_NARROWEST = 128
_SHAPES = {"half_normal": theory.half_normal_magnitude, "multiplicative": theory.multiplicative_gaussian}
_FIGURES = ("cos2", "error_energy", "radial_pre", "radial_post", "output_cos2", "nonzero")


@dataclass(frozen=True)
class TheoryOptions:
    """What to run. The defaults take about a minute on two cores; ``width=2048`` is the paper's.

    Attributes:
        rates: Flip rates of the two-layer model.
        width: Inputs, hidden units and outputs of every simulated layer.
        inputs: Input vectors per seed.
        seeds: Independent draws of weights, inputs and noise.
        depth: Also run the depth experiment.
        layers: Depth of its stacks.
        device: Where to compute; the draws do not depend on it.
        confidence: Coverage of the intervals shown; the verdict has its own (`FAMILY_ALPHA`).
    """

    rates: tuple[float, ...] = (0.001, 0.01, 0.02, 0.05, 0.1)
    width: int = 512
    inputs: int = 256
    seeds: tuple[int, ...] = tuple(range(32))
    depth: bool = True
    layers: int = 6
    device: str = "cpu"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Refuse what gives no figure, or one that no closed form can be held against.

        Raises:
            ProbeError: If a rate, the width, the seeds or the confidence is out of range.
        """
        if not self.rates or len(set(self.rates)) < len(self.rates):
            raise ProbeError("--rates names no rate, or one twice: use --rates 0.001,0.01,0.05")
        if self.width < _NARROWEST:
            raise ProbeError(
                f"--width {self.width}: the closed forms hold to leading order in 1/width only; use at least {_NARROWEST}"
            )
        tested = (*self.rates, theory.PUBLISHED_RATE_OF_DEPTH) if self.depth else self.rates
        for rate in tested:
            if not 0 < rate <= 1:
                raise ProbeError(f"--rates {rate:g}: a flip rate lies in (0, 1]")
            if rate * self.width**2 < _FEWEST_FLIPS:
                raise ProbeError(
                    f"rate {rate:g} flips only {rate * self.width**2:.0f} entries at --width {self.width}, too few for an "
                    f"interval: use --width {math.ceil(math.sqrt(_FEWEST_FLIPS / rate))} or more"
                )
        if self.inputs < 1 or self.layers < 1 or not self.seeds:
            raise ProbeError("--inputs and --seeds must be 1 or more")
        if not 0 < self.confidence < 1:
            raise ProbeError(f"--confidence {self.confidence:g}: give a share between 0 and 1, such as 0.95")

    @property
    def comparisons(self) -> int:
        """Number of closed forms the verdict rests on."""
        per_rate = 3 + len(_SHAPES)
        stacks = 2 * self.layers if self.depth else 0
        return per_rate * len(self.rates) + len(theory.GAUSSIAN_SCHEMES) * len(_FIGURES) + stacks


def run_theory(
    options: TheoryOptions,
    *,
    loaded: LoadedModel | None = None,
    windows: Windows | None = None,
    role: str | None = None,
    progress: Progress = lambda done, total, label: None,
) -> TheoryRecord:
    """Simulate, and hold every closed form against its interval.

    A figure agrees when it lies within the Student's t interval over seeds at level `FAMILY_ALPHA` over the number of
    comparisons, widened by a bound on what the form leaves out at that width (the forms carry the leading effect of it).

    Args:
        options: What to run.
        loaded: A model whose own matrices are stacked as well, fed its real hidden states; nothing in it is changed.
        windows: Text to make those hidden states; required with a model.
        role: Role of the stacked matrices; by default the first that reads the stream with the most outputs.
        progress: Called before each step.

    Returns:
        The record, with its verdict: ``inconclusive`` where the intervals are too wide to test a ratio.
    """
    started = time.perf_counter()
    study = _Study(options, progress)
    stack = None if loaded is None or windows is None else _real_stack(loaded, windows, role, options)
    two_layer, shapes = study.two_layer()
    quantizers = study.quantizers()
    depth = [*study.random_depth(), *study.real_depth(stack)]
    progress(study.total, study.total, "done")
    verdict, reason = _verdict(two_layer, shapes, quantizers, depth, options)
    notes = (*_level_note(options), "Quantizers have one scale for the whole matrix, the limit of large groups.")
    return TheoryRecord(
        model=_random_weights(options) if loaded is None else model_info(loaded, None),
        protocol=None if windows is None else ProtocolInfo.model_validate(windows.protocol.model_dump(mode="json")),
        environment=Environment.here(torch.get_num_threads()),
        timing=Timing(seconds=time.perf_counter() - started, evaluations=0 if stack is None else 1),
        status={"pass": "ok", "fail": "failed", "inconclusive": "inconclusive"}[verdict],
        notes=notes + (() if stack is None else _stack_notes(stack)),
        width=options.width,
        inputs=options.inputs,
        seeds=options.seeds,
        confidence=options.confidence,
        family_alpha=FAMILY_ALPHA,
        comparisons=options.comparisons,
        verdict=verdict,
        reason=reason,
        two_layer=tuple(two_layer),
        noise_shapes=tuple(shapes),
        quantizers=tuple(quantizers),
        depth=tuple(depth),
        stack=() if stack is None else stack.names,
    )


class _Study:
    """The simulations and their comparisons."""

    def __init__(self, options: TheoryOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.done = 0
        self.total = len(options.rates) + len(theory.GAUSSIAN_SCHEMES) + 1 + (2 if options.depth else 0) + 1

    def step(self, label: str) -> None:
        self.progress(self.done, self.total, label)
        self.done += 1

    @property
    def size(self) -> dict[str, Any]:
        """Arguments every simulation shares."""
        o = self.options
        return {"width": o.width, "inputs": o.inputs, "seeds": o.seeds, "device": o.device}

    def compare(self, per_seed: Any, exact: float | None, at_width: float | None, allowance: float = 0.0) -> Simulated:
        """Hold one figure against its closed form."""
        x = np.asarray(per_seed, dtype=np.float64)
        shown = mean_interval(x, self.options.confidence)
        many = x.size > 1
        error = float(x.std(ddof=1)) / math.sqrt(x.size) if many else None
        z = agrees = None
        if error is not None and at_width is not None:
            missed = shown.value - at_width
            z = missed / error if error > 0 else None
            agrees = abs(missed) <= error * critical_value(self.options) + allowance
        return Simulated(
            simulated=shown.value,
            standard_error=error,
            ci_low=shown.low if many else None,
            ci_high=shown.high if many else None,
            exact=exact,
            exact_width=at_width,
            allowance=allowance,
            z=z,
            agrees=agrees,
        )

    def two_layer(self) -> tuple[list[TwoLayerRatio], list[NoiseShape]]:
        rows: list[TwoLayerRatio] = []
        shapes: list[NoiseShape] = []
        width = self.options.width
        for rate in self.options.rates:
            self.step(f"two layers, rate {rate:g}")
            sample = simulators.two_layer(rate, noises=simulators.NOISES, **self.size)
            limit, finite = theory.exact_ratio(rate), theory.exact_ratio(rate, width=width)
            ratio = self.compare(
                sample.ratio().per_seed, float(limit.ratio), float(finite.ratio), _second_order(finite.ratio, width)
            )
            sign, magnitude = (
                self.compare(
                    sample.radial_fraction(arm).per_seed, float(a), float(b), _radial_allowance(float(a), width)
                )
                for arm, a, b in (
                    ("sign_flip", limit.radial_sign, finite.radial_sign),
                    ("constant", limit.radial_magnitude, finite.radial_magnitude),
                )
            )
            paper = next((row for row in theory.PUBLISHED_RATIOS if math.isclose(row.rate, rate)), None)
            rows.append(
                TwoLayerRatio(
                    rate=rate,
                    ratio_simulated=float(ratio.simulated or 0.0),
                    standard_error=ratio.standard_error,
                    ci_low=ratio.ci_low,
                    ci_high=ratio.ci_high,
                    ratio_exact=float(limit.ratio),
                    ratio_exact_width=float(finite.ratio),
                    ratio_authors=float(theory.authors_ratio(rate).ratio),
                    ratio_paper=paper.ratio if paper else None,
                    ratio_paper_spread=paper.spread if paper else None,
                    allowance=ratio.allowance,
                    z=ratio.z,
                    agrees=ratio.agrees,
                    radial_sign=sign,
                    radial_magnitude=magnitude,
                )
            )
            shapes += [self._shape(sample, rate, noise) for noise in _SHAPES]
        return rows, shapes

    def _shape(self, sample: simulators.TwoLayerSample, rate: float, noise: str) -> NoiseShape:
        below = float(theory.transverse_energy(*theory.moments(_SHAPES[noise](rate))))
        limit, finite = (
            float(theory.flip_transverse_energy(rate, width=width)) / below for width in (None, self.options.width)
        )
        found = self.compare(
            sample.ratio(denominator=noise).per_seed, limit, finite, _second_order(finite, self.options.width)
        )
        return NoiseShape(rate=rate, noise=noise, **found.model_dump())

    def quantizers(self) -> list[GaussianQuantizer]:
        o = self.options
        measured = {scheme: _matrix_figures(scheme, o, self.step) for scheme in theory.GAUSSIAN_SCHEMES}
        self.step("quantizers in two layers")
        arms = {scheme: _dequantized(scheme) for scheme in theory.GAUSSIAN_SCHEMES}
        sample = simulators.two_layer(theory.PUBLISHED_RATE_OF_DEPTH, noises=(), quantizers=arms, **self.size)
        rows = []
        for scheme in theory.GAUSSIAN_SCHEMES:
            form = theory.gaussian_quantizer(scheme)
            figures = {
                name: self.compare(
                    values, getattr(form, name), getattr(form, name), _entry_allowance(form, name, o.width)
                )
                for name, values in measured[scheme].items()
            }
            for name, estimate in (
                ("radial_post", sample.radial_fraction(scheme)),
                ("output_cos2", sample.output_cos2(scheme)),
            ):
                share: float = getattr(form, name)
                # A share along the clean output gains 3 (1 - R) / n at finite width (see `theory.exact_ratio`).
                figures[name] = self.compare(
                    estimate.per_seed, share, share + 3 * (1 - share) / o.width, _radial_allowance(share, o.width)
                )
            published = {"radial_post": theory.PUBLISHED_SIGN_RADIAL_FRACTION} if scheme == "sign" else {}
            closed = {name: getattr(form, name) for name in _FIGURES}
            rows.append(GaussianQuantizer(scheme=scheme, simulated=figures, published=published, **closed))
        return rows

    def random_depth(self) -> Iterator[DepthRatio]:
        """Yield one row per number of layers, without and with residual.

        Yields:
            Rows.
        """
        if not self.options.depth:
            return
        rate, layers, width = theory.PUBLISHED_RATE_OF_DEPTH, self.options.layers, self.options.width
        for residual in (False, True):
            self.step("depth with residual" if residual else "depth without residual")
            per_seed = simulators.depth(layers, rate, residual=residual, **self.size).ratio().per_seed
            limit = theory.depth_ratio(rate, layers, residual=residual)
            finite = theory.depth_ratio(rate, layers, residual=residual, width=width)
            for layer in range(layers):
                # Two moments stand for the flipped energy of later layers, which costs a term of order 1/n.
                found = self.compare(
                    per_seed[:, layer], float(limit[layer]), float(finite[layer]), 3 * float(finite[layer]) / width
                )
                yield _depth_row(found, "random", layer, residual=residual, series="random weights")

    def real_depth(self, stack: RealStack | None) -> Iterator[DepthRatio]:
        """Yield the same for a real model's matrices and hidden states, where no closed form holds.

        Yields:
            Rows.
        """
        self.step("depth on the model's matrices" if stack is not None else "closed forms")
        if stack is None:
            return
        o = self.options
        for residual in (False, True):
            sample = simulators.depth(
                len(stack.matrices),
                theory.PUBLISHED_RATE_OF_DEPTH,
                residual=residual,
                seeds=o.seeds,
                matrices=stack.matrices,
                hidden_states=stack.hidden_states,
                device=o.device,
            )
            per_seed = sample.ratio().per_seed
            for layer in range(len(stack.matrices)):
                found = self.compare(per_seed[:, layer], None, None)
                yield _depth_row(found, stack.role, layer, residual=residual, series=f"trained {stack.role} crops")


def critical_value(options: TheoryOptions) -> float:
    """Return how many standard errors a figure may be off: Student's t, Bonferroni over the comparisons.

    Args:
        options: Seeds and the number of comparisons.

    Returns:
        The quantile; infinite with one seed.
    """
    freedom = len(options.seeds) - 1
    return float(stats.t.ppf(1 - FAMILY_ALPHA / (2 * options.comparisons), freedom)) if freedom else math.inf


def _second_order(value: Any, width: int) -> float:
    """Bound the terms of order 1/n^2 of a figure with a form at width n; measured at n = 64 to 256."""
    return max(1.0, abs(float(value))) * (5 / width) ** 2


def _radial_allowance(share: float, width: int) -> float:
    # The correction 3 (1 - R) / n takes the active half of the units for all of them: off by a term that goes with R.
    return 6 * share * (1 - share) / width + (7 / width) ** 2


def _entry_allowance(form: theory.QuantizerConstants, name: str, width: int) -> float:
    # Two planes are fitted by alternation, which stops near its optimum: the error is flat there, these two are not.
    unfinished = (
        0.01 * float(getattr(form, name)) if form.scheme == "planes:2" and name in {"radial_pre", "nonzero"} else 0
    )
    return _second_order(1.0, width) + unfinished


def _matrix_figures(scheme: str, options: TheoryOptions, step: Any) -> dict[str, Seeds]:
    """Quantize one Gaussian matrix per seed: the figures that need no network."""
    step(f"Gaussian matrix, {scheme}")
    rows = []
    for seed in options.seeds:
        key = int(np.random.SeedSequence([seed, options.width, 0x7E]).generate_state(1, np.uint64)[0])
        weight = torch.randn((options.width, options.width), generator=torch.Generator().manual_seed(key))
        error = ternary.quantization_error(weight, ternary.quantize(weight, f"{scheme}@tensor"))
        rows.append((error.cos2, error.relative_error, error.radial_fraction, 1 - error.sparsity))
    columns = np.array(rows, dtype=np.float64).T
    return dict(zip(("cos2", "error_energy", "radial_pre", "nonzero"), columns, strict=True))


def _dequantized(scheme: str) -> simulators.Quantizer:
    def quantizer(weight: torch.Tensor) -> torch.Tensor:
        return ternary.quantize(weight, f"{scheme}@tensor").dequantize(weight.dtype)

    return quantizer


def _depth_row(found: Simulated, weights: str, layer: int, *, residual: bool, series: str) -> DepthRatio:
    for published in theory.PUBLISHED_DEPTH:
        if published.name == series and published.residual == residual and layer < len(published.ratios):
            figure, source = published.ratios[layer], f"{published.name}, {published.source}"
            break
    else:
        figure, source = None, None
    return DepthRatio(
        weights=weights,
        residual=residual,
        layers=layer + 1,
        rate=theory.PUBLISHED_RATE_OF_DEPTH,
        published=figure,
        published_source=source,
        **found.model_dump(),
    )


def _real_stack(loaded: LoadedModel, windows: Windows, role: str | None, options: TheoryOptions) -> RealStack:
    from ternary_probe import anatomy
    from ternary_probe.studies.real_stack import real_stack

    return real_stack(anatomy.examine(loaded.model), windows, role=role, layers=options.layers, inputs=options.inputs)


def _level_note(options: TheoryOptions) -> tuple[str, ...]:
    if len(options.seeds) < 2:
        return ()
    note = (
        f"A form is missed when a figure lies outside the interval at {FAMILY_ALPHA:.0%} over all {options.comparisons} "
        f"comparisons together (Bonferroni; ± {critical_value(options):.3g} standard errors), widened by a bound on what "
        "the form leaves out at this width; the intervals shown are ordinary ones."
    )
    return (note,)


def _stack_notes(stack: RealStack) -> tuple[str, ...]:
    width = stack.hidden_states.shape[1]
    note = (
        f"{len(stack.matrices)} {stack.role} matrices of the model, cropped to {width} × {width}, are stacked as the paper "
        f"does and fed {len(stack.hidden_states)} of the first one's real inputs: only the flips differ between seeds, and "
        "no closed form holds for them."
    )
    return (note,)


def _verdict(
    two_layer: list[TwoLayerRatio],
    shapes: list[NoiseShape],
    quantizers: list[GaussianQuantizer],
    depth: list[DepthRatio],
    options: TheoryOptions,
) -> tuple[Literal["pass", "fail", "inconclusive"], str]:
    missed = [f"ratio at rate {r.rate:g}" for r in two_layer if r.agrees is False]
    missed += [f"radial fraction of sign flips at rate {r.rate:g}" for r in two_layer if r.radial_sign.agrees is False]
    missed += [
        f"radial fraction of magnitude noise at rate {r.rate:g}"
        for r in two_layer
        if r.radial_magnitude.agrees is False
    ]
    missed += [f"ratio to {s.noise} noise at rate {s.rate:g}" for s in shapes if s.agrees is False]
    missed += [f"{name} of {q.scheme}" for q in quantizers for name, s in q.simulated.items() if s.agrees is False]
    missed += [f"depth {d.layers} {'with' if d.residual else 'without'} residual" for d in depth if d.agrees is False]
    if missed:
        return "fail", f"missed by more than its interval allows: {'; '.join(missed)}"
    if len(options.seeds) < 2:
        return "inconclusive", "an interval takes two seeds or more"
    reach = critical_value(options)
    tested = [(r.standard_error, r.ratio_exact_width) for r in two_layer]
    tested += [(s.standard_error, s.exact_width) for s in (*shapes, *depth) if s.exact_width is not None]
    widest = max((error or 0.0) * reach / abs(exact) for error, exact in tested)
    if widest > COARSEST:
        return "inconclusive", f"the widest interval is ± {widest:.0%} of its ratio: use more --seeds or --inputs"
    return "pass", ""


def _random_weights(options: TheoryOptions) -> ModelInfo:
    return ModelInfo(
        name="random Gaussian weights",
        kind="two-layer ReLU + RMSNorm, simulated",
        dtype="float32",
        device=options.device,
        parameters=2 * options.width**2,
    )
