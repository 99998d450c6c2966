"""A leverage study in words and rounded figures (what each figure means: THEORY 1.5)."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from string import ascii_lowercase
from typing import NamedTuple

from ternary_probe.records import Curve, Leverage, LeverageRecord, Mean, Published, Response
from ternary_probe.reports.damage import Cell, confidence_of, damage_cells
from ternary_probe.reports.rounding import NOT_MEASURED, count, figure, figure_plus_minus, figure_with_interval, percent
from ternary_probe.reports.sheet import (
    Column,
    Fact,
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

RESPONSES: dict[Response, str] = {"nll": "ΔNLL", "kl": "KL"}
PAPER = "arXiv 2605.18933, TinyLlama"

_MATCHINGS = {
    "count": "as many flips in every arm",
    "rate": "the same share of every pool flipped",
    "energy": "arms rescaled to the random arm's norm: no pure flips",
}
_COMPARED_WITH = {
    "count": "flipping as many entries in other columns",
    "rate": "flipping the same share of the entries in other columns",
    "energy": "flips in other columns, both rescaled to one norm",
}
_SELECTIONS = {"energy": "mean squared input", "mean_abs": "mean absolute input"}


class Pair(NamedTuple):
    """The two responses' leverage for one rate, matching and pair of arms."""

    rate: float
    matching: str
    numerator: str
    denominator: str
    nll: Leverage | None
    kl: Leverage | None

    @property
    def entries(self) -> tuple[Leverage, ...]:
        """Those of the two that the record has."""
        return tuple(entry for entry in (self.nll, self.kl) if entry is not None)

    @property
    def measured(self) -> bool:
        """Whether every response the record has is conclusive."""
        return bool(self.entries) and all(entry.status == "ok" for entry in self.entries)


def leverage_sheet(record: LeverageRecord) -> Sheet:
    """Say what a leverage study found.

    Args:
        record: The study.

    Returns:
        The sheet: headline, facts, leverage, damage, curves, amplitude, protocol, environment, notes.
    """
    pairs = leverage_pairs(record)
    tables = [_leverage_table(record, pairs), _damage_table(record)]
    if record.curves:
        tables.append(_curve_table(record))
    tables.append(_bootstrap_table(pairs))
    if record.amplitude:
        tables.append(_amplitude_table(record))
    tables.append(model_table(record.model))
    if record.protocol is not None:
        tables.append(protocol_table("Protocol of the scored text", record.protocol))
    if record.calibration is not None:
        tables.append(protocol_table("Protocol of the calibration text", record.calibration))
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title=f"Leverage of outlier columns under sign flips: {record.model.name}",
        headline=_headline(record, pairs),
        facts=_facts(record),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def leverage_pairs(record: LeverageRecord) -> tuple[Pair, ...]:
    """Put the two responses of every leverage figure side by side.

    Args:
        record: The study.

    Returns:
        Pairs by rising rate, otherwise in the record's order.
    """
    found: dict[tuple[float, str, str, str], dict[str, Leverage]] = defaultdict(dict)
    for entry in record.leverage:
        found[entry.rate, entry.matching, entry.numerator, entry.denominator][entry.response] = entry
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return tuple(Pair(*key, entries.get("nll"), entries.get("kl")) for key, entries in ordered)


