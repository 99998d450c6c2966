"""Ternary quantizers: pure functions from a weight matrix to codes in {-1, 0, 1} and scales.

A *unit* is a set of entries with one scale: the tensor, a row, or a group of consecutive entries of a row. Everything
runs over chunks of rows that stay in cache; statistics are accumulated in float64 (an fp32 mean of 4096^2 entries can
move thousands of codes), codes are decided exactly against the float64 threshold, and no copy of the matrix is made. Input
may be float16, bfloat16 or float32 (computed in float32) or float64.

Defined behaviour at the edges: a group that does not divide the row leaves a shorter last group; a unit of zeros (or
one whose scale would fall below the smallest normal float32) gets codes 0 and scale 0 and is counted; NaN and infinity
are refused by position; integers are refused; an empty matrix has empty codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ternary_probe.errors import ProbeError
from ternary_probe.least_squares import SMALLEST_SCALE, decide_two_planes, fit_plane, fit_two_planes
from ternary_probe.packing import CODES_PER_BYTE, TRITS_PER_BYTE
from ternary_probe.schemes import Scheme, parse
from ternary_probe.workspace import Workspace

_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24
_TWN_FACTOR = 0.7
_RUN = 256


class BitsPerWeight(NamedTuple):
    """Storage per weight, all planes and scales included."""

    two_bit: float
    """With `packing.pack2`: 4 codes a byte."""
    five_trits: float
    """With `packing.pack_trits`: 5 codes a byte."""
    entropy: float
    """With an ideal coder of independent codes, each plane by its own frequencies."""


class QuantizationError(NamedTuple):
    """How a quantized matrix differs from the original, summed over all entries in float64."""

    cos2: float
    """Squared cosine between weight and quantized weight; NaN if one of them is 0."""
    relative_error: float
    """``|q - w|^2 / |w|^2``; NaN for a zero weight."""
    radial_fraction: float
    """Share of the error along ``w``: ``<w, q - w>^2 / (|w|^2 |q - w|^2)``; NaN without error."""
    sparsity: float
    """Share of entries that became 0; NaN for an empty matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class TernaryWeight:
    """A matrix as a sum of ternary planes: ``q = sum_p scale_p * codes_p``."""

    codes: Tensor
    """int8 in {-1, 0, 1}, shape ``[planes, out, in]``."""
    scale: Tensor
    """float32, not negative: ``[planes, 1, 1]`` (tensor), ``[planes, out, 1]`` (row) or ``[planes, out, groups]``."""
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``(out, in)`` of the matrix."""
        _, rows, columns = self.codes.shape
        return rows, columns

    @property
    def zero_units(self) -> Tensor:
        """Units of nothing but zeros (or vanishing in float32): codes and scale 0. Bool, one plane's scale shape."""
        return (self.scale == 0).all(0)

    @property
    def zero_unit_count(self) -> int:
        """Number of `zero_units`; 0 for an empty matrix."""
        return int(self.zero_units.sum()) if self.codes.numel() else 0

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the quantized matrix.

        Args:
            dtype: Floating type of the result; plane sums are formed in float32 or wider and rounded once.

        Returns:
            Values, shape ``[out, in]``.

        Raises:
            ProbeError: If ``dtype`` is not floating or cannot hold the largest value.
        """
        if not dtype.is_floating_point:
            raise ProbeError(f"a ternary weight cannot be dequantized to {dtype}; ask for a floating dtype")
        if self.codes.numel() and float(self.scale.double().sum(0).max()) > torch.finfo(dtype).max:
            raise ProbeError(
                f"scale {float(self.scale.max()):.4g} of a {list(self.shape)} ternary weight overflows {dtype}; "
                "dequantize to a wider dtype"
            )
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for rows in _row_chunks(out):
            if len(self.codes) == 1:
                self._write(0, rows, out[rows])  # 0 or ± the rounded scale, exact in any dtype
            else:
                out[rows] = self._values(rows, _work_dtype(dtype))  # a sum must not be rounded twice
        return out

    def bits_per_weight(self, scale_bits: int = 32) -> BitsPerWeight:
        """Return the storage per weight, scales and the fill of packed rows included.

        Args:
            scale_bits: Bits of one stored scale; 16 where a checkpoint keeps scales in half precision.

        Returns:
            Bits for each way to store the codes; NaN for an empty matrix.
        """
        planes, rows, columns = self.codes.shape
        if not rows * columns:
            return BitsPerWeight(math.nan, math.nan, math.nan)
        scales = self.scale.numel() * scale_bits / (rows * columns)
        two_bit, five_trits = (planes * -(-columns // per) * 8 / columns for per in (CODES_PER_BYTE, TRITS_PER_BYTE))
        entropy = sum(_entropy(plane) for plane in self.codes)
        return BitsPerWeight(two_bit + scales, five_trits + scales, entropy + scales)

    def _values(self, rows: slice, dtype: torch.dtype) -> Tensor:
        total = torch.zeros((rows.stop - rows.start, self.shape[1]), dtype=dtype, device=self.codes.device)
        plane = torch.empty_like(total)
        for index in range(len(self.codes)):
            self._write(index, rows, plane)
            total += plane
        return total

    def _write(self, plane: int, rows: slice, out: Tensor) -> None:
        out.copy_(self.codes[plane, rows])
        scale = self.scale[plane].to(out.dtype)
        if self.scheme.granularity != "tensor":
            scale = scale[rows]
        if self.scheme.group is None:
            out.mul_(scale)
            return
        full, rest = divmod(self.shape[1], self.scheme.group)
        if full:
            out[:, : full * self.scheme.group].view(-1, full, self.scheme.group).mul_(scale[:, :full, None])
        if rest:
            out[:, -rest:].mul_(scale[:, full:])


def quantize(w: Tensor, scheme: str | Scheme, *, group: int | None = None) -> TernaryWeight:
    """Quantize a weight matrix to ternary.

    - ``sign``: codes ±1 (``sign(0) = +1``, so there are no zeros), scale mean|w| (arXiv 2605.18933, Theorem 4);
    - ``absmean``: ``round_clip(w / mean|w|, -1, 1)``, ties to 0, scale mean|w| (BitNet b1.58, arXiv 2402.17764). Its
      ``+ eps`` only guards 0/0 and is not added: a zero unit is handled as such, and scaling w scales the result;
    - ``twn``: nonzero where ``|w| > 0.7 mean|w|``, scale their mean (arXiv 1605.04711);
    - ``optimal``: the codes and the scale of least squared error, exact (`least_squares.fit_plane`);
    - ``planes:2``: two planes by alternating least squares from several starts (`least_squares.fit_two_planes`).

    Memory beyond the result is a few chunks, save for ``optimal@tensor`` and ``planes:2@tensor``, which sort the whole
    tensor at once.

    Args:
        w: Weights, shape ``[out, in]``, floating, finite; any strides or device.
        scheme: Scheme or its name, ``scheme[+ls][@row|@tensor|@g128]``.
        group: Group size, where the name gives no granularity.

    Returns:
        Codes and scales on the device of ``w``.

    Raises:
        ProbeError: If ``w`` is not a finite floating matrix, a scale overflows float32, the name is not a scheme, or
            ``group`` is given beside a `Scheme`.
    """
    if isinstance(scheme, str):
        scheme = parse(scheme, group=group)
    elif group is not None:
        raise ProbeError(f"scheme {scheme} already says how scales are shared; drop the group size {group}")
    _check_weight(w)
    w = w.detach()
    rows, columns = w.shape
    codes = torch.empty((scheme.planes, rows, columns), dtype=torch.int8, device=w.device)
    scale = torch.zeros((scheme.planes, *scheme.scale_shape(rows, columns)), dtype=torch.float64, device=w.device)
    if w.numel():
        solve = _Solver(scheme, Workspace(w.device))
        if scheme.granularity == "tensor" and not solve.sorts:
            solve.mean = _mean_abs(w, solve.workspace)
        for block in _blocks(w, scheme, whole=solve.sorts):
            units = solve(block.load(w, solve.workspace))
            part = codes[:, block.rows, block.columns]
            part.copy_(units.codes.view(part.shape))
            scale[:, block.scale_rows, block.scale_columns] = units.scale.view(-1, *block.scale_shape)
    result = TernaryWeight(codes, _stored(scale, w), scheme)
    if scheme.refit or scheme.method == "twn":
        return replace(result, scale=least_squares_scale(w, codes[0], scheme)[None])
    return result


def least_squares_scale(w: Tensor, codes: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales that minimise the squared error of any integer grid: ``<w, c> / <c, c>`` per unit.

    Args:
        w: Weights, shape ``[out, in]``, floating, finite.
        codes: Integers, one plane, shape ``[out, in]``, on the device of ``w``.
        scheme: Says which entries share a scale; its method plays no part.

    Returns:
        float32 scales, shape of one plane (`Scheme.scale_shape`); 0 where a unit has no nonzero code.

    Raises:
        ProbeError: If the shapes differ, the codes are not integers, ``w`` is not a finite floating matrix, or a scale
            overflows float32.
    """
    _check_weight(w)
    if codes.shape != w.shape or codes.is_floating_point():
        raise ProbeError(
            f"codes of shape {list(codes.shape)} and {codes.dtype} are no integer grid for weights of {list(w.shape)}"
        )
    w = w.detach()
    workspace = Workspace(w.device)
    inner, norm = torch.zeros((2, *scheme.scale_shape(*w.shape)), dtype=torch.float64, device=w.device)
    for block in _blocks(w, scheme, whole=False) if w.numel() else ():
        x = block.load(w, workspace)
        c = workspace.take("codes", x.shape, x.dtype)
        part = codes[block.rows, block.columns]
        c.view(part.shape).copy_(part)
        products = torch.mul(c, x, out=workspace.take("products", x.shape, x.dtype)).sum(1, dtype=torch.float64)
        squares = c.square_().sum(1, dtype=torch.float64)
        if scheme.granularity == "tensor":
            products, squares = products.sum(), squares.sum()
        inner[block.scale_rows, block.scale_columns] += products.view(block.scale_shape)
        norm[block.scale_rows, block.scale_columns] += squares.view(block.scale_shape)
    return _stored(torch.where(norm > 0, inner / norm.clamp(min=1), inner), w)


