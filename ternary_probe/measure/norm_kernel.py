"""Kernel directions of a norm's output: what a LayerNorm's algebra forces, and what else is there (THEORY 2.1-2.3).

``LN(x) = γ ⊙ n(x) + β`` has ``γ⁻¹`` in the kernel of its output covariance for every input distribution; an RMSNorm has
no such direction (arXiv 2606.19491, Prop. ln_kernel). The output is recomputed in fp64 from the norm's *input*: the
variance along a kernel direction is rounding noise, and a half-precision output would show nothing but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ternary_probe.anatomy import NormSite
from ternary_probe.anatomy._norm_law import NormKind, NormLaw, find_law, normalised
from ternary_probe.anatomy._trace import tensors_in
from ternary_probe.errors import ProbeError
from ternary_probe.measure.covariance import Covariance, require_finite

Outcome = Literal["layer_norm", "rms_norm", "undecided"]

KERNEL_ENERGY = 1e-8
"""Relative energy up to which a direction counts as one without variance; exact kernels measure 1e-15 and less."""
_EPS = torch.finfo(torch.float64).eps


class ZeroGainError(ProbeError):
    """A gain has a zero entry, so its inverse does not exist: the kernel is spanned by the zero axes instead."""


class KernelError(ProbeError):
    """A norm's kernel cannot be measured."""


def kernel_direction(gain: Tensor) -> Tensor:
    """Return the direction a LayerNorm's output never varies along (arXiv 2606.19491, Prop. ln_kernel (a)(i)).

    Args:
        gain: Effective gain, ``[d]``, without a zero entry.

    Returns:
        ``γ⁻¹ / ‖γ⁻¹‖``, fp64 ``[d]``.

    Raises:
        ZeroGainError: If an entry is zero.
    """
    gain = gain.double()
    if bool((gain == 0).any()):
        raise ZeroGainError(f"the gain is zero at {int((gain == 0).sum())} axes, which are then the kernel themselves")
    inverse = gain.abs().min() / gain  # scaled first: γ down to 1e-200 must not overflow
    unit: Tensor = inverse / torch.linalg.vector_norm(inverse)
    return unit


def zero_gain_axes(gain: Tensor) -> tuple[int, ...]:
    """Return the axes where the effective gain is zero; each is a kernel direction, whatever the norm's kind."""
    return tuple(int(axis) for axis in torch.nonzero(gain == 0)[:, 0])


@dataclass(frozen=True)
class NormKernel:
    """The second moments of a norm's output and its kernel directions.

    Attributes:
        name: The norm.
        kind: Its kind, by probing the module.
        width: ``d``.
        tokens: ``N``.
        dtype: Dtype of its input, so of the model's arithmetic.
        normalised: Covariance of ``n(x)``, the output without gain and bias, fp64 ``[d, d]`` on the CPU; the
            gain-whitened covariance ``D⁻¹CD⁻¹`` without ever dividing by a small γ.
        gain: Effective gain, fp64 ``[d]`` on the CPU.
        disagreement: Relative Frobenius difference between the recomputed output and the module's own.
        tolerance: Disagreement up to which rounding of input and output explains it.
        cosine: Smallest cosine between the predicted kernel (v*, or the zero-gain axes) and as many bottom eigenvectors
            of the output covariance C; ``|⟨u⊥, v*⟩|`` where it is one direction.
        energy: ``|v*ᵀCv*|`` over the median eigenvalue of C; 0 where the kernel is the zero-gain axes.
        energy_floor: What fp64 can resolve of it, ``ε₆₄ λ_max / λ_median``.
        participation: Participation ratio ``1/Σv*⁴`` of v*: about how many axes it spreads over; None with zero gains.
        whitened_cosine: ``|⟨u⊥, 1/√d⟩|`` of the gain-whitened covariance.
        whitened_energy: ``|1ᵀ(D⁻¹CD⁻¹)1|/d`` over its median eigenvalue.
        spectrum: Eigenvalues of the gain-whitened covariance over their median, ascending, fp64 ``[d]``.
        direction_floor: Relative eigenvalue up to which a direction has no variance, ``4ε²`` of the input's dtype, or
            what fp64 can resolve if that is more.
        schur_ratio: ``R(v*) = 1/[(v*ᵀC⁻¹v*)(v*ᵀCv*)]`` with eigenvalues of C held up to `schur_floor` (our reading).
        schur_floor: ``ε₆₄ d λ_max``.
    """

    name: str
    kind: NormKind
    width: int
    tokens: int
    dtype: torch.dtype
    normalised: Tensor
    gain: Tensor
    disagreement: float
    tolerance: float
    cosine: float
    energy: float
    energy_floor: float
    participation: float | None
    whitened_cosine: float
    whitened_energy: float
    spectrum: Tensor
    direction_floor: float
    schur_ratio: float | None
    schur_floor: float

    @property
    def covariance(self) -> Tensor:
        """Covariance of the norm's output, fp64 ``[d, d]``."""
        return self.gain[:, None] * self.normalised * self.gain

    @property
    def zero_axes(self) -> tuple[int, ...]:
        """Axes of zero gain."""
        return zero_gain_axes(self.gain)

    @property
    def mean_free(self) -> bool:
        """Whether ``n(x)`` has no variance along ``1/√d``: always in a LayerNorm, by accident in an RMSNorm."""
        return self.whitened_energy <= max(KERNEL_ENERGY, self.direction_floor)

    @property
    def smallest_other(self) -> float:
        """Smallest entry of `spectrum` but for that of ``1/√d``, where that is in the kernel."""
        return max(float(self.spectrum[int(self.mean_free)]), 0.0)

    def directions(self, floor: float | None = None) -> int:
        """Count the kernel directions: of the gain-whitened covariance, and the zero-gain axes.

        Args:
            floor: Relative eigenvalue up to which a direction counts; `direction_floor` by default.

        Returns:
            The number of directions.
        """
        return int((self.spectrum <= (floor or self.direction_floor)).sum()) + len(self.zero_axes)

    @property
    def other_directions(self) -> int:
        """Kernel directions that neither the algebra of a LayerNorm nor a zero gain explains."""
        forced = int(self.kind == "layer_norm" and self.mean_free)
        return max(self.directions() - forced - len(self.zero_axes), 0)

    @property
    def delta_gamma(self) -> float | None:
        """``Δ_γ = 1 − R(v*)`` (our reading)."""
        return None if self.schur_ratio is None else 1 - self.schur_ratio

    def classify(self, *, kernel_energy: float = KERNEL_ENERGY, cosine_factor: float = 4.0) -> Outcome:
        """Say which kind of norm the gain-whitened covariance shows (THEORY 2.3.4).

        A small γ turns the raw ``|cos|`` of a trained RMSNorm into 0.9999, so the gain is taken out first.

        Args:
            kernel_energy: Relative energy along ``1/√d`` up to which there is a kernel.
            cosine_factor: ``|cos|`` up to this many ``1/√d`` is chance.

        Returns:
            The kind, or ``undecided`` where there is variance along ``1/√d`` but more alignment than chance gives.
        """
        if self.whitened_energy <= max(kernel_energy, self.direction_floor):
            return "layer_norm"
        return "rms_norm" if self.whitened_cosine < cosine_factor / self.width**0.5 else "undecided"