def _headline(record: LeverageRecord, pairs: tuple[Pair, ...]) -> tuple[str, ...]:
    candidates = [p for p in pairs if (p.numerator, p.denominator) == ("outlier", "other")]
    if not candidates:
        return ("This study compares no outlier columns with other columns.",)
    matching = "count" if any(p.matching == "count" for p in candidates) else candidates[0].matching
    candidates = [p for p in candidates if p.matching == matching]
    measured = [p for p in candidates if p.measured]
    if not measured:
        measured = [p for p in candidates if any(entry.status == "ok" for entry in p.entries)]
    if not measured:
        reasons = "; ".join(dict.fromkeys(entry.reason for p in candidates for entry in p.entries if entry.reason))
        return (f"No leverage can be stated: {reasons or 'no figure of this study is conclusive'}.",)
    linear = [p for p in measured if _is_linear(record, p)]
    pair = max(linear or measured, key=lambda p: p.rate)
    conclusive = [entry for entry in pair.entries if entry.status == "ok"]
    first, *rest = conclusive
    other = _COMPARED_WITH.get(pair.matching, "flips in other columns")
    sentence = (
        f"Flipping the sign of {percent(pair.rate)} of the entries in outlier columns hurts "
        f"{_spoken(first)} as much as {other}, measured in {RESPONSES[first.response]}"
    )
    sentence += "".join(f", and {_spoken(entry)} measured in {RESPONSES[entry.response]}" for entry in rest)
    sentences = [f"{sentence}."]
    for entry in pair.entries:
        if entry.status != "ok":
            sentences.append(
                f"In {RESPONSES[entry.response]} it is {entry.status.replace('_', ' ')}: {_reason(entry)}."
            )
    doubtful = [RESPONSES[e.response] for e in pair.entries if e.status == "ok" and _covers_one(e)]
    if doubtful:
        sentences.append(f"The interval in {' and '.join(doubtful)} covers 1: no difference is shown there.")
    if linear and len(linear) < len(measured):
        sentences.append(f"{percent(pair.rate)} is the largest conclusive rate at which both arms are still linear.")
    return tuple(sentences)


def _spoken(entry: Leverage) -> str:
    shown = figure_with_interval(entry.ratio, entry.ci_low, entry.ci_high)
    value, _, interval = shown.partition(" [")
    if not interval or shown.startswith("("):
        return f"{shown}×"
    bounds = interval.removesuffix("]").replace(", ", " to ")
    return f"{value}× ({percent(entry.confidence)} interval {bounds})"


def _reason(entry: Leverage) -> str:
    return entry.reason.rstrip(".") or "no reason recorded"


def _covers_one(entry: Leverage) -> bool:
    return entry.ci_low is not None and entry.ci_high is not None and entry.ci_low <= 1 <= entry.ci_high


def _is_linear(record: LeverageRecord, pair: Pair) -> bool:
    curves = [c for c in record.curves if c.matching == pair.matching and c.arm in {pair.numerator, pair.denominator}]
    return bool(curves) and all(c.linear_up_to is not None and c.linear_up_to >= pair.rate for c in curves)


def _facts(record: LeverageRecord) -> tuple[Fact, ...]:
    baseline, floor = record.baseline, record.noise_floor
    seeds = len({arm.seed for arm in record.arms})
    columns = sum(len(columns) for columns in record.outlier_columns.values())
    selected = (
        f"top {percent(record.fraction)} of each matrix's inputs by {_SELECTIONS[record.selected_by]}: "
        f"{count(columns)} columns of {count(len(record.outlier_columns))} matrices"
    )
    facts = [
        *status_fact(record),
        model_fact(record.model),
        protocol_fact("text", record.protocol),
        protocol_fact("calibration", record.calibration),
        Fact("baseline", f"NLL {figure(baseline.nll, 5)} nats/token, perplexity {figure(baseline.perplexity, 4)}"),
        Fact("noise floor", f"ΔNLL {figure(floor.nll, 2)}, KL {figure(floor.kl, 2)} nats/token"),
        Fact("outlier columns", selected),
    ]
    if record.targets:
        facts.append(Fact("targets", f"only {count(len(record.targets))} matrices: {_some(record.targets)}"))
    matchings = list(dict.fromkeys(arm.matching for arm in record.arms))
    described = "; ".join(f"{m}-matched ({_MATCHINGS[m]})" for m in matchings)
    facts.append(Fact("arms", f"{seeds} seeds; {described}" if described else f"{seeds} seeds"))
    return tuple(facts)


