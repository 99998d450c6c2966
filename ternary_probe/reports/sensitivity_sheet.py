"""A sensitivity study in words and rounded figures: the bulk, the super weights, what is worst, what to keep."""

from __future__ import annotations

import math

from ternary_probe.reports.rounding import (
    NOT_MEASURED,
    count,
    figure,
    figure_plus_minus,
    figure_with_interval,
    percent,
)
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
from ternary_probe.sensitivity_record import (
    BulkResponse,
    ColumnSensitivity,
    MatrixSensitivity,
    PlanStep,
    SensitivityRecord,
    SingleWeight,
    Unit,
)

_ROWS = 12  # of a long list shown on one screen; the record has them all


def sensitivity_sheet(record: SensitivityRecord) -> Sheet:
    """Say which blocks, matrices, columns and single weights a model depends on.

    Args:
        record: The study.

    Returns:
        The sheet: bulk, super weights, units, matrices by role, columns, agreement of the screens, plan.
    """
    tables = []
    if record.bulk:
        tables.append(_bulk_table(record))
    if record.super_weights:
        tables.append(_single_table(record))
    if record.units:
        tables.append(_unit_table(record))
    tables.append(_role_table(record))
    if record.columns:
        tables.append(_column_table(record))
    if record.agreement:
        tables.append(_agreement_table(record))
    if record.plan is not None:
        tables.append(_plan_table(record))
    tables += [_all_units_table(record)] if len(record.units) > _ROWS else []
    tables.append(model_table(record.model))
    if record.protocol is not None:
        tables.append(protocol_table("Protocol of the scored text", record.protocol))
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title=f"Sensitivity: {record.model.name}",
        headline=_headline(record),
        facts=_facts(record),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def _headline(record: SensitivityRecord) -> tuple[str, ...]:
    found = [s for s in record.super_weights if s.super_weight]
    sentences = []
    if not record.super_weights:
        sentences.append("No single weight was measured alone.")
    elif not found:
        sentences.append(
            f"No super weight: none of the {count(len(record.super_weights))} weights measured alone moves the NLL by "
            f"{figure(record.super_bound)} nats/token."
        )
    else:
        worst = found[0]
        sentences.append(
            f"{count(len(found))} super weight{'s' if len(found) > 1 else ''}: the worst, {_name(worst)}, costs "
            f"{_nats(worst.flip_delta_nll)} when its sign flips and {_nats(worst.removal_delta_nll)} when it is removed."
        )
    ranked = _ranked(record)
    broken = [unit.unit for unit in ranked if unit.status == "non_finite"]
    if broken:
        sentences.append(f"Random flips of {percent(record.units[0].rate)} break the model in {', '.join(broken[:3])}.")
    elif ranked and ranked[0].measured is not None:
        first = ranked[0]
        sentences.append(
            f"Random flips hurt most in {first.unit}: KL {_interval(first)} at {percent(first.rate)}, "
            "super weights spared."
        )
    if record.plan is not None:
        sentences.append(_plan_sentence(record))
    return tuple(sentences)


def _nats(value: float | None) -> str:
    return "the model its finite output" if value is None else f"{figure(value)} nats/token"


def _plan_sentence(record: SensitivityRecord) -> str:
    plan = record.plan
    if plan is None:
        return ""
    return (
        f"Keeping {count(plan.plan.kept)} matrices ({percent(round(plan.plan.kept_entries, 3))} of the entries) as they are "
        f"under {plan.scheme} gives ΔNLL {_step_nll(plan.plan)} instead of {_step_nll(plan.everything)}."
    )


def _facts(record: SensitivityRecord) -> tuple[Fact, ...]:
    base = record.baseline
    spread = "" if record.prediction_se is None else f", standard error {percent(round(record.prediction_se, 3))}"
    facts = [
        *status_fact(record),
        model_fact(record.model),
        protocol_fact("text", record.protocol),
        protocol_fact("calibration", record.calibration),
        Fact("baseline", f"NLL {figure(base.nll, 5)} nats/token, perplexity {figure(base.perplexity, 4)}"),
        Fact("prediction", f"one Fisher pass, {count(record.draws)} label draws{spread}"),
    ]
    if record.leverage_predicted is not None:
        facts.append(
            Fact(
                "predicted leverage", f"{figure(record.leverage_predicted)} (bulk, outlier ÷ other columns, per entry)"
            )
        )
    if record.null_control is not None:
        facts.append(Fact("null control", f"{figure(record.null_control)} (a re-run with nothing changed; exactly 0)"))
    if record.additivity is not None:
        sum_, ratio = record.additivity, record.additivity.ratio
        facts.append(
            Fact(
                "additivity",
                f"parts add up to KL {figure(sum_.sum_of_parts)}, all at once {figure(sum_.all_at_once)} "
                f"(ratio {figure(ratio)}) at {percent(sum_.rate)}",
            )
        )
    if record.worst_case is not None:
        worst = record.worst_case
        facts.append(
            Fact(
                "worst case",
                f"{count(worst.flips)} flips found greedily: {_reached(worst.delta_nll[-1])}; as many random ones: "
                f"{figure_plus_minus(worst.random_delta_nll, worst.random_low, worst.random_high)}",
            )
        )
    return tuple(facts)