class NormMoments:
    """Gathers, chunk by chunk, what `NormKernel` is computed from.

    Args:
        site: The norm; its live gain is read when a chunk comes.
    """

    def __init__(self, site: NormSite) -> None:
        self.site = site
        self._covariance: Covariance | None = None
        self._dtype = torch.float64
        self._coarsest = 0.0
        self._disagreement = 0.0

    @property
    def tokens(self) -> int:
        """Rows seen."""
        return 0 if self._covariance is None else self._covariance.rows

    def add(self, x: Tensor, output: Tensor | None = None) -> None:
        """Add one chunk.

        Args:
            x: What entered the norm, ``[..., d]``.
            output: What came out, to compare with; None to skip that.
        """
        rows = x.detach().reshape(-1, self.site.law.width)
        if self._covariance is None:
            self._covariance, self._dtype = Covariance(rows.shape[-1], rows.device), rows.dtype
        clean = normalised(self.site.kind, rows.double(), self.site.eps or 0.0)
        self._coarsest = max(self._coarsest, torch.finfo(rows.dtype).eps)
        self._covariance.add(clean)
        if output is not None:
            self._coarsest = max(self._coarsest, torch.finfo(output.dtype).eps)
            y = clean * self.site.gain.to(rows.device)
            if (bias := self.site.bias) is not None:
                y += bias.to(rows.device)
            change = torch.linalg.vector_norm(y - output.detach().reshape(y.shape).double())
            relative = float(change / torch.linalg.vector_norm(y).clamp_min(torch.finfo(torch.float64).tiny))
            self._disagreement = max(self._disagreement, relative) if relative == relative else float("inf")

    def kernel(self) -> NormKernel:
        """Decompose what was gathered.

        Returns:
            The kernel.

        Raises:
            KernelError: If no more rows than dimensions came by: the covariance is singular for want of text.
        """
        width = self.site.law.width
        if self._covariance is None or self.tokens <= width:
            raise KernelError(
                f"{self.tokens} tokens cannot span the {width} dimensions of {self.site.name}: "
                f"give more than {width} (--windows), {4 * width} to be useful"
            )
        clean = self._covariance.matrix.cpu()
        require_finite(clean, f"the input of {self.site.name}")
        gain = self.site.gain.cpu()
        raw = _raw_figures(clean, gain)
        white = _whitened_figures(clean, self._dtype)
        return NormKernel(
            name=self.site.name,
            kind=self.site.kind,
            width=width,
            tokens=self.tokens,
            dtype=self._dtype,
            normalised=clean,
            gain=gain,
            disagreement=self._disagreement,
            tolerance=8 * self._coarsest,
            cosine=raw.cosine,
            energy=raw.energy,
            energy_floor=raw.floor,
            participation=raw.participation,
            whitened_cosine=white.cosine,
            whitened_energy=white.energy,
            spectrum=white.spectrum,
            direction_floor=white.floor,
            schur_ratio=raw.schur,
            schur_floor=raw.schur_floor,
        )