def _some(names: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


# ---- tables ---------------------------------------------------------------------------------------------------------


def _leverage_table(record: LeverageRecord, pairs: tuple[Pair, ...]) -> Table:
    several = len({p.matching for p in pairs}) > 1
    rows: list[tuple[str, ...]] = []
    marks = _marks(pairs)
    published = {p.rate: p for p in record.published}
    for index, pair in enumerate(pairs):
        label = f"{_arm(pair.numerator)} ÷ {_arm(pair.denominator)}" + (f", {pair.matching}" if several else "")
        ratios = [_ratio(entry) for entry in (pair.nll, pair.kl)]
        rows.append((percent(pair.rate), label, *ratios, _predicted(record, pair), _pair_status(pair, marks)))
        if pair.rate in published and (index + 1 == len(pairs) or pairs[index + 1].rate != pair.rate):
            rows.append(_published_ratio(published.pop(pair.rate)))
    rows += [_published_ratio(p) for p in published.values()]
    level = percent(confidence_of(record))
    below = [f"Ratio of mean responses over seeds [{level} interval]. Figures in round brackets are not conclusive."]
    if any(row[4] != NOT_MEASURED for row in rows):
        below.append(
            "Predicted: from input amplitudes alone, n·E[α²] of the outlier columns against all, E_out[α²]/E_oth[α²] "
            "against other; in brackets the same weighted by the columns' weight energy. Predictions, not measurements."
        )
    below += [f"[{mark}] {reason}" for reason, mark in marks.items()]
    below += _published_notes(record.published)
    columns = (
        Column("rate"),
        Column("damage of", "left"),
        Column("leverage\n(ΔNLL)"),
        Column("leverage\n(KL)"),
        Column("predicted"),
        Column("status", "left"),
    )
    return Table("Leverage", columns, tuple(rows), tuple(below), grouped=True)


def _ratio(entry: Leverage | None) -> str:
    if entry is None or (entry.ratio is None and entry.ci_low is None and entry.ci_high is None):
        return NOT_MEASURED
    if entry.status == "ok":
        return figure_with_interval(entry.ratio, entry.ci_low, entry.ci_high)
    bounded = entry.ci_low is not None or entry.ci_high is not None
    return f"({figure_with_interval(entry.ratio, entry.ci_low, entry.ci_high) if bounded else figure(entry.ratio)})"


def _predicted(record: LeverageRecord, pair: Pair) -> str:
    if pair.matching != "count" or pair.numerator != "outlier":
        return NOT_MEASURED
    prediction = record.prediction
    if pair.denominator == "all":
        return f"{figure(prediction.n_alpha2_outlier)} ({figure(prediction.weighted_outlier_all)})"
    if pair.denominator == "other":
        return f"{figure(prediction.ratio_outlier_other)} ({figure(prediction.weighted_outlier_other)})"
    return NOT_MEASURED


def _marks(pairs: tuple[Pair, ...]) -> dict[str, str]:
    """Letter every reason once, in order, so that a table of many rows needs one line for each."""
    reasons = dict.fromkeys(_reason(entry) for pair in pairs for entry in pair.entries if entry.status != "ok")
    return {reason: ascii_lowercase[i] if i < 26 else str(i) for i, reason in enumerate(reasons)}


def _pair_status(pair: Pair, marks: dict[str, str]) -> str:
    statuses = {
        RESPONSES[e.response]: e.status if e.status == "ok" else f"{e.status.replace('_', ' ')} [{marks[_reason(e)]}]"
        for e in pair.entries
    }
    if len(set(statuses.values())) == 1:
        return next(iter(statuses.values()))
    return "\n".join(f"{name}: {status}" for name, status in statuses.items())


def _published_ratio(published: Published) -> tuple[str, ...]:
    row = (percent(published.rate), "paper’s ÷ other", figure(published.ratio), NOT_MEASURED, NOT_MEASURED)
    return (*row, "published")


def _published_notes(published: tuple[Published, ...]) -> list[str]:
    if not published:
        return []
    sources = "; ".join(dict.fromkeys(p.source for p in published))
    return [f"paper’s: published figures of another model, not measured here ({sources}); no KL, no interval."]


def _damage_table(record: LeverageRecord) -> Table:
    cells = damage_cells(record)
    several = len({c.matching for c in cells}) > 1
    rows: list[tuple[str, ...]] = []
    published = {p.rate: p for p in record.published}
    for index, cell in enumerate(cells):
        rows.append(_damage_row(cell, several=several))
        if cell.rate in published and (index + 1 == len(cells) or cells[index + 1].rate != cell.rate):
            rows += _published_damage(published.pop(cell.rate))
    for left in published.values():
        rows += _published_damage(left)
    seeds = sorted({m.seeds for m in record.means})
    over = f" over {seeds[0]} seeds" if len(seeds) == 1 else " over the seeds"
    below = [
        f"Mean{over} ± {percent(confidence_of(record))} interval (Student's t).",
        "ΔNLL is paired, on the same tokens; KL is KL(clean ‖ perturbed).",
    ]
    if any(m.mean is not None and m.ci_low is None for m in record.means):
        below.append("No interval: it takes two seeds or more.")
    zeros = max((arm.zeros for arm in record.arms), default=0)
    if zeros:
        below.append(
            f"Up to {count(zeros)} of an arm's flips hit entries that are exactly 0, where a flip does nothing."
        )
    failed = [a for a in record.arms if a.status != "ok"]
    if failed:
        where = "; ".join(
            f"{percent(a.rate)} {_arm(a.arm)} seed {a.seed}: {a.status.replace('_', ' ')}" for a in failed
        )
        below.append(f"Not measured: {where}.")
    below += _published_notes(record.published)
    columns = (
        Column("rate"),
        Column("arm", "left"),
        Column("entries\nchanged" if any("magnitude" in c.arm for c in cells) else "flips"),
        Column("ΔNLL\n(nats/token)"),
        Column("ΔPPL"),
        Column("KL\n(nats/token)"),
        Column("status", "left"),
    )
    return Table("Damage", columns, tuple(rows), tuple(below), grouped=True)


def _damage_row(cell: Cell, *, several: bool) -> tuple[str, ...]:
    flips = NOT_MEASURED if not cell.flips else "–".join(count(n) for n in sorted({cell.flips[0], cell.flips[-1]}))
    label = _arm(cell.arm) + (f", {cell.matching}" if several else "")
    means = {"nll": cell.nll, "kl": cell.kl}
    nll, kl = (NOT_MEASURED if m is None else figure_plus_minus(m.mean, m.ci_low, m.ci_high) for m in means.values())
    ppl = figure_plus_minus(*cell.delta_ppl)
    return (percent(cell.rate), label, flips, nll, ppl, kl, _mean_status(cell.nll, cell.kl))


def _mean_status(nll: Mean | None, kl: Mean | None) -> str:
    statuses = {}
    for name, mean in (("ΔNLL", nll), ("KL", kl)):
        if mean is None:
            statuses[name] = "not measured"
        elif mean.status != "ok":
            statuses[name] = mean.status.replace("_", " ")
        else:
            statuses[name] = "ok" if mean.above_floor else "below floor"
    if len(set(statuses.values())) == 1:
        return statuses["ΔNLL"]
    return "\n".join(f"{name} {status}" for name, status in statuses.items() if status != "ok")


def _published_damage(published: Published) -> list[tuple[str, ...]]:
    flips = NOT_MEASURED if published.flips is None else count(published.flips)
    return [
        (percent(published.rate), f"paper’s {arm}", flips, figure(delta), NOT_MEASURED, NOT_MEASURED, "published")
        for arm, delta in (("outlier", published.delta_nll_outlier), ("other", published.delta_nll_other))
    ]


def _curve_table(record: LeverageRecord) -> Table:
    several = len({c.matching for c in record.curves}) > 1
    grouped: dict[tuple[str, str], dict[str, Curve]] = defaultdict(dict)
    for curve in record.curves:
        grouped[curve.matching, curve.arm][curve.response] = curve
    rows = []
    notes: dict[str, list[str]] = defaultdict(list)
    for (matching, arm), curves in grouped.items():
        label = _arm(arm) + (f", {matching}" if several else "")
        cells = [text for response in RESPONSES for text in _curve_cells(curves.get(response))]
        rows.append((label, *cells))
        for response, name in RESPONSES.items():
            if response in curves and curves[response].note:
                notes[curves[response].note].append(f"{label} ({name})")
    below = (
        "Slope of log response against log rate ± standard error; 1 where damage is proportional to flips.",
        "Linear up to: the largest rate that cannot be told from proportional.",
        *(f"{'; '.join(where)}: {note}" for note, where in notes.items()),
    )
    columns = (
        Column("arm", "left"),
        Column("slope\n(ΔNLL)"),
        Column("linear up to\n(ΔNLL)"),
        Column("slope\n(KL)"),
        Column("linear up to\n(KL)"),
    )
    return Table("Response curves", columns, tuple(rows), below)


def _curve_cells(curve: Curve | None) -> tuple[str, str]:
    if curve is None:
        return NOT_MEASURED, NOT_MEASURED
    slope, error = curve.slope, curve.slope_se
    shown = figure(slope) if slope is None or error is None else figure_plus_minus(slope, slope - error, slope + error)
    return shown, NOT_MEASURED if curve.linear_up_to is None else percent(curve.linear_up_to)


def _bootstrap_table(pairs: tuple[Pair, ...]) -> Table:
    rows = [
        (
            percent(pair.rate),
            f"{_arm(pair.numerator)} ÷ {_arm(pair.denominator)}",
            pair.matching,
            RESPONSES[entry.response],
            figure_with_interval(entry.ratio, entry.bootstrap_low, entry.bootstrap_high),
            entry.status.replace("_", " "),
        )
        for pair in pairs
        for entry in pair.entries
    ]
    columns = (
        Column("rate"),
        Column("damage of", "left"),
        Column("matching", "left"),
        Column("response", "left"),
        Column("leverage [bootstrap interval]"),
        Column("status", "left"),
    )
    below = ("Percentile bootstrap over seeds, beside the t interval: with few seeds it is too narrow.",)
    return Table("Leverage with bootstrap intervals", columns, tuple(rows), below, detail=True)


def _amplitude_table(record: LeverageRecord) -> Table:
    roles = defaultdict(list)
    for amplitude in record.amplitude:
        roles[amplitude.role].append(amplitude)
    rows = []
    for role, members in roles.items():
        outlier = [a.n_alpha2_outlier for a in members]
        rows.append((
            role,
            count(len(members)),
            figure(fmean(outlier)),
            f"{figure(min(outlier))} to {figure(max(outlier))}",
            figure(fmean(a.n_alpha2_other for a in members)),
            percent(round(fmean(a.energy_share for a in members), 3)),
            figure(fmean(a.weighted_outlier for a in members)),
        ))
    columns = (
        Column("role", "left"),
        Column("matrices"),
        Column("n·E[α²] outlier, mean"),
        Column("lowest to highest"),
        Column("n·E[α²] other, mean"),
        Column("energy share of outliers"),
        Column("energy-weighted outlier, mean"),
    )
    below = ("α_j = √(E[x_j²] / E‖x‖²), the amplitude of input j; n·E[α²] is 1 where no column stands out.",)
    return Table("Input amplitude by role", columns, tuple(rows), below, detail=True)


def _arm(name: str) -> str:
    return name.replace("_", " ")