def _reached(value: float | None) -> str:
    return "they break the model" if value is None else f"ΔNLL {figure(value)}"


# Bulk


def _bulk_table(record: SensitivityRecord) -> Table:
    columns = (
        Column("columns", "left"),
        Column("rate"),
        Column("KL predicted"),
        Column("KL sampled\n(nats/token)"),
        Column("predicted ÷\nsampled"),
        Column("ΔNLL\n(nats/token)"),
        Column("linear", "left"),
    )
    below = (
        "Random flips with the super-weight candidates spared. Predicted: slope times rate, ± its standard error over label "
        "draws. Sampled: mean ± 95 % interval over seeds. Linear: prediction within 15 % of the sample or in its interval."
    )
    return Table("Bulk response", columns, tuple(_bulk_row(row) for row in record.bulk), (below,), grouped=True)


def _bulk_row(row: BulkResponse) -> tuple[str, ...]:
    error = row.predicted_se
    predicted = (
        figure(row.predicted)
        if error is None
        else figure_plus_minus(row.predicted, row.predicted - error, row.predicted + error)
    )
    linear = NOT_MEASURED if row.linear is None else ("yes" if row.linear else "no")
    return (
        row.pool,
        percent(row.rate),
        predicted,
        figure_plus_minus(row.kl, row.kl_low, row.kl_high),
        figure(row.ratio),
        figure_plus_minus(row.delta_nll, row.nll_low, row.nll_high),
        linear if row.status == "ok" else row.status.replace("_", " "),
    )


# Single weights


def _single_table(record: SensitivityRecord) -> Table:
    columns = (
        Column("weight [row, column]", "left"),
        Column("value"),
        Column("named by", "left"),
        Column("KL of its flip\npredicted"),
        Column("KL of its flip\nmeasured"),
        Column("ΔNLL flipped"),
        Column("ΔNLL removed"),
        Column("super weight", "left"),
    )
    rows = tuple(_single_row(row) for row in record.super_weights[:_ROWS])
    explained = (
        "Nats/token; ± 95 % interval over windows, paired. Super weight: its flip or removal moves the NLL by "
        f"{figure(record.super_bound)} or more. Named by the Fisher pass (above {figure(record.bound)} nats a flip) or as "
        "the link between an input and an output spike."
    )
    below = [explained]
    if len(record.super_weights) > _ROWS:
        below.append(f"{count(len(record.super_weights) - _ROWS)} more in the record.")
    return Table("Single weights, measured alone", columns, rows, tuple(below))


def _single_row(row: SingleWeight) -> tuple[str, ...]:
    return (
        _name(row),
        figure(row.value),
        ", ".join(row.nominated_by),
        figure(row.predicted),
        figure(row.flip_kl),
        figure_plus_minus(row.flip_delta_nll, row.flip_low, row.flip_high)
        if row.flip_low is not None
        else figure(row.flip_delta_nll),
        figure(row.removal_delta_nll),
        ("yes" if row.super_weight else "no") if row.status == "ok" else row.status.replace("_", " "),
    )


def _name(row: SingleWeight) -> str:
    return f"{_short(row.matrix)} [{row.row}, {row.column}]"


def _short(name: str) -> str:
    return name.removesuffix(".weight").removeprefix("model.")


# Units


def _unit_columns() -> tuple[Column, ...]:
    return (
        Column("where", "left"),
        Column("KL predicted"),
        Column("KL measured\n(nats/token)"),
        Column("ΔNLL\n(nats/token)"),
        Column("signs kept:\nKL"),
        Column("seeds"),
        Column("stopped by", "left"),
    )


def _unit_table(record: SensitivityRecord) -> Table:
    ranked = _ranked(record)
    rate = percent(record.units[0].rate)
    explained = (
        f"Random flips of {rate} of the entries there and nowhere else, super-weight candidates spared; intervals over "
        "seeds. Signs kept: noise of the same norm in the same matrices that changes no sign."
    )
    below = [explained]
    if len(ranked) > _ROWS:
        below.append(f"The {_ROWS} worst of {count(len(ranked))}; all are in the report and the record.")
    kind = "blocks" if record.units[0].kind == "block" else "matrices"
    return Table(f"Worst {kind}", _unit_columns(), tuple(_unit_row(unit) for unit in ranked[:_ROWS]), tuple(below))


def _ranked(record: SensitivityRecord) -> list[Unit]:
    """Worst first; what breaks the model before everything else."""

    def damage(unit: Unit) -> float:
        if unit.status == "non_finite":
            return math.inf
        return -math.inf if unit.measured is None else unit.measured

    return sorted(record.units, key=damage, reverse=True)


def _all_units_table(record: SensitivityRecord) -> Table:
    rows = tuple(_unit_row(unit) for unit in record.units)
    return Table("Every part, in execution order", _unit_columns(), rows, detail=True)


