"""What a norm-like module computes, found by feeding it inputs: kind, effective gain and bias, eps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

NormKind = Literal["layer_norm", "rms_norm"]

_AMPLITUDE = 1e3  # large against any eps
_TOLERANCE = 1e-4  # modules may compute in float32 inside


class Affine(NamedTuple):
    """A parameter's part in the gain or the bias: ``slope * parameter + offset``.

    Attributes:
        parameter: Its name within the module, or None where the value is a constant (`offset` per coordinate).
        slope: Measured slope; 1 in practice.
        offset: Constant added, ``[width]`` float64: 0 for plain norms, 1 for ``1 + w``.
    """

    parameter: str | None
    slope: float
    offset: Tensor


@dataclass(frozen=True, slots=True)
class NormLaw:
    """The function ``gain * normalised(x) + bias`` a module was found to compute.

    Attributes:
        kind: ``layer_norm`` if a shift of the input changes nothing, else ``rms_norm``.
        width: Length of the normalised (last) axis.
        gain: Where the gain comes from.
        bias: Where the bias comes from, or None if there is none.
        eps: Constant added to the variance, or None if that is not what the module does.
    """

    kind: NormKind
    width: int
    gain: Affine
    bias: Affine | None
    eps: float | None


class NotANorm(NamedTuple):
    """A module that is no norm, or (`looks_like_one`) one whose law could not be written down."""

    looks_like_one: bool
    reason: str


class _Fit(NamedTuple):
    gain: Tensor
    bias: Tensor


def find_law(module: nn.Module, shape: tuple[int, ...], key: int | str) -> NormLaw | NotANorm:
    """Probe a module on synthetic inputs.

    A copy in float64 on the CPU is probed, so the precision does not depend on the model's dtype.

    Args:
        module: The module.
        shape: Shape of the input it received in the recorded forward; its last axis is the one normalised.
        key: Position or keyword of that input.

    Returns:
        Its law, or why it has none.
    """
    try:
        probed = copy.deepcopy(module).to(device="cpu", dtype=torch.float64).eval()
    except Exception as error:  # any module may refuse to be copied; it is then reported
        return NotANorm(looks_like_one=False, reason=f"cannot be copied for probing ({type(error).__name__})")
    run = _runner(probed, key)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * _AMPLITUDE
    x += 0.1 * _AMPLITUDE  # a mean, which only a LayerNorm ignores
    y = run(x)
    if y is None or not _is_norm_like(run, x, y):
        return NotANorm(looks_like_one=False, reason="is not invariant to the scale of its input")
    shifted = run(x + 2 * _AMPLITUDE)
    kind: NormKind = "layer_norm" if shifted is not None and _close(shifted, y) else "rms_norm"
    fit = _regress(kind, x, y)
    if fit is None:
        return NotANorm(
            looks_like_one=True, reason="normalises its input, but not as gain * normalised(x) + bias on the last axis"
        )
    gain, bias = _affine_parts(probed, run, kind, x, fit)
    if gain is None:
        return NotANorm(
            looks_like_one=True, reason="normalises its input with a gain that is not linear in one parameter"
        )
    return NormLaw(kind, shape[-1], gain, bias, _find_eps(module, run, kind, x, fit))


def _runner(module: nn.Module, key: int | str) -> Callable[[Tensor], Tensor | None]:
    def run(x: Tensor) -> Tensor | None:
        try:
            with torch.no_grad():
                output = module(x) if key == 0 else module(**{str(key): x})
        except Exception:  # a module that wants more than one input is no norm
            return None
        if not isinstance(output, Tensor) or output.shape != x.shape or not bool(output.isfinite().all()):
            return None
        return output.double()

    return run


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())


def _is_norm_like(run: Callable[[Tensor], Tensor | None], x: Tensor, y: Tensor) -> bool:
    """Return whether a function ignores a factor, is not constant, and couples its coordinates."""
    tripled, reversed_rows = run(3 * x), run(x.flip(-1))
    if tripled is None or reversed_rows is None or not _close(tripled, y) or _close(reversed_rows, y):
        return False
    bumped = x.clone()
    bumped[..., 0] += 5 * _AMPLITUDE
    moved = run(bumped)
    return x.shape[-1] > 1 and moved is not None and not _close(moved[..., 1:], y[..., 1:])


def normalised(kind: NormKind, x: Tensor, eps: float = 0.0) -> Tensor:
    """Return ``(x - mean) / std`` or ``x / rms`` over the last axis, in x's dtype, without gain and bias."""
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _regress(kind: NormKind, x: Tensor, y: Tensor) -> _Fit | None:
    """Return the fit ``y = gain * normalised(x) + bias`` coordinate by coordinate; None where that does not hold."""
    n = normalised(kind, x).reshape(-1, x.shape[-1])
    flat = y.reshape(-1, x.shape[-1])
    n_mean, y_mean = n.mean(0), flat.mean(0)
    gain = ((n - n_mean) * (flat - y_mean)).sum(0) / (n - n_mean).square().sum(0)
    bias = y_mean - gain * n_mean
    return _Fit(gain, bias) if _close(gain * n + bias, flat) else None


