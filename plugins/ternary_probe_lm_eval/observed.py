"""What a model did on each document of a task, taken from lm-eval's samples, and how two models compare on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from lm_eval.api.metrics import bits_per_byte, mean, weighted_perplexity
from pydantic import BaseModel, ConfigDict, JsonValue

from ternary_probe.records import Status
from ternary_probe.studies.intervals import Interval
from ternary_probe_lm_eval.document import DocumentLogLikelihood
from ternary_probe_lm_eval.paired import Transform, mcnemar, paired_bootstrap, paired_statistic, same
from ternary_probe_lm_eval.records import AnswersChanged, MetricDifference

Aggregate = Callable[[list[Any]], Any]

TOKEN_NLL = "token_nll"
_STDERR = "_stderr"
_TRANSFORMS: dict[str, Transform] = {
    "mean": same,
    "weighted_perplexity": lambda ratio: np.exp(-ratio),
    "bits_per_byte": lambda ratio: -ratio / math.log(2),
    TOKEN_NLL: same,
}


class Observed(BaseModel):
    """One metric's figure on every document.

    Attributes:
        metric: Its name.
        filter: lm-eval's filter.
        aggregation: ``mean``, ``weighted_perplexity``, ``bits_per_byte``, ``token_nll``, or ``other``.
        documents: Document (or window) numbers, ascending.
        items: A number each; for all but ``mean`` and ``other`` a pair of sum and weight; for ``other`` whatever the task
            aggregates. Empty where one is not finite.
        units: What is numbered.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    filter: str
    aggregation: Literal["mean", "weighted_perplexity", "bits_per_byte", "token_nll", "other"]
    documents: tuple[int, ...]
    items: tuple[JsonValue, ...]
    units: Literal["documents", "windows"] = "documents"


def observe(samples: Iterable[Mapping[str, Any]], aggregations: Mapping[str, Aggregate]) -> tuple[Observed, ...]:
    """Take the figures of every document out of a task's samples.

    Args:
        samples: lm-eval's, of one task.
        aggregations: The task's, by metric.

    Returns:
        One entry per metric and filter. A document scored by this plugin's model also gives its NLL per token
        (``token_nll``); a text cut by the task itself gives that alone, by window.
    """
    filters: dict[str, list[Mapping[str, Any]]] = {}
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        filters.setdefault(sample["filter"], []).append(sample)
    found = []
    for name, rows in filters.items():
        scores = [
            row["filtered_resps"][0] for row in rows if isinstance(row["filtered_resps"][0], DocumentLogLikelihood)
        ]
        if len(rows) == 1 and len(scores) == 1 and len(scores[0].windows) > 1:
            pairs = [[window.nll, window.tokens] for window in scores[0].windows]
            found.append(_observed(TOKEN_NLL, name, TOKEN_NLL, range(len(pairs)), pairs, "windows"))
        elif len(scores) == len(rows):
            pairs = [[score.nll, score.tokens] for score in scores]
            found.append(_observed(TOKEN_NLL, name, TOKEN_NLL, [row["doc_id"] for row in rows], pairs))
        for metric in dict.fromkeys(metric for row in rows for metric in row["metrics"]):
            if metric.endswith(_STDERR):
                continue
            having = [row for row in rows if metric in row]
            kind = _kind(aggregations.get(metric, mean))
            found.append(
                _observed(metric, name, kind, [row["doc_id"] for row in having], [row[metric] for row in having])
            )
    return tuple(found)