def quantization_error(w: Tensor, quantized: TernaryWeight) -> QuantizationError:
    """Compare a matrix with its quantized form, chunk by chunk.

    Args:
        w: Original weights, shape ``[out, in]``.
        quantized: Its quantized form, on the same device.

    Returns:
        Cosine, error, radial fraction and sparsity.

    Raises:
        ProbeError: If the shapes differ.
    """
    if tuple(w.shape) != quantized.shape:
        raise ProbeError(
            f"weights of shape {list(w.shape)} do not belong to a quantized form of shape {list(quantized.shape)}; "
            "compare a matrix with its own result"
        )
    sums = torch.zeros(6, dtype=torch.float64, device=w.device)
    for rows in _row_chunks(w):
        x = w[rows].detach().double()
        q = quantized._values(rows, torch.float64)
        d = q - x
        products = (x * x, x * q, q * q, d * d, x * d, q == 0)
        sums += torch.stack([product.sum(dtype=torch.float64) for product in products])
    ww, wq, qq, dd, wd, zeros = sums.tolist()
    return QuantizationError(
        cos2=wq**2 / (ww * qq) if ww * qq else math.nan,
        relative_error=dd / ww if ww else math.nan,
        radial_fraction=wd**2 / (ww * dd) if ww * dd else math.nan,
        sparsity=zeros / w.numel() if w.numel() else math.nan,
    )