def _affine_parts(
    module: nn.Module, run: Callable[[Tensor], Tensor | None], kind: NormKind, x: Tensor, fit: _Fit
) -> tuple[Affine | None, Affine | None]:
    """Return the parameters behind gain and bias: each of the right length is shaken, to see which answers linearly."""
    gain = Affine(None, 0.0, fit.gain)
    bias: Affine | None = None
    scale = max(float(fit.gain.abs().max()), float(fit.bias.abs().max()), 1e-30)
    if float(fit.bias.abs().max()) > _TOLERANCE * scale:
        bias = Affine(None, 0.0, fit.bias)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if parameter.numel() != x.shape[-1]:
            continue
        shake = (1 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64)) * scale
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(shake)
        y = run(x)
        shaken = None if y is None else _regress(kind, x, y)
        with torch.no_grad():
            parameter.copy_(before)
        if shaken is None:
            return None, None
        for part in ("gain", "bias"):
            change = getattr(shaken, part) - getattr(fit, part)
            if float(change.abs().max()) <= _TOLERANCE * scale:
                continue
            slopes = change / shake.flatten()
            slope = float(slopes.median())
            if not bool(((slopes - slope).abs() <= 10 * _TOLERANCE * abs(slope)).all()):
                return None, None
            slope = float(round(slope)) if abs(slope - round(slope)) < 10 * _TOLERANCE else slope
            offset = getattr(fit, part) - slope * before.flatten()
            tidy = offset.round() + 0.0  # no -0.0
            offset = torch.where((offset - tidy).abs() < 10 * _TOLERANCE * scale, tidy, offset)
            if part == "gain":
                gain = Affine(name, slope, offset)
            else:
                bias = Affine(name, slope, offset)
    return gain, bias


def _find_eps(
    module: nn.Module, run: Callable[[Tensor], Tensor | None], kind: NormKind, x: Tensor, fit: _Fit
) -> float | None:
    """Return eps, measured on inputs so small that it matters; the module's own constant if one agrees to 1 %."""
    small = x / _AMPLITUDE * 1e-4
    y = run(small)
    if y is None:
        return None
    centred = small - small.mean(-1, keepdim=True) if kind == "layer_norm" else small
    shape = fit.gain * centred
    factor = ((y - fit.bias) * shape).sum(-1) / shape.square().sum(-1)
    eps = float((factor.pow(-2) - centred.square().mean(-1)).median())
    model = fit.gain * normalised(kind, small, eps) + fit.bias if eps > -1e-12 else y + 1
    if not _close(model, y):
        return None
    constants = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1 and abs(v - eps) <= 0.01 * v]
    return constants[0] if constants else max(float(f"{eps:.3g}"), 0.0)
