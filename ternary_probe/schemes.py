"""Names of ternary schemes, ``scheme[+ls][@row|@tensor|@g128]``, parsed and described.

No torch here, so that a command line can check a name before anything is loaded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ternary_probe.errors import ProbeError

Method = Literal["sign", "absmean", "twn", "optimal", "planes:2"]
Granularity = Literal["tensor", "row", "group"]

METHODS: tuple[Method, ...] = ("sign", "absmean", "twn", "optimal", "planes:2")
DEFAULT_GROUP = 128

_DEFAULT_GRANULARITY: dict[Method, Granularity] = {
    "sign": "row",
    "absmean": "tensor",
    "twn": "tensor",
    "optimal": "row",
    "planes:2": "group",
}
_ALIASES = {"absmean_row": "absmean@row", "absmean_group": f"absmean@g{DEFAULT_GROUP}"}
_GRAMMAR = re.compile(r"(?P<method>[a-z]+(?::\d+)?)(?P<refit>\+ls)?(?:@(?P<where>tensor|row|g[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantizer and the set of entries that share one scale.

    Methods: ``sign`` (codes ±1, scale mean|w|; arXiv 2605.18933, Theorem 4), ``absmean`` (BitNet b1.58, arXiv
        2402.17764), ``twn`` (threshold
    0.7 mean|w|, least-squares scale; arXiv 1605.04711), ``optimal`` (the least-squares ternary, exact), ``planes:2`` (a
    sum of two ternary planes).
    """

    method: Method
    granularity: Granularity
    group: int | None = None
    """Entries of a row that share a scale, for granularity ``group`` only; the last of a row may be shorter."""
    refit: bool = False
    """Replace the method's own scale by the least-squares scale of its codes; never set where it is that already."""

    def __post_init__(self) -> None:
        """Check the combination.

        Raises:
            ProbeError: If the method is unknown, or group and granularity contradict each other.
        """
        if self.method not in METHODS:
            raise ProbeError(f"unknown ternary method '{self.method}'; use one of {', '.join(METHODS)}")
        if (self.granularity == "group") != (self.group is not None) or (self.group is not None and self.group < 1):
            raise ProbeError(
                f"granularity '{self.granularity}' with group size {self.group} is no scheme; "
                "give a size >= 1 for 'group' only"
            )
        if self.refit and self.method != "absmean":
            raise ProbeError(f"'{self.method}' already has the least-squares scale; drop the refit")

    @property
    def planes(self) -> int:
        """Number of ternary planes whose sum is the quantized weight."""
        return 2 if self.method == "planes:2" else 1

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of one plane's scales for a matrix.

        Args:
            rows: Output features.
            columns: Input features.

        Returns:
            ``(1, 1)``, ``(rows, 1)`` or ``(rows, groups)``.
        """
        if self.granularity == "tensor":
            return 1, 1
        return rows, 1 if self.group is None else math.ceil(columns / self.group)

    def describe(self) -> str:
        """Return the scheme's full name; `parse` is the inverse.

        Returns:
            E.g. ``absmean+ls@g128``; the granularity is always spelled out.
        """
        where = f"g{self.group}" if self.group is not None else self.granularity
        return f"{self.method}{'+ls' if self.refit else ''}@{where}"

    def __str__(self) -> str:
        return self.describe()


def parse(text: str, *, group: int | None = None) -> Scheme:
    """Return the scheme a name stands for.

    Defaults without ``@``: ``sign`` and ``optimal`` per row, ``absmean`` and ``twn`` per tensor, ``planes:2`` in groups
    of 128. ``absmean_row`` and ``absmean_group`` are accepted for ``absmean@row`` and ``absmean@g128``. ``+ls`` changes
    nothing where the scale is the least-squares one already.

    Args:
        text: ``scheme[+ls][@row|@tensor|@g<size>]``.
        group: Group size to use where the name gives no granularity.

    Returns:
        The scheme.

    Raises:
        ProbeError: If the name does not follow the grammar, or names a granularity besides ``group``.
    """
    name, plus, rest = text.partition("+")
    named = _ALIASES.get(name.partition("@")[0])
    if named is not None:
        if "@" in text:
            raise ProbeError(
                f"scheme '{text}' names its granularity twice; write absmean@row or absmean@g{DEFAULT_GROUP}"
            )
        base, _, where = named.partition("@")
        text = f"{base}{plus}{rest}@{where}"
    match = _GRAMMAR.fullmatch(text)
    method = next((m for m in METHODS if match and m == match["method"]), None)
    if match is None or method is None:
        raise ProbeError(
            f"no ternary scheme '{text}'; write METHOD[+ls][@row|@tensor|@g128] with METHOD one of {', '.join(METHODS)}"
        )
    where = match["where"]
    if where and group is not None:
        raise ProbeError(f"scheme '{text}' already says how scales are shared; drop the group size {group}")
    granularity: Granularity = _DEFAULT_GRANULARITY[method]
    if where:
        granularity = "tensor" if where == "tensor" else "row" if where == "row" else "group"
        group = int(where[1:]) if granularity == "group" else None
    elif group is not None:
        granularity = "group"
    elif granularity == "group":
        group = DEFAULT_GROUP
    return Scheme(method, granularity, group, refit=bool(match["refit"]) and method == "absmean")
