"""Figures of a sensitivity study: where the bulk lies, prediction against measurement, and the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm

from ternary_probe.reports.plotting import (
    OKABE_ITO,
    finish,
    legend_entries,
    light_grid,
    looks_of,
    new_figure,
    write_figures,
)
from ternary_probe.reports.rounding import figure as rounded
from ternary_probe.reports.rounding import percent

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ternary_probe.sensitivity_record import SensitivityRecord


def draw_sensitivity(record: SensitivityRecord, folder: Path) -> dict[str, Path]:
    """Write every figure the record has data for; the same record gives the same bytes.

    Args:
        record: The study.
        folder: Where to write; made if missing.

    Returns:
        Figure name to PNG file; an SVG of the same name lies beside each.
    """
    made = {"sensitivity_map": sensitivity_map(record)}
    if any(unit.measured for unit in record.units) or any(column.measured for column in record.columns):
        made["prediction_against_measurement"] = prediction_against_measurement(record)
    if record.columns:
        made["sorted_columns"] = sorted_columns(record)
    return write_figures(made, folder)


def sensitivity_map(record: SensitivityRecord) -> Figure:
    """Predicted bulk KL per unit flip rate, a cell for each block and role.

    Args:
        record: The study.

    Returns:
        A heat map; matrices of one role in one block (experts) are added up.
    """
    roles = list(dict.fromkeys(m.role for m in record.matrices))
    blocks = sorted({m.block for m in record.matrices if m.block is not None})
    grid = np.zeros((len(roles), len(blocks)))
    for matrix in record.matrices:
        if matrix.block is not None:
            grid[roles.index(matrix.role), blocks.index(matrix.block)] += max(matrix.predicted, 0.0)
    shown = np.ma.masked_less_equal(grid, 0.0)
    figure = new_figure()
    axes = figure.subplots()
    norm = LogNorm() if shown.count() and shown.min() < shown.max() else None
    image = axes.imshow(shown, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
    axes.set_yticks(range(len(roles)), roles)
    step = max(1, len(blocks) // 15)
    axes.set_xticks(range(0, len(blocks), step), [str(block) for block in blocks[::step]])
    axes.set_xlabel("block")
    figure.colorbar(image, ax=axes, label="KL per unit flip rate (nats/token)")
    _mark_singles(axes, record, roles, blocks)
    caption = (
        "Second-order prediction of the bulk, logarithmic colours. White cross: a super weight was measured there."
    )
    finish(figure, "Where random flips hurt", caption, legend={})
    return figure


def _mark_singles(axes: Axes, record: SensitivityRecord, roles: list[str], blocks: list[int]) -> None:
    role_of = {m.matrix: m.role for m in record.matrices}
    places = {
        (blocks.index(s.block), roles.index(role_of[s.matrix]))
        for s in record.super_weights
        if s.super_weight and s.block is not None
    }
    for x, y in sorted(places):
        axes.plot(x, y, marker="x", color="white", markersize=9, markeredgewidth=3.5)
        axes.plot(x, y, marker="x", color="black", markersize=8, markeredgewidth=1.5)


def prediction_against_measurement(record: SensitivityRecord) -> Figure:
    """Predicted against measured KL: of blocks or matrices under random flips, and of whole columns.

    Args:
        record: The study.

    Returns:
        A log-log scatter with the line of equality.
    """
    figure = new_figure()
    axes = figure.subplots()
    light_grid(axes)
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for unit in record.units:
        if unit.measured is not None:
            label = f"{'blocks' if unit.kind == 'block' else 'matrices'}, {percent(unit.rate)} flipped"
            _add(groups, label, unit.predicted, unit.measured)
    for column in record.columns:
        if column.measured is not None:
            _add(groups, "whole columns", column.predicted, column.measured)
    for single in record.super_weights:
        if single.predicted is not None and single.flip_kl is not None:
            _add(groups, "single weights", single.predicted, single.flip_kl)
    ends = [value for pair in groups.values() for values in pair for value in values]
    for name, look in looks_of(list(groups)).items():
        axes.plot(*groups[name], look.marker, color=look.color, label=name, markersize=6, alpha=0.8, linestyle="")
    if ends:
        low, high = min(ends), max(ends)
        axes.plot([low, high], [low, high], "--", color="#666666", linewidth=1, label="equal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted KL (nats/token)")
    axes.set_ylabel("measured KL (nats/token)")
    caption = (
        f"Prediction: one Fisher pass with {record.draws} label draws. Random flips of the bulk follow it; whole columns and "
        "single weights are large changes, where it only ranks."
    )
    finish(figure, "Prediction against measurement", caption, legend=legend_entries([axes], list(groups)))
    return figure


def _add(groups: dict[str, tuple[list[float], list[float]]], label: str, predicted: float, measured: float) -> None:
    if predicted > 0 and measured > 0:
        xs, ys = groups.setdefault(label, ([], []))
        xs.append(predicted)
        ys.append(measured)


def sorted_columns(record: SensitivityRecord) -> Figure:
    """Measured KL of whole-column flips, worst first, by who nominated the column.

    Args:
        record: The study.

    Returns:
        One point a column; random ones hollow.
    """
    figure = new_figure()
    axes = figure.subplots()
    light_grid(axes)
    known = [c for c in record.columns if c.measured is not None and c.measured > 0]
    for label, random in (("nominated by a screen", False), ("drawn at random", True)):
        chosen = [(rank, c.measured) for rank, c in enumerate(known, start=1) if ("random" in c.nominated_by) is random]
        if chosen:
            color = OKABE_ITO[1] if random else OKABE_ITO[0]
            axes.plot(
                [rank for rank, _ in chosen],
                [value or 0.0 for _, value in chosen],
                "o" if random else "s",
                color=color,
                fillstyle="none" if random else "full",
                label=label,
                linestyle="",
            )
    if known:
        axes.set_yscale("log")
    axes.set_xlabel("rank")
    axes.set_ylabel("KL of the flipped column (nats/token)")
    worst = "" if not known else f" Worst: {known[0].matrix} column {known[0].column}, {rounded(known[0].measured)}."
    caption = f"Every column measured.{worst} A screen that works leaves the random ones at the right."
    finish(figure, "Columns, worst first", caption, legend=legend_entries([axes]))
    return figure
