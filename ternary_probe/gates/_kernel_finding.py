"""What the checks on the final norm share: whether its kernel can be measured, and its figures for a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ternary_probe.errors import ProbeError
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Subject
    from ternary_probe.measure.norm_kernel import NormKernel

KIND_NAMES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "undecided": "undecided"}


def measured_kernel(check: str, subject: Subject) -> NormKernel | Finding:
    """Return the kernel of a subject's final norm, or the finding that says why there is none.

    Args:
        check: The check that asks.
        subject: The model.

    Returns:
        The kernel, measured on more tokens than dimensions and on the output the module really has; else a finding.
    """
    norm = subject.forward.norm
    if norm is None:
        odd = [entry for entry in subject.anatomy.unhandled if "normalises" in entry.reason]
        if odd:
            why = f"{odd[-1].name} {odd[-1].reason}"
            return Finding(check=check, status="inconclusive", message=f"the final norm could not be read: {why}")
        return Finding(
            check=check, status="not_applicable", message="the model has no norm between its blocks and its head"
        )
    width = norm.site.law.width
    if norm.tokens <= width:
        return Finding(
            check=check,
            status="inconclusive",
            subject=norm.site.name,
            measured=float(norm.tokens),
            threshold=float(width),
            unit="tokens",
            message=f"{norm.tokens} tokens cannot span {width} dimensions: give more than {width}, {4 * width} to be "
            f"useful (--windows); by probing, it is of kind {KIND_NAMES[norm.site.kind]}",
        )
    kernel = subject.forward.kernel
    if kernel.disagreement > kernel.tolerance:
        return Finding(
            check=check,
            status="inconclusive",
            subject=kernel.name,
            measured=kernel.disagreement,
            threshold=kernel.tolerance,
            message=f"{kernel.name} does not return what its probed law says (relative difference "
            f"{kernel.disagreement:.2g}), so its output cannot be recomputed in fp64",
        )
    return kernel


def kernel_figures(kernel: NormKernel) -> dict[str, Any]:
    """Return a kernel's figures for a finding's details.

    Args:
        kernel: The kernel.

    Returns:
        JSON values by name.
    """
    return {
        "norm": kernel.name,
        "kind_by_probing": kernel.kind,
        "kind_by_covariance": kernel.classify(),
        "tokens": kernel.tokens,
        "width": kernel.width,
        "dtype": str(kernel.dtype).removeprefix("torch."),
        "cosine": kernel.cosine,
        "kernel_energy": kernel.energy,
        "kernel_energy_floor": kernel.energy_floor,
        "whitened_cosine": kernel.whitened_cosine,
        "whitened_energy": kernel.whitened_energy,
        "kernel_directions": kernel.directions(),
        "other_directions": kernel.other_directions,
        "direction_floor": kernel.direction_floor,
        "smallest_other_eigenvalue": kernel.smallest_other,
        "zero_gain_axes": list(kernel.zero_axes[:20]),
        "zero_gain_count": len(kernel.zero_axes),
        "participation_of_v": kernel.participation,
        "schur_ratio (our reading)": kernel.schur_ratio,
        "delta_gamma (our reading)": kernel.delta_gamma,
        "schur_floor": kernel.schur_floor,
        "recomputation_difference": kernel.disagreement,
    }


def fresh_kernel(check: str, subject: Subject) -> tuple[dict[str, Any], str]:
    """Return the same figures for freshly initialised weights, and a clause for the message.

    Args:
        check: The check that asks.
        subject: The trained model.

    Returns:
        Details and clause; both empty where random-init figures were not asked for.
    """
    try:
        fresh = subject.random_init
        if fresh is None:
            return {}, ""
        kernel = measured_kernel(check, fresh)
    except ProbeError as error:
        return {"random_init": str(error)}, f"; random init: not measured ({error})"
    if isinstance(kernel, Finding):
        return {"random_init": kernel.message}, f"; random init: {kernel.message}"
    clause = f"; random init: |cos| {kernel.cosine:.4g}, relative energy {kernel.energy:.2g}"
    return {"random_init": kernel_figures(kernel)}, clause
