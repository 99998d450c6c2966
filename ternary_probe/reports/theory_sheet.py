"""Closed forms beside simulation and published figures, in words and rounded figures (THEORY 1.1 to 1.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ternary_probe.records import DepthRatio, Simulated, TheoryRecord, TwoLayerRatio
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

PAPER = "arXiv 2605.18933"

_FIGURES = {
    "cos2": "cos²(w, q)",
    "error_energy": "error energy",
    "radial_pre": "R before\nReLU",
    "radial_post": "R after\nReLU",
    "output_cos2": "output cos²",
    "nonzero": "non-zero",
}
_NOISES = {"half_normal": "half-normal", "multiplicative": "multiplicative"}


def theory_sheet(record: TheoryRecord) -> Sheet:
    """Say whether simulation bears out the closed forms.

    Args:
        record: The study.

    Returns:
        The sheet: verdict, ratios, radial fractions, noise shapes, quantizers, depth.
    """
    tables = [_ratio_table(record), _shape_table(record), _quantizer_table(record), *_depth_tables(record)]
    if record.protocol is not None:
        tables += [model_table(record.model), protocol_table("Protocol of the hidden states' text", record.protocol)]
    tables.append(environment_table(record.environment, record.timing))
    return Sheet(
        title="Theory: closed forms against simulation",
        headline=_headline(record),
        facts=_facts(record),
        tables=tuple(tables),
        notes=all_notes(record),
    )


def _headline(record: TheoryRecord) -> tuple[str, ...]:
    if record.verdict == "pass":
        first = f"Simulation bears out every closed form ({count(record.comparisons)} comparisons)."
    elif record.verdict == "fail":
        first = f"A closed form is wrong here: {record.reason}."
    else:
        first = f"The closed forms are not tested: {record.reason}."
    published = [row for row in record.two_layer if row.ratio_paper is not None]
    row = next(iter(published or record.two_layer), None)
    if row is None:
        return (first,)
    paper = "" if row.ratio_paper is None else f"; the paper measured {figure(row.ratio_paper, 4)} at width 2,048"
    measured = figure_plus_minus(row.ratio_simulated, row.ci_low, row.ci_high)
    second = (
        f"At a rate of {percent(row.rate)}, sign flips leave {measured} times the energy that noise of equal norm leaves "
        f"which keeps the signs (closed form {figure(row.ratio_exact_width, 4)} at this width, "
        f"{figure(row.ratio_exact, 4)} for infinite width{paper})."
    )
    return first, second


def _facts(record: TheoryRecord) -> tuple[Fact, ...]:
    size = (
        f"width {count(record.width)}, {count(record.inputs)} inputs a seed, "
        f"{count(len(record.seeds))} seed{'s' * (len(record.seeds) != 1)}"
    )
    facts = [*status_fact(record), Fact("simulated", size)]
    if record.protocol is not None:
        facts += [model_fact(record.model), protocol_fact("text", record.protocol)]
    else:
        facts.append(Fact("weights", f"{record.model.name}, {record.model.dtype} on {record.model.device}"))
    return tuple(facts)


def _ratio_table(record: TheoryRecord) -> Table:
    rows = tuple(
        (
            percent(row.rate),
            figure_plus_minus(row.ratio_simulated, row.ci_low, row.ci_high),
            figure(row.ratio_exact_width, 4),
            figure(row.ratio_exact, 4),
            figure(row.ratio_authors, 4),
            _paper(row),
            _beside(row.radial_sign),
            _beside(row.radial_magnitude),
            _agreement([row.agrees, row.radial_sign.agrees, row.radial_magnitude.agrees]),
        )
        for row in record.two_layer
    )
    columns = (
        Column("rate"),
        Column("ratio\nsimulated"),
        Column("exact at\nthis width"),
        Column("exact,\nwidth → ∞"),
        Column("authors’\nform"),
        Column("paper\nmeasured"),
        Column("R of flips"),
        Column("R of magnitude"),
        Column("agrees", "left"),
    )
    interval = f"± {percent(record.confidence)} interval over seeds (Student's t)"
    below = [
        f"ratio: energy across the clean output, sign flips ÷ constant magnitude noise of equal norm; {interval}.",
        "R: radial fraction, the share of the change an RMSNorm removes; simulated (exact at this width).",
        f"authors’ form, paper measured: {PAPER}, at width 2,048; not measured here.",
    ]
    return Table("Two layers: sign flips against magnitude noise", columns, rows, tuple(below))


def _paper(row: TwoLayerRatio) -> str:
    if row.ratio_paper is None:
        return NOT_MEASURED
    if row.ratio_paper_spread is None:
        return figure(row.ratio_paper, 4)
    return f"{figure(row.ratio_paper, 4)} ± {row.ratio_paper_spread:.3f}"


def _shape_table(record: TheoryRecord) -> Table:
    by_rate: dict[float, dict[str, Simulated]] = defaultdict(dict)
    for shape in record.noise_shapes:
        by_rate[shape.rate][shape.noise] = shape
    rows = []
    for rate, shapes in by_rate.items():
        cells = [text for noise in _NOISES for text in _measured_and_exact(shapes.get(noise))]
        rows.append((percent(rate), *cells, _agreement(s.agrees for s in shapes.values())))
    columns = (
        Column("rate"),
        *(
            column
            for name in _NOISES.values()
            for column in (Column(f"{name}\nsimulated"), Column("exact at\nthis width"))
        ),
        Column("agrees", "left"),
    )
    below = (
        "The ratio depends on the shape of the noise: the paper's 2.75 holds for one constant added to every |w|.",
    )
    return Table("The same ratio for other sign-preserving noise of equal norm", columns, tuple(rows), below)


def _quantizer_table(record: TheoryRecord) -> Table:
    rows = tuple(
        (
            row.scheme,
            *(_beside(row.simulated.get(name), getattr(row, name)) for name in _FIGURES),
            _agreement(found.agrees for found in row.simulated.values()),
        )
        for row in record.quantizers
    )
    columns = (Column("scheme", "left"), *(Column(name) for name in _FIGURES.values()), Column("agrees", "left"))
    below = ["Simulated (exact at this width)."]
    for row in record.quantizers:
        for name, published in row.published.items():
            label = " ".join(_FIGURES.get(name, name).split())
            below.append(f"{row.scheme}: {label} is {figure(published)} in {PAPER}, for infinite width.")
    return Table("Quantizers of a Gaussian weight", columns, rows, tuple(below))


def _depth_tables(record: TheoryRecord) -> list[Table]:
    tables = []
    for weights in dict.fromkeys(row.weights for row in record.depth):
        chosen = [row for row in record.depth if row.weights == weights]
        closed = any(row.exact_width is not None for row in chosen)
        by_depth: dict[int, dict[bool, DepthRatio]] = defaultdict(dict)
        for row in chosen:
            by_depth[row.layers][row.residual] = row
        rows = []
        for layers, pair in sorted(by_depth.items()):
            cells = [text for residual in (False, True) for text in _depth_cells(pair.get(residual), closed=closed)]
            agreement = [_agreement(row.agrees for row in pair.values())] if closed else []
            rows.append((count(layers), *cells, *agreement))
        columns = [Column("layers")]
        for kind in ("no residual", "residual"):
            columns.append(Column(f"{kind}\nsimulated"))
            columns += [Column("exact at\nthis width")] * closed
            columns.append(Column("paper\nmeasured"))
        columns += [Column("agrees", "left")] * closed
        sources = dict.fromkeys(row.published_source for row in chosen if row.published_source)
        rate = percent(chosen[0].rate)
        below = [
            f"Ratio after so many layers, each perturbed at a rate of {rate}; raw outputs, never normalised, with residual."
        ]
        below += [f"paper: {source}, width 2,048; not measured here." for source in sources]
        title = "Depth, random weights" if weights == "random" else f"Depth, the model's {weights} matrices"
        tables.append(Table(title, tuple(columns), tuple(rows), tuple(below)))
    return tables


def _depth_cells(row: DepthRatio | None, *, closed: bool) -> list[str]:
    if row is None:
        return [NOT_MEASURED] * (3 if closed else 2)
    exact = [figure(row.exact_width, 4)] if closed else []
    return [figure_plus_minus(row.simulated, row.ci_low, row.ci_high), *exact, figure(row.published, 4)]


def _measured_and_exact(found: Simulated | None) -> tuple[str, str]:
    if found is None:
        return NOT_MEASURED, NOT_MEASURED
    return figure_plus_minus(found.simulated, found.ci_low, found.ci_high), figure(found.exact_width, 4)


def _beside(found: Simulated | None, exact: float | None = None) -> str:
    if found is None:
        return f"{NOT_MEASURED} ({figure(exact, 4)})"
    return f"{_share(found.simulated)} ({_share(found.exact_width)})"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.4f}"


def _agreement(verdicts: Iterable[bool | None]) -> str:
    found = list(verdicts)
    if False in found:
        return "NO"
    return "yes" if found and all(found) else "untested"