# Blocks of units


class _Block(NamedTuple):
    """Rows and columns whose units are solved together, and where their scales go."""

    rows: slice
    columns: slice
    size: int
    """Entries of a unit."""
    scale_rows: slice
    scale_columns: slice
    scale_shape: tuple[int, int]

    def load(self, w: Tensor, workspace: Workspace) -> Tensor:
        """Return the entries as ``[units, size]`` in the working dtype; it may view ``w``, so only read it."""
        part, dtype = w[self.rows, self.columns], _work_dtype(w.dtype)
        if part.dtype != dtype or not part.is_contiguous():
            part = workspace.take("weights", part.shape, dtype).copy_(part)
        return part.view(-1, self.size)


def _blocks(w: Tensor, scheme: Scheme, *, whole: bool) -> Iterator[_Block]:
    # A tensor unit is cut by rows like the others unless it must be seen whole.
    columns = w.shape[1]
    one, everything = slice(0, 1), slice(0, columns)
    if scheme.granularity == "tensor" and whole:
        yield _Block(slice(0, len(w)), everything, w.numel(), one, one, (1, 1))
        return
    for rows in _row_chunks(w):
        count = rows.stop - rows.start
        if scheme.granularity == "tensor":
            yield _Block(rows, everything, columns, one, one, (1, 1))
        elif scheme.group is None:
            yield _Block(rows, everything, columns, rows, one, (count, 1))
        else:
            full, rest = divmod(columns, scheme.group)
            if full:
                yield _Block(rows, slice(0, columns - rest), scheme.group, rows, slice(0, full), (count, full))
            if rest:
                yield _Block(rows, slice(columns - rest, columns), rest, rows, slice(full, full + 1), (count, 1))


