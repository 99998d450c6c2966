"""Check ``bitnet-scale``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread
from ternary_probe.records import Finding

if TYPE_CHECKING:
    from ternary_probe.gates._evidence import Evidence
    from ternary_probe.gates._parameters import ParameterEvidence

_NAME = "bitnet-scale"
_SCALE = "weight_scale"
_MEAN, _INVERSE = "mean|W|", "1/mean|W|"
# What each linear class does with the scale: BitLinear divides by it, AutoBitLinear multiplies.
_EXPECTED = {"bitlinear": _INVERSE, "autobitlinear": _MEAN}


class ScaleLimits(Limits):
    """Where the two conventions are told apart."""

    unclear: float = Field(
        2.0,
        gt=1,
        description="factor around 1 within which a scale tells nothing. Our choice: trained weights have mean magnitudes of "
        "hundredths, so a scale is far below 1, or as an inverse far above",
    )


@check(_NAME, tier=Tier.SCAN, limits=ScaleLimits)
def bitnet_scale(evidence: Evidence, limits: ScaleLimits) -> Iterable[Finding]:
    """Packed ternary weights must store their scale by one convention, and by the one their linear class reads.

    Two are about: the scale is mean|W|, or its inverse (FIELD 3). The wrong one leaves every weight off by the scale's
    square, without a word. Which one a checkpoint follows is read off the magnitudes [our reading]. Eight-bit floats
    are looked at, too: a weight without a companion scale beside it warns, since its values may be off by any factor.

    Yields:
        One finding about packed weights, one about eight-bit floats where one lacks its scale.
    """
    found = evidence.subject.parameters
    if (nothing := unread(_NAME, found)) is not None:
        yield nothing
        return
    scales = _packed_scales(found)
    bare = _bare_eight_bits(found)
    if bare:
        dtype = found.tensors[bare[0]].dtype
        message = f"{bare[0]} is stored as {dtype} without a companion scale ({len(bare)} such weights)"
        yield fault(_NAME, "warn", bare[0], message, float(len(bare)), 0.0, "weights")
    if scales:
        yield _judged(scales, limits.unclear, found.config)
    elif not bare:
        yield fault(
            _NAME, "not_applicable", "", "no packed ternary weight and no eight-bit float without a scale is stored"
        )


def _judged(scales: dict[str, float], unclear: float, config: dict[str, Any]) -> Finding:
    bad = [name for name, scale in scales.items() if not (math.isfinite(scale) and scale > 0)]
    if bad:
        message = f"the scale of {bad[0]} is {scales[bad[0]]}, which no weight can have ({len(bad)} such scales)"
        return fault(_NAME, "fail", bad[0], message, float(len(bad)), 0.0, "scales")
    means = [name for name, scale in scales.items() if scale * unclear < 1]
    inverses = [name for name, scale in scales.items() if scale > unclear]
    convention = _MEAN if len(means) >= len(inverses) else _INVERSE
    details: dict[str, Any] = {
        "mean": len(means),
        "inverse": len(inverses),
        "unclear": len(scales) - len(means) - len(inverses),
    }
    if means and inverses:
        odd = min((inverses, means), key=len)
        message = (
            f"the scale of {odd[0]} is {scales[odd[0]]:.3g}, and most follow {convention}: two conventions are mixed"
        )
        return fault(_NAME, "fail", odd[0], message, float(len(odd)), 0.0, "scales", **details)
    if not means and not inverses:
        message = f"the scales of {len(scales)} packed weights are near 1: mean and inverse cannot be told apart"
        return fault(_NAME, "inconclusive", "", message, **details)
    settings = config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    default = "bitlinear" if settings.get("quant_method") == "bitnet" else None
    reader = settings.get("linear_class", default)
    details |= {"convention": convention, "linear_class": reader}
    median = float(np.median(list(scales.values())))
    expected = _EXPECTED.get(str(reader))
    if expected is not None and expected != convention:
        message = (
            f"the config names the linear class {reader!r}, which reads a scale as {expected}, and the magnitudes (median "
            f"{median:.3g}) are those of {convention}: every packed weight would be off by the scale's square"
        )
        return fault(_NAME, "fail", "", message, median, 1.0, "weight_scale", **details)
    message = f"{len(scales)} packed weights store their scale as {convention} (median {median:.3g})" + (
        f", as the linear class {reader!r} reads it" if expected else ""
    )
    return fault(_NAME, "pass", "", message, median, 1.0, "weight_scale", **details)


def _packed_scales(found: ParameterEvidence) -> dict[str, float]:
    """Return the typical scale of every packed weight: its only one, or the median of its rows and groups."""
    scales: dict[str, float] = {}
    for name, entry in found.tensors.items():
        prefix, _, last = name.rpartition(".")
        packed = found.tensors.get(f"{prefix}.weight")
        if last == _SCALE and packed is not None and packed.dtype == "U8" and 0 not in entry.shape:
            values = found.read(name)
            odd = values[~(np.isfinite(values) & (values >= 0))]
            alive = values[values > 0]  # a row of zeros has the scale 0
            scales[prefix] = float(odd[0]) if odd.size else float(np.median(alive)) if alive.size else 0.0
    return scales


def _bare_eight_bits(found: ParameterEvidence) -> list[str]:
    return [
        name
        for name, entry in found.tensors.items()
        if entry.dtype.startswith(("F8_E4M3", "F8_E5M2"))
        and len(entry.shape) > 1
        and not any(f"{name}{end}" in found.tensors for end in ("_scale", "_scale_inv"))
        and f"{name.rpartition('.')[0]}.scale" not in found.tensors
    ]
