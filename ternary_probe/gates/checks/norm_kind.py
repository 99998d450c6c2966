"""Check ``norm-kind``."""

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


class NormKindLimits(Limits):
    """When a norm counts as a LayerNorm or an RMSNorm, and which one it must be."""

    declared: Literal["", "layer_norm", "rms_norm"] = Field(
        "",
        description="kind the final norm must have, layer_norm or rms_norm; empty: only what the config's class builds is "
        "asked for",
    )
    kernel_energy: float = Field(
        1e-8,
        gt=0,
        description="variance of the gain-whitened output along 1/sqrt(d), relative to the median eigenvalue, up to which "
        "there is a kernel; exact ones measure 1e-15 in fp64, a trained RMSNorm above 1e-3",
    )
    cosine_factor: float = Field(
        4.0,
        gt=0,
        description="an RMSNorm's |cos| with 1/sqrt(d) stays below this many 1/sqrt(d); chance gives 0.8 of them on "
        "average, and 2.6 were seen at d = 256",
    )


@check("norm-kind", tier=Tier.FORWARD, limits=NormKindLimits)
def norm_kind(evidence: Evidence, limits: NormKindLimits) -> Iterable[Finding]:
    """Norms must be of the kind that the config, the policy and the base say: LayerNorm or RMSNorm, found by behaviour.

    Two witnesses for the final norm: the module, probed with shifted and scaled inputs, and the covariance of its output
    on text, recomputed in fp64, with the gain taken out (a trained RMSNorm with one tiny gain looks like a LayerNorm
    otherwise). A LayerNorm has no variance along 1/sqrt(d) then (arXiv 2606.19491, Prop. ln_kernel); an RMSNorm has, unless
    its stream is mean-free by accident. Every other norm is probed, and set against what the config's class builds and
    against the base.

    Yields:
        One finding for the final norm, one or more for the kinds of all norms.
    """
    kernel = measured_kernel("norm-kind", evidence.subject)
    yield kernel if isinstance(kernel, Finding) else _final_norm(evidence, kernel, limits)
    yield from _declared(evidence, limits)
    if evidence.base is not None:
        yield from _against(
            evidence,
            {site.name: site.kind for site in evidence.base.anatomy.norms},
            f"in the base {evidence.base.name}",
        )


def _final_norm(evidence: Evidence, kernel: NormKernel, limits: NormKindLimits) -> Finding:
    seen = kernel.classify(kernel_energy=limits.kernel_energy, cosine_factor=limits.cosine_factor)
    kind = KIND_NAMES[kernel.kind]
    figures = f"|cos| {kernel.whitened_cosine:.4g}, relative energy {kernel.whitened_energy:.2g} along 1/sqrt(d)"
    status: Literal["pass", "fail"] = "pass"
    if seen == kernel.kind:
        message = f"the final norm {kernel.name} is {_article(kind)}, by probing and by its output ({figures})"
    elif kernel.kind == "layer_norm":
        status = "fail"
        message = f"the final norm {kernel.name} probes as a LayerNorm, yet its output varies along 1/gain ({figures})"
    elif seen == "layer_norm":
        message = (
            f"the final norm {kernel.name} is an RMSNorm by probing; on this stream, which is mean-free, it acts as a "
        )
        message += f"LayerNorm ({figures})"
    else:
        message = (
            f"the final norm {kernel.name} is an RMSNorm by probing; its stream varies along 1/sqrt(d), if less than "
        )
        message += f"elsewhere, which excludes a LayerNorm ({figures})"
    details, clause = fresh_kernel("norm-kind", evidence.subject)
    return Finding(
        check="norm-kind",
        status=status,
        subject=kernel.name,
        measured=kernel.whitened_cosine,
        threshold=limits.cosine_factor / kernel.width**0.5,
        unit="|cos|",
        message=message + clause,
        details=kernel_figures(kernel) | {"kind_by_covariance": seen} | details,
    )


def _declared(evidence: Evidence, limits: NormKindLimits) -> Iterable[Finding]:
    from ternary_probe.gates._declared import declared_kinds

    final = evidence.subject.anatomy.final_norm
    if limits.declared and final is not None and final.kind != limits.declared:
        yield Finding(
            check="norm-kind",
            status="fail",
            subject=final.name,
            message=f"the final norm {final.name} is {_article(KIND_NAMES[final.kind])}; the policy declares "
            f"{_article(KIND_NAMES[limits.declared])}",
        )
    declared = declared_kinds(evidence.subject.anatomy)
    if declared.problem:
        yield Finding(
            check="norm-kind",
            status="not_applicable",
            message=f"what the config declares is not known: {declared.problem}",
        )
        return
    yield from _against(evidence, dict(declared.kinds), "as its config declares it")


def _against(evidence: Evidence, expected: dict[str, str], source: str) -> Iterable[Finding]:
    sites = {site.name: site.kind for site in evidence.subject.anatomy.norms}
    shared = sites.keys() & expected.keys()
    swapped = [name for name in sites if name in shared and sites[name] != expected[name]]
    alike = ""
    if all(sites[name] == "rms_norm" for name in swapped) and _mean_free(evidence):
        alike = "; the stream is mean-free, where both compute the same"
    for name in swapped:
        yield Finding(
            check="norm-kind",
            status="warn" if alike else "fail",
            subject=name,
            message=f"norm {name} is {_article(KIND_NAMES[sites[name]])}; {source} it is "
            f"{_article(KIND_NAMES[expected[name]])}{alike}",
        )
    if swapped:
        return
    if not shared:
        yield Finding(check="norm-kind", status="not_applicable", message=f"no norm has a counterpart {source}")
        return
    yield Finding(
        check="norm-kind",
        status="pass",
        message=f"all {len(shared)} norms that can be set against each other are of the kind they are {source}",
        details={"norms": len(sites), "compared": len(shared)},
    )


def _mean_free(evidence: Evidence) -> bool:
    kernel = measured_kernel("norm-kind", evidence.subject)
    return not isinstance(kernel, Finding) and kernel.mean_free


def _article(kind: str) -> str:
    return f"{'an' if kind.startswith('R') else 'a'} {kind}"