def _unit_row(unit: Unit) -> tuple[str, ...]:
    return (
        _short(unit.unit),
        figure(unit.predicted),
        _interval(unit),
        figure_plus_minus(unit.delta_nll, unit.nll_low, unit.nll_high),
        figure(unit.control),
        count(unit.seeds),
        unit.stopped_by if unit.status == "ok" else unit.status.replace("_", " "),
    )


def _interval(unit: Unit) -> str:
    return figure_plus_minus(unit.measured, unit.ci_low, unit.ci_high)


# Matrices


def _role_table(record: SensitivityRecord) -> Table:
    groups: dict[str, list[MatrixSensitivity]] = {}
    for matrix in record.matrices:
        groups.setdefault(matrix.role, []).append(matrix)
    total = sum(max(m.predicted, 0.0) for m in record.matrices)
    rows = []
    for role, members in sorted(groups.items(), key=lambda item: -sum(m.predicted for m in item[1])):
        worst = max(members, key=lambda m: m.predicted)
        bulk = sum(m.predicted for m in members)
        rows.append((
            role,
            count(len(members)),
            figure(bulk),
            percent(round(bulk / total, 3)) if total > 0 else NOT_MEASURED,
            figure(1e6 * bulk / sum(m.entries for m in members)),
            figure(sum(m.tail for m in members)),
            f"{_short(worst.matrix)} ({figure(worst.predicted)})",
        ))
    columns = (
        Column("role", "left"),
        Column("matrices"),
        Column("KL slope,\nbulk"),
        Column("share"),
        Column("per million\nentries"),
        Column("KL slope,\nsingle weights"),
        Column("most sensitive", "left"),
    )
    below = (
        "Predicted KL per unit flip rate, nats/token: 0.1 % of flips cost a thousandth of it. Single weights: candidates "
        "apart from the bulk, where the second-order form can be wrong by far."
    )
    return Table("Predicted, by role", columns, tuple(rows), (below,))


# Columns


def _column_table(record: SensitivityRecord) -> Table:
    columns = (
        Column("input column", "left"),
        Column("named by", "left"),
        Column("KL predicted"),
        Column("KL measured"),
        Column("ΔNLL\n(nats/token)"),
        Column("α²‖w‖² share"),
    )
    rows = tuple(_column_row(row) for row in record.columns[:_ROWS])
    below = ["The sign of the whole column flipped, by negating that input. ± 95 % interval over windows, paired."]
    if len(record.columns) > _ROWS:
        below.append(f"The {_ROWS} worst of {count(len(record.columns))} measured; all are in the record.")
    return Table("Worst columns", columns, rows, tuple(below))


def _column_row(row: ColumnSensitivity) -> tuple[str, ...]:
    return (
        f"{_short(row.matrix)} [:, {row.column}]",
        ", ".join(name.replace("_", " ") for name in row.nominated_by),
        figure(row.predicted),
        figure(row.measured),
        figure_plus_minus(row.delta_nll, row.nll_low, row.nll_high)
        if row.nll_low is not None
        else figure(row.delta_nll),
        percent(round(row.amplitude, 4)),
    )


def _agreement_table(record: SensitivityRecord) -> Table:
    names = {
        "joint": "Fisher, whole column",
        "fisher": "Fisher, sum over entries",
        "first_order": "first order",
        "amplitude": "α²‖w‖²",
    }
    rows = tuple(
        (names[row.screen], count(row.columns), figure(row.spearman, 2), figure(row.p_value, 2))
        for row in record.agreement
    )
    columns = (Column("screen", "left"), Column("columns"), Column("Spearman's ρ"), Column("p"))
    below = ("Rank agreement with the measured KL of the same columns, which the screens themselves nominated.",)
    return Table("How far each screen can be trusted here", columns, rows, below)


# Plan


def _plan_table(record: SensitivityRecord) -> Table:
    plan = record.plan
    if plan is None:
        return Table("Plan", (), ())
    rows = tuple(
        (
            label,
            count(step.kept),
            percent(round(step.kept_entries, 4)),
            percent(round(step.predicted_share, 3)),
            figure(step.kl),
            _step_nll(step),
        )
        for label, step in (("everything ternary", plan.everything), ("the plan", plan.plan))
    )
    columns = (
        Column(f"under {plan.scheme}", "left"),
        Column("kept"),
        Column("entries kept"),
        Column("damage avoided,\nadded up"),
        Column("KL"),
        Column("ΔNLL\n(nats/token)"),
    )
    below = ["Measured as a whole, ± 95 % interval over windows. Give it to quantize:"]
    below.append(
        f"--scheme {plan.scheme} --exclude '{','.join(plan.exclude)}'" if plan.exclude else "nothing to exclude"
    )
    return Table("Mixed-precision plan", columns, rows, tuple(below))


def _step_nll(step: PlanStep) -> str:
    if step.nll_low is None:
        return figure(step.delta_nll)
    return figure_with_interval(step.delta_nll, step.nll_low, step.nll_high)
