"""Check ``weight-scan``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from ternary_probe.gates._check import Limits, Tier, check
from ternary_probe.gates._reported import fault, unread, worst_first
from ternary_probe.records import Finding

if TYPE_CHECKING:
    import torch

    from ternary_probe.gates._evidence import Evidence

_NAME = "weight-scan"
_LARGEST_SQUARE = 1e30  # sums of squares beyond it may have overflowed fp32 on the way, or lost what is small beside


class ScanLimits(Limits):
    """How many dead rows are too many."""

    warn_zero_rows: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of a matrix's rows that are all zero. Our choice: padded vocabulary rows and a few dead neurons "
        "are common, a hundredth of a matrix is not",
    )


@dataclass
class Scan:
    """Figures of one tensor, gathered piece by piece."""

    rows: int = 0
    zero_rows: int = 0
    cos2: float = 0.0
    bad: int = 0
    first_bad: tuple[int, int, float] | None = None

    def take(self, first: int, rows: torch.Tensor) -> None:
        """Add some rows.

        Args:
            first: Position of the first.
            rows: ``[rows, width]``, floating; a norm of fp32 sums over a row (relative error 1e-6) is all that is taken of
                rows of ordinary size, any other row is looked at again in fp64.
        """
        import torch

        wide = rows if rows.dtype == torch.float64 else rows.float()
        absolute = torch.linalg.vector_norm(wide, 1, dim=1).double()
        square = torch.linalg.vector_norm(wide, 2, dim=1).double() ** 2
        odd = ~((square > 1 / _LARGEST_SQUARE) & (square < _LARGEST_SQUARE))  # not finite, zero, huge, tiny
        if bool(odd.any()):
            self._look_again(first, rows, odd.nonzero().flatten(), absolute, square)
        alive = square > 0
        self.rows += rows.shape[0]
        self.zero_rows += int((absolute == 0).sum())
        self.cos2 += float((absolute[alive] ** 2 / (square[alive] * rows.shape[1])).sum())

    def _look_again(
        self, first: int, rows: torch.Tensor, odd: torch.Tensor, absolute: torch.Tensor, square: torch.Tensor
    ) -> None:
        import torch

        exact = rows[odd].double()
        finite = torch.isfinite(exact)
        if not bool(finite.all()):
            where = (~finite).nonzero()[0].tolist()
            self.bad += int((~finite).sum())
            if self.first_bad is None:
                self.first_bad = (first + int(odd[where[0]]), where[1], float(exact[where[0], where[1]]))
            exact = torch.where(finite, exact, 0.0)
        largest = exact.abs().amax(1, keepdim=True)
        scaled = exact / torch.where(largest > 0, largest, 1.0)  # cos² does not depend on the scale
        absolute[odd], square[odd] = scaled.abs().sum(1), scaled.square().sum(1)

    @property
    def mean_cos2(self) -> float | None:
        """Mean over rows that are not zero of cos²(w, sign w)."""
        alive = self.rows - self.zero_rows
        return self.cos2 / alive if alive else None


@check(_NAME, tier=Tier.SCAN, limits=ScanLimits)
def weight_scan(evidence: Evidence, limits: ScanLimits) -> Iterable[Finding]:
    """Every stored weight must be finite, and no matrix may be all zero.

    Every floating tensor is read once, a piece of it in memory at a time. All-zero rows are counted. Rows' cos²(w, sign w) is
    reported beside 2/pi = 0.637, the value of Gaussian rows: it is how much of a row its signs alone keep (THEORY 1.5). Rows
    are those of the last axis as stored; eight-bit floats are read without their scale.

    Yields:
        One finding per tensor with a fault, or one that all is well.
    """
    from ternary_probe.gates._weight_reader import is_float, is_matrix, pieces

    found = evidence.subject.parameters
    if (nothing := unread(_NAME, found)) is not None:
        yield nothing
        return
    faults: list[Finding] = []
    scans: dict[str, Scan] = {}
    for name, entry in found.tensors.items():
        if not is_float(entry.dtype) or math.prod(entry.shape) == 0:
            continue
        scan = Scan()
        for piece in pieces(found, name):
            scan.take(piece.first_row, piece.rows)
        matrix = is_matrix(name, entry.shape)
        if matrix:
            scans[name] = scan
        faults += _faults(name, entry.shape, scan, limits, matrix=matrix)
    yield from worst_first(faults)
    if not scans:
        yield fault(_NAME, "not_applicable", "", "no floating weight matrix is stored")
    elif not faults:
        yield _healthy(scans)


def _healthy(scans: dict[str, Scan]) -> Finding:
    shares = {name: value for name, scan in scans.items() if (value := scan.mean_cos2) is not None}
    lowest = min(shares, key=lambda name: shares[name])
    mean = sum(shares.values()) / len(shares)
    details = {
        "mean_row_cos2": mean,
        "gaussian_row_cos2": 2 / math.pi,
        "lowest": lowest,
        "lowest_row_cos2": shares[lowest],
        "zero_rows": sum(scan.zero_rows for scan in scans.values()),
        "row_cos2": shares,
    }
    message = f"{len(scans)} matrices are finite; rows keep cos² {mean:.3f} under their signs alone (Gaussian 0.637)"
    return fault(_NAME, "pass", "", message, 0.0, 0.0, "faults", **details)


def _faults(name: str, shape: tuple[int, ...], scan: Scan, limits: ScanLimits, *, matrix: bool) -> Iterator[Finding]:
    if scan.first_bad is not None:
        row, column, value = scan.first_bad
        index = _index(shape, row, column)
        message = f"{name}{index} is {value} ({scan.bad} entries are not finite)"
        yield fault(_NAME, "fail", name, message, float(scan.bad), 0.0, "entries", index=index)
    elif matrix and scan.zero_rows == scan.rows:
        message = f"{name} is all zero: its data were never written, or it was pruned away"
        yield fault(_NAME, "fail", name, message, 1.0, limits.warn_zero_rows, "share of rows")
    elif matrix and scan.zero_rows > limits.warn_zero_rows * scan.rows:
        message = f"{scan.zero_rows} of {scan.rows} rows of {name} are all zero"
        share = scan.zero_rows / scan.rows
        yield fault(_NAME, "warn", name, message, share, limits.warn_zero_rows, "share of rows")


def _index(shape: tuple[int, ...], row: int, column: int) -> list[int]:
    """Return the position in the tensor's own axes: for fused experts the first is the expert."""
    index = [column]
    for extent in reversed(shape[:-1]):
        index.insert(0, row % extent)
        row //= extent
    return index