def compare(
    clean: Observed, perturbed: Observed | None, aggregate: Aggregate | None, *, confidence: float, draws: int
) -> MetricDifference:
    """Compare two models on the same documents.

    Args:
        clean: What the clean model did.
        perturbed: What the perturbed one did; None where it did nothing.
        aggregate: The task's own aggregation, for metrics that are no mean.
        confidence: Two-sided coverage.
        draws: Bootstrap samples.

    Returns:
        The paired difference; with a reason instead where there is none.
    """
    named = {"metric": clean.metric, "filter": clean.filter, "resampled": clean.units, "pairs": len(clean.documents)}
    empty = {"difference": None, "ci_low": None, "ci_high": None}

    def without(status: Status, reason: str) -> MetricDifference:
        return MetricDifference.model_validate({**named, **empty, "status": status, "reason": reason})

    if perturbed is None or perturbed.documents != clean.documents:
        return without("failed", "the perturbed model was not scored on the same documents")
    if not clean.items or not perturbed.items:
        which = "clean" if not clean.items else "perturbed"
        return without("non_finite", f"a figure of the {which} model is not finite")
    answers = None
    if clean.aggregation == "other":
        interval = None if aggregate is None else _statistic(clean, perturbed, aggregate, confidence)
        if interval is None:
            return without("not_applicable", "the task's own aggregation cannot be repeated on resampled documents")
    else:
        x, y, w = _columns(clean, perturbed)
        transform = _TRANSFORMS[clean.aggregation]
        interval = paired_bootstrap(x, y, w, transform=transform, confidence=confidence, draws=draws)
        if clean.aggregation == "mean" and np.isin(np.concatenate([x, y]), (0, 1)).all():
            answers = AnswersChanged.model_validate(mcnemar(x, y)._asdict())
    if not math.isfinite(interval.value):
        return without("non_finite", "the difference overflows")
    known = math.isfinite(interval.low)
    figures = {
        "difference": interval.value,
        "ci_low": interval.low if known else None,
        "ci_high": interval.high if known else None,
        "answers": answers,
        "status": "ok" if known else "inconclusive",
        "reason": "" if known else f"no interval from {len(clean.documents)} {clean.units}",
    }
    return MetricDifference.model_validate({**named, **figures})


def _observed(
    metric: str,
    filter_name: str,
    aggregation: str,
    documents: Iterable[int],
    items: Sequence[Any],
    units: str = "documents",
) -> Observed:
    plain = [_plain(item) for item in items]
    finite = all(map(_finite, plain))
    return Observed.model_validate({
        "metric": metric,
        "filter": filter_name,
        "aggregation": aggregation,
        "documents": tuple(documents),
        "items": tuple(plain) if finite else (),
        "units": units,
    })


def _kind(aggregate: Aggregate) -> str:
    known = {mean: "mean", weighted_perplexity: "weighted_perplexity", bits_per_byte: "bits_per_byte"}
    return known.get(aggregate, "other")


def _plain(item: Any) -> Any:
    """Turn numpy and tuples into what JSON keeps."""
    if isinstance(item, np.generic | np.ndarray):
        return _plain(item.tolist())
    if isinstance(item, list | tuple):
        return [_plain(part) for part in item]
    if isinstance(item, bool) or item is None or isinstance(item, str | int):
        return item
    return float(item) if isinstance(item, float) else str(item)


def _finite(item: Any) -> bool:
    if isinstance(item, list):
        return all(map(_finite, item))
    return item is not None and (not isinstance(item, float) or math.isfinite(item))


def _columns(clean: Observed, perturbed: Observed) -> tuple[Any, Any, Any]:
    x, y = (np.asarray(side.items, dtype=np.float64) for side in (clean, perturbed))
    return (x, y, None) if x.ndim == 1 else (x[:, 0], y[:, 0], x[:, 1])


def _statistic(clean: Observed, perturbed: Observed, aggregate: Aggregate, confidence: float) -> Interval | None:
    def figure(items: list[Any]) -> float:
        return float(aggregate(items))

    sides = [[tuple(i) if isinstance(i, list) else i for i in side.items] for side in (clean, perturbed)]
    try:
        return paired_statistic(sides[0], sides[1], figure, confidence=confidence)
    except Exception:  # a task's aggregation is anyone's code; on resampled documents it may do anything
        return None
