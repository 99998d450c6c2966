"""Proof that the matrices seen to read a norm are all that read it: halve a gain, double the columns, the logits stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ternary_probe.anatomy._matrix import WeightMatrix
from ternary_probe.anatomy._norms import NormSite

_EXACT = 1e-6  # relative difference of logits that is nothing but rounding, in a run that should be exact
_SMALL = 0.01  # of the uncompensated effect, where the run cannot be exact


def prove_readers(
    norms: Iterable[NormSite], matrices: Mapping[str, WeightMatrix], forward: Callable[[], Tensor]
) -> None:
    """Set `readers_complete` and `readers_note` of every norm; the model is left bit for bit as it was.

    One coordinate of every norm is given a power of two as its gain in a reference run, and half of it, with the
    readers' columns doubled, in a test run. Both are exact in every dtype, so the logits must agree. All norms are
    tested together; only if that fails is the culprit searched by halving.

    Args:
        norms: The norms.
        matrices: Weight matrices by name.
        forward: Returns the model's logits on the probe's tokens, float.
    """
    testable = []
    for site in norms:
        site.readers_complete, site.readers_note = False, _obstacle(site, matrices) or ""
        if not site.readers_note:
            testable.append(site)
    if not testable:
        return

    def logits(halved: Sequence[NormSite], *, compensate: bool) -> Tensor:
        with _edited(testable, matrices, {site.name for site in halved}, compensate=compensate):
            return forward()

    reference = logits([], compensate=False)
    exact = _EXACT * float(reference.abs().max())
    pending: list[Sequence[NormSite]] = [testable]
    while pending:
        group = pending.pop()
        difference = float((logits(group, compensate=True) - reference).abs().max())
        alone = len(group) == 1
        if difference > exact and not alone:
            pending += [group[: len(group) // 2], group[len(group) // 2 :]]
            continue
        effect = float((logits(group, compensate=False) - reference).abs().max()) if alone or group is testable else 1.0
        for site in group:
            if not effect > 0:  # also where it is not a number
                site.readers_note = "its gain has no effect on the logits that could be measured"
            elif difference <= exact or difference <= _SMALL * effect:
                site.readers_complete, site.readers_note = True, "gain halved and columns doubled: logits unchanged"
            else:
                site.readers_note = (
                    "something else reads its output: with the columns compensated the logits still move"
                )


def _obstacle(site: NormSite, matrices: Mapping[str, WeightMatrix]) -> str | None:
    if site.law.gain.parameter is None:
        return "it has no gain parameter"
    if site.law.bias is not None and site.law.bias.parameter is None:
        return "its bias is a constant"
    if not site.readers:
        return "no matrix reads its output directly"
    if site.position == "post":
        return "its output is the residual stream itself"
    tied = next((name for name in site.readers if matrices[name].also_lookup), None)
    if tied is not None:
        return f"{tied} is also the embedding table, its columns cannot be scaled alone"
    if not bool(site.gain.any()):
        return "its gain is zero"
    width = site.law.width
    odd = next((name for name in site.readers if matrices[name].in_features != width), None)
    return None if odd is None else f"{odd} reads it in another shape"


@contextmanager
def _edited(
    sites: Sequence[NormSite], matrices: Mapping[str, WeightMatrix], halved: set[str], *, compensate: bool
) -> Iterator[None]:
    """Round one coordinate's gain of every site to a power of two, and halve it for those named; restore every bit."""
    saved = [(p, p.detach().clone()) for site in sites for p in site.parameters().values()]
    columns: list[tuple[WeightMatrix, Tensor, Tensor]] = []
    try:
        for site in sites:
            column = site.gain.abs().argmax().reshape(1)
            site.set_gain(column, 2.0 ** round(math.log2(float(site.gain[column].abs()))))
            if site.name not in halved:
                continue
            site.scale_gain(column, 0.5)
            for name in site.readers if compensate else ():
                values = matrices[name].read_columns(column)
                columns.append((matrices[name], column, values))
                matrices[name].write_columns(column, values * 2)
        yield
    finally:
        for matrix, column, values in reversed(columns):
            matrix.write_columns(column, values)
        with torch.no_grad():
            for parameter, values in saved:
                parameter.copy_(values)