class _Raw(NamedTuple):
    cosine: float
    energy: float
    floor: float
    participation: float | None
    schur: float | None
    schur_floor: float


def _raw_figures(clean: Tensor, gain: Tensor) -> _Raw:
    """Return the figures of the output covariance ``C = D n nᵀ D``."""
    values, vectors = torch.linalg.eigh(gain[:, None] * clean * gain)
    width = gain.shape[0]
    largest, median = float(values[-1]), float(values.quantile(0.5))
    tiny = torch.finfo(torch.float64).tiny
    schur_floor = max(_EPS * width * largest, tiny)
    axes = zero_gain_axes(gain)
    if axes:
        predicted = torch.zeros(width, len(axes), dtype=torch.float64)
        predicted[list(axes), range(len(axes))] = 1
        cosine = float(torch.linalg.matrix_norm(vectors[:, : len(axes)].T @ predicted, ord=-2))
        return _Raw(cosine, 0.0, _EPS * largest / max(median, tiny), None, None, schur_floor)
    v = kernel_direction(gain)
    # v*ᵀCv* = 1ᵀ n nᵀ 1 / ‖γ⁻¹‖²: without multiplying γ in and dividing it out again
    inverse_norm2 = float((v * gain).square().mean())  # (v_j γ_j)² = 1/‖γ⁻¹‖² for every j
    energy = abs(float(clean.sum())) * inverse_norm2
    weights, held = (vectors.T @ v).square(), values.clamp_min(schur_floor)
    schur = 1 / float((weights / held).sum() * (weights * held).sum())
    return _Raw(
        float((vectors[:, 0] @ v).abs()),
        energy / max(median, tiny),
        _EPS * largest / max(median, tiny),
        1 / float(v.pow(4).sum()),
        schur,
        schur_floor,
    )


class _Whitened(NamedTuple):
    cosine: float
    energy: float
    spectrum: Tensor
    floor: float


def _whitened_figures(clean: Tensor, dtype: torch.dtype) -> _Whitened:
    """Return the figures of the covariance with the gain taken out, whose candidate direction is ``1/√d``."""
    values, vectors = torch.linalg.eigh(clean)
    width = clean.shape[0]
    median = max(float(values.quantile(0.5)), torch.finfo(torch.float64).tiny)
    floor = max(4 * torch.finfo(dtype).eps ** 2, _EPS * width * float(values[-1]) / median)
    cosine = float(vectors[:, 0].sum().abs()) / width**0.5
    return _Whitened(cosine, abs(float(clean.sum())) / width / median, values / median, floor)


def kernel_of_norm(inputs: Iterable[Tensor], site: NormSite) -> NormKernel:
    """Measure a norm's kernel from what entered it.

    Args:
        inputs: Chunks ``[..., d]`` in any dtype, on any device.
        site: The norm.

    Returns:
        The kernel.
    """
    moments = NormMoments(site)
    for chunk in inputs:
        moments.add(chunk)
    return moments.kernel()


def probe_norm(module: nn.Module, x: Tensor, *, name: str = "norm") -> NormSite:
    """Describe a lone norm by probing it.

    Args:
        module: The module, of any model.
        x: An input it received, ``[batch, ..., d]``.
        name: What to call it.

    Returns:
        The norm.

    Raises:
        KernelError: If it is none.
    """
    law = find_law(module, (*[1] * (x.dim() - 2), 16, x.shape[-1]), 0)
    if not isinstance(law, NormLaw):
        raise KernelError(f"{name} is not a LayerNorm or RMSNorm: it {law.reason}")
    return NormSite(name, module, law, "final", None, ())


def observe_norm(module: nn.Module, run: Callable[[], object], *, name: str = "norm") -> NormKernel:
    """Measure the kernel of any norm of any model: an encoder, a vision tower, a module of your own.

    Args:
        module: The norm.
        run: Runs the model, as often as it takes to see enough rows.
        name: What to call it.

    Returns:
        The kernel.

    Raises:
        KernelError: If the module is no norm, never ran, or saw too few rows.
    """
    moments: list[NormMoments] = []
    probing: list[bool] = []

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if probing:  # the probe calls a copy of the module, this hook and all
            return
        x = next(tensor for _, tensor in tensors_in((args, kwargs)))
        if not moments:
            probing.append(True)
            moments.append(NormMoments(probe_norm(module, x, name=name)))
            probing.clear()
        moments[0].add(x, next(tensor for _, tensor in tensors_in(output)))

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    if not moments:
        raise KernelError(f"{name} did not run: check that it is part of the model")
    return moments[0].kernel()