def _row_chunks(w: Tensor) -> Iterator[slice]:
    rows, columns = w.shape
    step = max(1, (_CPU_CHUNK if w.device.type == "cpu" else _DEVICE_CHUNK) // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# Solving a block


class _Units(NamedTuple):
    """Codes ``[planes, units, size]`` (floats are truncated on storing) and float64 scales ``[planes, units]``."""

    codes: Tensor
    scale: Tensor


@dataclass(slots=True)
class _Solver:
    scheme: Scheme
    workspace: Workspace
    mean: Tensor | None = None
    """Mean magnitude of the whole tensor, float64, shape ``[1]``, where the tensor is the unit."""

    @property
    def sorts(self) -> bool:
        """Whether a unit must be seen whole."""
        return self.scheme.method in {"optimal", "planes:2"}

    def __call__(self, x: Tensor) -> _Units:
        if self.scheme.method == "planes:2":
            scales = fit_two_planes(x, self.workspace).scales
            return _Units(decide_two_planes(x, scales), scales)
        if self.scheme.method == "optimal":
            threshold, scale = fit_plane(x, self.workspace)
            return _Units(self._beyond(x, threshold, scale), scale[None])
        mean = _sum_magnitudes(x, self.workspace) / x.shape[1] if self.mean is None else self.mean
        if self.scheme.method == "sign":
            return _Units(self._signs(x, mean), mean[None])
        threshold = mean / 2 if self.scheme.method == "absmean" else mean * _TWN_FACTOR
        return _Units(self._beyond(x, _next_above(threshold, x.dtype), mean), mean[None])

    def _signs(self, x: Tensor, scale: Tensor) -> Tensor:
        one = (scale >= SMALLEST_SCALE).to(x.dtype)[:, None]
        # Adding 0 turns -0 into +0, so that every zero counts as positive.
        codes = torch.add(x, 0.0, out=self.workspace.take("scratch", x.shape, x.dtype))
        return torch.copysign(one, codes, out=codes)

    def _beyond(self, x: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
        """Return ±1 where ``|x| >= threshold`` and a magnitude below 1 elsewhere, everywhere if the scale vanishes.

        Exact without a comparison: a correctly rounded quotient is at least 1 if and only if its numerator is at least
        its denominator. Storing as int8 truncates the rest to 0. Two passes in cache; comparisons cost thrice that.
        """
        divisor = torch.where(scale >= SMALLEST_SCALE, threshold.to(x.dtype), math.inf)
        # Never a Python scalar or a 0-d tensor: CUDA divides by those through a reciprocal, which is rounded twice.
        return torch.div(x, divisor[:, None], out=self.workspace.take("scratch", x.shape, x.dtype)).clamp_(-1, 1)


def _next_above(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest number of ``dtype`` strictly above a float64 threshold."""
    rounded = threshold.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return torch.where(rounded.double() > threshold, rounded, above)


def _mean_abs(w: Tensor, workspace: Workspace) -> Tensor:
    total = torch.zeros(1, dtype=torch.float64, device=w.device)
    for rows in _row_chunks(w):
        total += _sum_magnitudes(w[rows].reshape(1, -1), workspace)
    return total / w.numel()


def _sum_magnitudes(x: Tensor, workspace: Workspace) -> Tensor:
    """Return the sum of magnitudes of each row in float64, shape ``[units]``.

    Runs of 256 entries are summed in float32 first where they divide the row: their rounding errors are independent and
    leave 1e-10 of a large sum, where a float64 sum of everything would take half as long again as reading the matrix.
    """
    magnitudes = workspace.take("scratch", x.shape, _work_dtype(x.dtype))
    if x.dtype == magnitudes.dtype:
        torch.abs(x, out=magnitudes)
    else:
        magnitudes.copy_(x).abs_()
    if x.shape[1] % _RUN == 0:
        sums = magnitudes.view(len(x), -1, _RUN).sum(2).sum(1, dtype=torch.float64)
        if bool(torch.isfinite(sums).all()):  # a run of 256 can overflow where the weights do not
            return sums
    return magnitudes.sum(1, dtype=torch.float64)


def _entropy(codes: Tensor) -> float:
    nonzero, balance = int(codes.count_nonzero()), int(codes.sum(dtype=torch.int64))
    counts = (codes.numel() - nonzero, (nonzero + balance) // 2, (nonzero - balance) // 2)
    return -sum(count / codes.numel() * math.log2(count / codes.numel()) for count in counts if count)


# Domains


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_weight(w: Tensor) -> None:
    if w.ndim != 2 or not w.is_floating_point():
        raise ProbeError(
            f"a ternary quantizer takes a floating matrix [out, in], not {w.dtype} of shape {list(w.shape)}; "
            "dequantize or reshape it first"
        )
    if w.is_meta:
        raise ProbeError(f"the weight of shape {list(w.shape)} is on the meta device and has no values; load it first")


def _stored(scale: Tensor, w: Tensor) -> Tensor:
    # A NaN or infinite weight always ends in a non-finite scale, so the weights are searched only then.
    if not bool((scale.abs() <= torch.finfo(torch.float32).max).all()):  # NaN compares false
        _refuse_nonfinite(w)
        raise ProbeError(
            f"a scale of {float(scale.abs().max()):.4g} overflows float32; rescale the weights of shape {list(w.shape)}"
        )
    return torch.where(scale.abs() >= SMALLEST_SCALE, scale, 0).float()


def _refuse_nonfinite(w: Tensor) -> None:
    for rows in _row_chunks(w):
        bad = ~torch.isfinite(w[rows])
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            row += rows.start
            raise ProbeError(
                f"weight [{row}, {column}] is {float(w[row, column])}; quantizers need finite weights, mend the checkpoint"
            )
