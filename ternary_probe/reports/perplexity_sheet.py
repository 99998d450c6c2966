"""A perplexity in words and rounded figures."""

from __future__ import annotations

import math

from ternary_probe.records import PerplexityRecord
from ternary_probe.reports.rounding import NOT_MEASURED, count, figure, figure_with_interval
from ternary_probe.reports.sheet import (
    Column,
    Sheet,
    Table,
    all_notes,
    environment_table,
    model_fact,
    model_table,
    protocol_fact,
    protocol_table,
    status_fact,
)


def perplexity_sheet(record: PerplexityRecord) -> Sheet:
    """Say what a model's perplexity is, and under which protocol.

    Args:
        record: The measurement.

    Returns:
        The sheet.
    """
    tables = [_figures(record), model_table(record.model)]
    if record.protocol is not None:
        tables.append(protocol_table("Protocol", record.protocol))
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title=f"Perplexity: {record.model.name}",
        headline=(_headline(record),),
        facts=(*status_fact(record), model_fact(record.model), protocol_fact("text", record.protocol)),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def _headline(record: PerplexityRecord) -> str:
    if record.token_perplexity is None:
        return f"Token perplexity cannot be stated: it overflows at an NLL of {figure(record.nll, 5)} nats/token."
    if record.ci_low is None or record.ci_high is None:
        return f"Token perplexity {figure(record.token_perplexity, 4)}, without an interval."
    value, _, interval = figure_with_interval(record.token_perplexity, record.ci_low, record.ci_high).partition(" ")
    return (
        f"Token perplexity {value} (95 % interval {interval} over windows of this text); NLL {figure(record.nll, 6)} "
        "nats/token."
    )


def _figures(record: PerplexityRecord) -> Table:
    low, high = (None if bound is None or bound <= 0 else math.log(bound) for bound in (record.ci_low, record.ci_high))
    bounded = low is not None and high is not None
    nll = figure_with_interval(record.nll, low, high) if bounded else figure(record.nll, 5)
    interval = record.ci_low is not None and record.ci_high is not None
    token = (
        figure_with_interval(record.token_perplexity, record.ci_low, record.ci_high)
        if interval
        else figure(record.token_perplexity, 4)
    )
    rows = (
        ("NLL", nll, "nats per scored token"),
        ("token perplexity", token, "exp(NLL)"),
        ("word perplexity", figure(record.word_perplexity, 4), "exp(NLL sum / words)"),
        ("byte perplexity", figure(record.byte_perplexity, 4), "exp(NLL sum / bytes)"),
    )
    windows = len(record.nll_windows)
    below = [f"{count(record.tokens_scored)} tokens scored" + (f" in {count(windows)} windows." if windows else ".")]
    if interval:
        below.append("[..]: 95 % interval over windows, a claim about text like this one, not about the model's seeds.")
    else:
        below.append("No interval: it takes at least two windows.")
    if any(row[1] == NOT_MEASURED for row in rows):
        below.append(f"{NOT_MEASURED}: too large for a number, or the text's words or bytes are not known.")
    columns = (Column("figure", "left"), Column("value"), Column("unit", "left"))
    return Table("Perplexity", columns, rows, tuple(below))
