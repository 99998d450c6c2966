"""A quantizer study in words and rounded figures: the damage, beside harmful and harmless noise of equal norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from ternary_probe.records import Kinship, MatrixQuantization, NormEnergy, QuantizedArm, QuantizeRecord, Response
from ternary_probe.reports.rounding import NOT_MEASURED, count, figure, figure_plus_minus, percent
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
from ternary_probe.studies.intervals import mean_interval

RESPONSES: dict[Response, str] = {"nll": "ΔNLL", "kl": "KL"}

_ARMS = {"ternary": "ternary", "sign_flip": "sign flips", "magnitude": "magnitude"}
_KINDS = {
    "sign_flip": "acts like the harmful kind, sign flips of equal norm",
    "magnitude": "acts like the harmless kind, noise of equal norm that keeps the signs",
    "between": "lies between the harmless and the harmful kind of noise of its norm",
}


def quantize_sheet(record: QuantizeRecord) -> Sheet:
    """Say what ternary weights do to a model, and which kind of noise their error resembles.

    Args:
        record: The study.

    Returns:
        The sheet: headline per scheme, damage, matrices by role, energies at the norms, planted outliers.
    """
    tables = [_damage_table(record), _role_table(record)]
    if record.energies:
        tables.append(_energy_table(record))
    if record.planted:
        tables.append(_planted_table(record))
    tables.append(model_table(record.model))
    if record.protocol is not None:
        tables.append(protocol_table("Protocol of the scored text", record.protocol))
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title=f"Ternary quantization: {record.model.name}",
        headline=_headline(record),
        facts=_facts(record),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def _headline(record: QuantizeRecord) -> tuple[str, ...]:
    by_scheme: dict[str, list[Kinship]] = defaultdict(list)
    for verdict in record.kinship:
        by_scheme[verdict.scheme].append(verdict)
    if not by_scheme:
        return ("No scheme was measured against noise of equal norm.",)
    return tuple(_answer(scheme, verdicts) for scheme, verdicts in by_scheme.items())


def _answer(scheme: str, verdicts: Sequence[Kinship]) -> str:
    """Write the answer for one scheme; responses that agree share a clause."""
    clauses: dict[str, list[Kinship]] = defaultdict(list)
    for verdict in verdicts:
        clauses[_likeness(verdict)].append(verdict)
    parts = []
    for likeness, members in clauses.items():
        where = " and ".join(RESPONSES[v.response] for v in members)
        compared = "; ".join(_compared(v) for v in members if v.ternary is not None)
        parts.append(f"in {where} its error {likeness}" + (f" ({compared})" if compared else ""))
    sentence = f"{scheme}: {', but '.join(parts)}."
    reversed_in = [
        RESPONSES[v.response]
        for v in verdicts
        if v.sign_flip is not None and v.magnitude is not None and v.magnitude >= v.sign_flip
    ]
    if reversed_in:
        sentence += (
            f" Here noise that keeps the signs hurts no less than sign flips do (in {' and '.join(reversed_in)})."
        )
    return sentence


def _likeness(verdict: Kinship) -> str:
    if verdict.acts_like == "undecided":
        return f"cannot be likened to either kind of noise: {verdict.reason.rstrip('.') or 'no reason recorded'}"
    if verdict.acts_like == "beyond":
        controls = [c for c in (verdict.sign_flip, verdict.magnitude) if c is not None]
        worse = verdict.ternary is not None and verdict.ternary >= max(controls, default=0.0)
        return f"hurts {'more' if worse else 'less'} than either kind of noise of its norm"
    return _KINDS[verdict.acts_like]


def _compared(verdict: Kinship) -> str:
    controls = (("sign flips", verdict.sign_flip), ("magnitude", verdict.magnitude))
    known = ", ".join(f"{name} {figure(value)}" for name, value in controls if value is not None)
    return f"{RESPONSES[verdict.response]} {figure(verdict.ternary)}" + (f", {known}" if known else "")


def _facts(record: QuantizeRecord) -> tuple[Fact, ...]:
    base = record.baseline
    names = dict.fromkeys(m.matrix for m in record.matrices)
    roles = list(dict.fromkeys(m.role for m in record.matrices))
    seeds = sorted({arm.seed for arm in record.quantized if arm.seed is not None})
    controls = f"{count(len(seeds))} seeds of each, of equal norm in every matrix" if seeds else "none"
    facts = [
        *status_fact(record),
        model_fact(record.model),
        protocol_fact("text", record.protocol),
        Fact("baseline", f"NLL {figure(base.nll, 5)} nats/token, perplexity {figure(base.perplexity, 4)}"),
        Fact("quantized", f"{count(len(names))} matrices: {', '.join(roles)}"),
        Fact("controls", controls),
    ]
    if record.saved is not None:
        facts.append(Fact("saved", record.saved))
    return tuple(facts)


# Damage


def _damage_table(record: QuantizeRecord) -> Table:
    groups: dict[tuple[str, str], list[QuantizedArm]] = defaultdict(list)
    for arm in record.quantized:
        groups[arm.scheme, arm.arm].append(arm)
    rows = tuple(_damage_row(scheme, kind, arms) for (scheme, kind), arms in groups.items())
    below = ["ternary: ± 95 % interval over windows (paired, same tokens); controls: mean ± 95 % interval over seeds."]
    if any(len(arms) == 1 for (_, kind), arms in groups.items() if kind != "ternary"):
        below.append("No interval over seeds: it takes two or more.")
    below.append(
        "KL: KL(clean ‖ perturbed), nats/token, and reversed; top-1: share of tokens with the same first choice."
    )
    failed = [arm for arm in record.quantized if arm.status != "ok"]
    if failed:
        below.append(f"Not measured: {'; '.join(_failure(arm) for arm in failed)}.")
    columns = (
        Column("scheme", "left"),
        Column("arm", "left"),
        Column("‖ΔW‖/‖W‖"),
        Column("ΔNLL\n(nats/token)"),
        Column("ΔPPL"),
        Column("KL"),
        Column("KL\nreversed"),
        Column("KL median\nand 99 %"),
        Column("top-1"),
    )
    return Table("Damage", columns, rows, tuple(below), grouped=True)


def _damage_row(scheme: str, kind: str, arms: Sequence[QuantizedArm]) -> tuple[str, ...]:
    measured = [arm for arm in arms if arm.status == "ok"]
    if kind == "ternary" and measured:
        arm = measured[0]
        nll = (
            figure_plus_minus(arm.delta_nll, arm.ci_low, arm.ci_high)
            if arm.ci_low is not None
            else figure(arm.delta_nll)
        )
        others = tuple(figure(value) for value in (arm.delta_ppl, arm.kl, arm.kl_reverse))
    else:
        nll = _over_seeds(arm.delta_nll for arm in measured)
        others = (
            tuple(_over_seeds(values) for values in zip(*map(_responses, measured), strict=True)) or (NOT_MEASURED,) * 3
        )
    quantiles = [(arm.kl_quantiles[0], arm.kl_quantiles[2]) for arm in measured if len(arm.kl_quantiles) > 2]
    middle, tail = (_mean_of(values) for values in zip(*quantiles, strict=True)) if quantiles else (None, None)
    agreement = _mean_of(arm.top1_agreement for arm in measured)
    return (
        scheme,
        _ARMS[kind],
        figure(_mean_of(arm.relative_norm for arm in arms)),
        nll,
        *others,
        f"{figure(middle)}, {figure(tail)}" if quantiles else NOT_MEASURED,
        NOT_MEASURED if agreement is None else percent(round(agreement, 3)),
    )


def _responses(arm: QuantizedArm) -> tuple[float | None, float | None, float | None]:
    return arm.delta_ppl, arm.kl, arm.kl_reverse


def _over_seeds(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOT_MEASURED
    return figure_plus_minus(*mean_interval(known)) if len(known) > 1 else figure(known[0])


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _failure(arm: QuantizedArm) -> str:
    seed = "" if arm.seed is None else f" seed {arm.seed}"
    return f"{arm.scheme} {_ARMS[arm.arm]}{seed}: {arm.status.replace('_', ' ')}"


# Matrices


def _role_table(record: QuantizeRecord) -> Table:
    groups: dict[tuple[str, str], list[MatrixQuantization]] = defaultdict(list)
    for matrix in record.matrices:
        groups[matrix.scheme, matrix.role].append(matrix)
    rows = tuple(
        (
            scheme,
            role,
            count(len(members)),
            _against_gaussian(members, lambda m: m.cos2, lambda m: m.cos2_gaussian),
            _against_gaussian(members, lambda m: m.relative_error, lambda m: m.relative_error_gaussian),
            _percent(_mean_of(m.sparsity for m in members)),
            figure(_mean_of(m.radial_fraction for m in members)),
            figure(_mean_of(m.bits_per_weight for m in members)),
            _grids(members),
        )
        for (scheme, role), members in groups.items()
    )
    radial = (
        "R: share of the matrix's own error along the stream at the norm it reaches next, which that norm removes; "
        f"{NOT_MEASURED}: does not write to the stream, or nothing can be said. bits: 2-bit codes, scales included."
    )
    below = ["Means over the matrices of a role; in brackets the closed form for Gaussian weights.", radial]
    zero = sum(m.zero_units for m in record.matrices)
    if zero:
        below.append(f"{count(zero)} rows, groups or tensors hold nothing but zeros.")
    columns = (
        Column("scheme", "left"),
        Column("role", "left"),
        Column("matrices"),
        Column("cos²(w, q)\n(Gaussian)"),
        Column("‖q−w‖²/‖w‖²\n(Gaussian)"),
        Column("zeros"),
        Column("R at the\nnext norm"),
        Column("bits"),
        Column("already on\na grid", "left"),
    )
    return Table("Matrices by role", columns, rows, tuple(below), grouped=True)


def _against_gaussian(
    members: Sequence[MatrixQuantization],
    measured: Callable[[MatrixQuantization], float | None],
    gaussian: Callable[[MatrixQuantization], float | None],
) -> str:
    return f"{figure(_mean_of(map(measured, members)))} ({figure(_mean_of(map(gaussian, members)))})"


def _grids(members: Sequence[MatrixQuantization]) -> str:
    found: dict[str, int] = defaultdict(int)
    for member in members:
        if member.grid:
            found[member.grid] += 1
    if not found:
        return "no"
    if len(found) > 1 or sum(found.values()) < len(members):
        return f"{count(sum(found.values()))} of {count(len(members))}"
    return next(iter(found))


def _percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else percent(round(share, 3))


# Energies


def _energy_table(record: QuantizeRecord) -> Table:
    places = _places(record.energies)
    groups: dict[tuple[str, str], dict[str, list[NormEnergy]]] = defaultdict(lambda: defaultdict(list))
    for energy in record.energies:
        groups[energy.scheme, energy.arm][energy.norm].append(energy)
    rows = tuple(
        (scheme, _ARMS[arm], *(_energy_cell(norms.get(norm, [])) for norm in places.values()))
        for (scheme, arm), norms in groups.items()
    )
    columns = (Column("scheme", "left"), Column("arm", "left"), *(Column(label) for label in places))
    below = (
        "Energy of the change across the clean stream over the clean stream's energy; in brackets R, the share of the whole "
        "change that lies along it, which the norm removes. Ratios of sums over tokens; means over seeds."
    )
    return Table("Energy at the norms", columns, rows, (below,), grouped=True)


def _places(energies: Sequence[NormEnergy]) -> dict[str, str]:
    """Choose the norms to show: the last one in the first, the middle and the last block, and the final norm."""
    last: dict[int, str] = {}
    for energy in energies:
        if energy.block is not None:
            last[energy.block] = energy.norm
    blocks = sorted(last)
    chosen = dict.fromkeys([blocks[0], blocks[len(blocks) // 2], blocks[-1]]) if blocks else {}
    places = {f"block {block}": last[block] for block in chosen}
    final = next((energy.norm for energy in energies if energy.position == "final"), None)
    return places | ({"final norm": final} if final is not None else {})


def _energy_cell(energies: Sequence[NormEnergy]) -> str:
    if not energies:
        return NOT_MEASURED
    return (
        f"{figure(fmean(e.transverse for e in energies))} ({figure(_mean_of(e.radial_fraction for e in energies), 2)})"
    )


# Planted outliers


def _planted_table(record: QuantizeRecord) -> Table:
    rows = tuple(
        (
            row.scheme,
            f"{row.k:g}",
            figure(row.baseline_shift, 2),
            figure(row.relative_error),
            figure(row.delta_nll),
            figure(row.kl),
            row.status.replace("_", " "),
        )
        for row in sorted(record.planted, key=lambda row: (_order(record, row.scheme), row.k))
    )
    columns = (
        Column("scheme", "left"),
        Column("strength"),
        Column("clean ΔNLL of\nplanting alone"),
        Column("‖q−w‖²/‖w‖²"),
        Column("ΔNLL\n(nats/token)"),
        Column("KL\n(nats/token)"),
        Column("status", "left"),
    )
    below = (
        "Planting scales a norm's gains by the strength and the columns that read them by its inverse: the clean model "
        "changes by rounding only. Above 1 inputs stand out and their weights shrink, below 1 weights stand out."
    )
    return Table("Planted outlier columns", columns, rows, (below,), grouped=True)


def _order(record: QuantizeRecord, scheme: str) -> int:
    names = list(dict.fromkeys(row.scheme for row in record.planted))
    return names.index(scheme)
