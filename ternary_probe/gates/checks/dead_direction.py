"""Check ``dead-direction``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._kernel_finding import KIND_NAMES, fresh_kernel, kernel_figures, measured_kernel
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.measure.norm_kernel import NormKernel

_NAME = "dead-direction"


class DeadDirectionLimits(Limits):
    """How dead a direction must be, and how many new ones a candidate may have."""

    kernel_energy: float = Field(
        1e-8,
        gt=0,
        description="variance of a LayerNorm's output along v* = 1/gain, relative to the median eigenvalue, that its "
        "algebra allows; recomputed in fp64 it measures 1e-15 (arXiv 2606.19491, Prop. ln_kernel)",
    )
    max_new: int = Field(
        0,
        ge=0,
        description="directions without variance that a candidate may have beyond its base's; rounding alone makes none",
    )


@check(_NAME, tier=Tier.FORWARD, limits=DeadDirectionLimits)
def dead_direction(evidence: Evidence, limits: DeadDirectionLimits) -> Iterable[Finding]:
    """The final norm's output must be dead only where its algebra says so, and a candidate adds no dead direction.

    For a LayerNorm with gain and bias the covariance of the output has v* = 1/gain in its kernel for every input
    (arXiv 2606.19491, Prop. ln_kernel); zero gains are kernel axes of any norm; an RMSNorm has no other. Measured are |cos|
    of v* with the bottom eigenvector, the variance along v* relative to the median eigenvalue, and every further direction
    whose variance lies at the floor of the model's dtype. On an anisotropic stream |cos| alone can be small although the
    kernel is exact, so the energy decides. The Schur ratio and Delta_gamma are our reading of the paper.

    Yields:
        One finding for v*, one for other directions, and one against the base where there is one.
    """
    kernel = measured_kernel(_NAME, evidence.subject)
    if isinstance(kernel, Finding):
        yield kernel
        return
    yield _predicted(evidence, kernel, limits)
    yield _others(evidence, kernel)
    if evidence.base is not None:
        base = measured_kernel(_NAME, evidence.base)
        if isinstance(base, Finding):
            why = f"no comparison with the base {evidence.base.name}: {base.message}"
            yield Finding(check=_NAME, status="inconclusive", message=why)
        else:
            yield _against_base(evidence.base.name, kernel, base, limits)


def _predicted(evidence: Evidence, kernel: NormKernel, limits: DeadDirectionLimits) -> Finding:
    allowed = max(limits.kernel_energy, kernel.energy_floor)
    status: Literal["pass", "fail"] = "pass"
    zeros = len(kernel.zero_axes)
    figures = f"|cos| {kernel.cosine:.6g}, relative energy {kernel.energy:.2g}"
    if zeros:
        message = (
            f"{kernel.name} has {zeros} zero gain{'s' * (zeros > 1)} ({_listed(kernel.zero_axes)}), which are its dead "
        )
        message += f"axes (|cos| {kernel.cosine:.6g})"
    elif kernel.kind == "layer_norm":
        dead = kernel.energy <= allowed
        status = "pass" if dead else "fail"
        message = f"{kernel.name} is a LayerNorm: its output {'never varies' if dead else 'varies'} along v* = 1/gain "
        message += (
            f"({figures}, fp64 floor {kernel.energy_floor:.1g}), which spreads over {kernel.participation:.3g} of "
        )
        message += f"{kernel.width} axes"
    elif kernel.mean_free:
        message = (
            f"{kernel.name} is an RMSNorm on a mean-free stream, which makes v* = 1/gain dead by accident ({figures})"
        )
    else:
        message = (
            f"{kernel.name} is an RMSNorm: no direction is dead by its algebra, and its output varies along 1/gain "
        )
        message += f"({figures}; |cos| {kernel.whitened_cosine:.4g} with the gain taken out, chance is below "
        message += f"{4 / kernel.width**0.5:.3g})"
    details, clause = fresh_kernel(_NAME, evidence.subject)
    return Finding(
        check=_NAME,
        status=status,
        subject=kernel.name,
        measured=kernel.energy,
        threshold=allowed if kernel.kind == "layer_norm" else None,
        unit="of the median eigenvalue",
        message=message + clause,
        details=kernel_figures(kernel) | details,
    )


def _others(evidence: Evidence, kernel: NormKernel) -> Finding:
    count, distinct = kernel.other_directions, evidence.subject.forward.distinct_tokens
    status: Literal["pass", "warn", "inconclusive"] = "warn" if count else "pass"
    floor = f"{kernel.direction_floor:.1g} of the median eigenvalue, the floor of {str(kernel.dtype).removeprefix('torch.')}"
    if not count:
        message = (
            f"no other direction of {kernel.name} is dead: the smallest has {kernel.smallest_other:.2g} of the median "
        )
        message += "eigenvalue"
    else:
        subject = (
            f"{count} further directions of {kernel.name} have" if count > 1 else f"a direction of {kernel.name} has"
        )
        message = f"{subject} no variance (up to {floor}) that neither its kind nor a zero gain explains"
        if min(kernel.tokens // 4, distinct) < kernel.width:
            status = "inconclusive"
            message += f"; {kernel.tokens} tokens of {distinct} kinds may be too few to tell: give more text"
    return Finding(
        check=_NAME,
        status=status,
        subject=kernel.name,
        measured=float(count),
        threshold=0.0,
        unit="directions",
        message=message,
        details={"distinct_tokens": distinct, "lowest_eigenvalues": [float(v) for v in kernel.spectrum[:8]]},
    )


def _against_base(name: str, kernel: NormKernel, base: NormKernel, limits: DeadDirectionLimits) -> Finding:
    floor = max(kernel.direction_floor, base.direction_floor)
    now, before = kernel.directions(floor), base.directions(floor)
    new = now - before
    message = f"{kernel.name} has {now} dead direction{'s' * (now != 1)}, the base's {base.name} {before}"
    if new > limits.max_new:
        message += f": {new} new"
        if kernel.kind != base.kind:
            message += f", as the {KIND_NAMES[base.kind]} became a {KIND_NAMES[kernel.kind]}"
        elif gone := sorted(set(kernel.zero_axes) - set(base.zero_axes)):
            message += f", {len(gone)} by zeroed gains ({_listed(tuple(gone))})"
    return Finding(
        check=_NAME,
        status="fail" if new > limits.max_new else "pass",
        subject=kernel.name,
        measured=float(new),
        threshold=float(limits.max_new),
        unit="new directions",
        message=message,
        details={
            "floor": floor,
            "base": name,
            "smallest_other_eigenvalue": kernel.smallest_other,
            "base_smallest_other_eigenvalue": base.smallest_other,
        },
    )


def _listed(axes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, axes[:4]))
    return f"axis {shown}" if len(axes) == 1 else f"axes {shown}{', ...' * (len(axes) > 4)}"
