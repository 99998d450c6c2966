"""Figures of a leverage study. Pure data to `Figure` objects; `draw` writes them as PNG and SVG."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from ternary_probe.records import Amplitude, LeverageRecord, Mean, Response
from ternary_probe.reports.damage import confidence_of
from ternary_probe.reports.leverage_sheet import PAPER, RESPONSES, leverage_pairs
from ternary_probe.reports.plotting import (
    Look,
    finish,
    legend_entries,
    light_grid,
    looks_of,
    new_figure,
    plain_log,
    write_figures,
)
from ternary_probe.reports.rounding import percent

if TYPE_CHECKING:
    from collections.abc import Hashable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {"count": "-", "rate": ":", "energy": "-."}


def draw(record: LeverageRecord, folder: Path) -> dict[str, Path]:
    """Write every figure the record has data for; the same record gives the same bytes.

    Args:
        record: The study.
        folder: Where to write; made if missing.

    Returns:
        Figure name to PNG file; an SVG of the same name lies beside each.
    """
    made: dict[str, Figure] = {}
    if record.means:
        made["response_curve"] = response_curve(record)
    if any(a.alpha_rank for a in record.amplitude):
        made["amplitude_profile"] = amplitude_profile(record)
    if any(a.block is not None for a in record.amplitude):
        made["predicted_leverage"] = predicted_leverage(record)
    return write_figures(made, folder)


# ---- response curve -------------------------------------------------------------------------------------------------


def response_curve(record: LeverageRecord) -> Figure:
    """Mean ΔNLL and KL against flip rate, log-log, one line per arm.

    Args:
        record: The study.

    Returns:
        A figure with one panel per response. Points that are not above 0 are left out and named in the caption.
    """
    figure = new_figure()
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    _limits(panels[0], record)
    left_out: list[str] = []
    several = len({m.matching for m in record.means}) > 1
    order = list(dict.fromkeys(_series_name(m.arm, m.matching, several=several) for m in record.means))
    for axes, response in zip(panels, RESPONSES, strict=True):
        left_out += _response_panel(axes, record, response)
    caption = (
        f"Bars: {percent(confidence_of(record))} interval over seeds. Dashed: proportional to the number of flips. "
    )
    if record.published:
        caption += f"Hollow: published figures ({PAPER}), another model. "
    if left_out:
        caption += f"Not on a log axis (no positive mean): {', '.join(left_out)}."
    finish(figure, "Damage against flip rate", caption, legend=legend_entries(panels, order))
    return figure


def _series_name(arm: str, matching: str, *, several: bool) -> str:
    return arm.replace("_", " ") + (f", {matching}" if several else "")


def _response_panel(axes: Axes, record: LeverageRecord, response: Response) -> list[str]:
    means = [m for m in record.means if m.response == response]
    series: dict[tuple[str, str], list[Mean]] = defaultdict(list)
    for mean in sorted(means, key=lambda m: m.rate):
        series[mean.matching, mean.arm].append(mean)
    several = len({m.matching for m in record.means}) > 1
    looks = looks_of([m.arm for m in record.means])
    left_out = []
    shown: list[Mean] = []
    for (matching, arm), points in series.items():
        positive = [m for m in points if m.mean is not None and m.mean > 0]
        name = _series_name(arm, matching, several=several)
        left_out += [f"{RESPONSES[response]} {name} {percent(m.rate)}" for m in points if m not in positive]
        if not positive:
            continue
        shown += positive
        look = looks[arm]
        rates, heights = [m.rate for m in positive], [m.mean or 0.0 for m in positive]
        axes.errorbar(
            rates,
            heights,
            yerr=_bars(positive),
            label=name,
            color=look.color,
            marker=look.marker,
            linestyle=_LINES.get(matching, "-"),
            markersize=6,
            linewidth=1.6,
            capsize=3,
        )
    _slope_one(axes, shown)
    floor = record.noise_floor.nll if response == "nll" else record.noise_floor.kl
    if floor > 0:
        axes.axhspan(axes.get_ylim()[0], floor, color="#999999", alpha=0.25, linewidth=0, label="below noise floor")
    if response == "nll":
        _published_points(axes, record, looks)
    axes.set_title(f"{RESPONSES[response]} (nats/token)", fontsize=11)
    axes.set_xlabel("flip rate (share of the outlier pool)")
    axes.set_xticks(sorted({m.rate for m in record.means} | {p.rate for p in record.published}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: percent(rate)))
    axes.xaxis.set_minor_locator(NullLocator())
    light_grid(axes)
    return left_out


def _bars(means: list[Mean]) -> np.ndarray:
    below = [(m.mean or 0.0) - (m.mean if m.ci_low is None else m.ci_low) for m in means]  # type: ignore[operator]
    above = [(m.mean if m.ci_high is None else m.ci_high) - (m.mean or 0.0) for m in means]  # type: ignore[operator]
    return np.array([below, above])


def _limits(axes: Axes, record: LeverageRecord) -> None:
    """Fix the axes by the means and the floors, so that an interval reaching 0 does not stretch them without end."""
    levels = [m.mean for m in record.means] + [m.ci_high for m in record.means]
    levels += [record.noise_floor.nll, record.noise_floor.kl]
    levels += [delta for p in record.published for delta in (p.delta_nll_outlier, p.delta_nll_other)]
    positive = [level for level in levels if level is not None and level > 0]
    axes.set_xscale("log")
    axes.set_yscale("log", nonpositive="clip")
    if positive:
        axes.set_ylim(min(positive) / 3, max(positive) * 2)
    rates = [m.rate for m in record.means] + [p.rate for p in record.published]
    axes.set_xlim(min(rates) / 1.6, max(rates) * 1.6)
    plain_log(axes.yaxis)


def _slope_one(axes: Axes, shown: list[Mean]) -> None:
    if not shown:
        return
    anchor = max((m for m in shown if m.rate == min(m.rate for m in shown)), key=lambda m: m.mean or 0.0)
    rates = np.array(axes.get_xlim())
    axes.plot(
        rates,
        (anchor.mean or 0.0) * rates / anchor.rate,
        color="#555555",
        linestyle="--",
        linewidth=1,
        label="slope 1",
        zorder=1,
    )


def _published_points(axes: Axes, record: LeverageRecord, looks: dict[str, Look]) -> None:
    for arm, deltas in (
        ("outlier", [(p.rate, p.delta_nll_outlier) for p in record.published]),
        ("other", [(p.rate, p.delta_nll_other) for p in record.published]),
    ):
        known = [(rate, delta) for rate, delta in deltas if delta is not None and delta > 0]
        if not known:
            continue
        look = looks.get(arm, Look("#000000", "o"))
        axes.plot(
            [rate for rate, _ in known],
            [delta for _, delta in known],
            linestyle="",
            marker=look.marker,
            markersize=8,
            markerfacecolor="none",
            markeredgecolor=look.color,
            label=f"paper’s {arm}",
        )


# ---- amplitude ------------------------------------------------------------------------------------------------------


def amplitude_profile(record: LeverageRecord) -> Figure:
    """Input amplitude α of each column, largest first, log-log: one line per role.

    Args:
        record: The study.

    Returns:
        A figure with one panel: median over the matrices of a role, band from lowest to highest.
    """
    figure = new_figure()
    axes = figure.subplots()
    roles: dict[str, list[Amplitude]] = defaultdict(list)
    for amplitude in record.amplitude:
        if amplitude.alpha_rank:
            roles[amplitude.role].append(amplitude)
    merged = _merge({role: tuple((a.alpha_rank, a.alpha_sorted) for a in members) for role, members in roles.items()})
    looks = looks_of(list(merged.values()))
    for first, role in merged.items():
        ranks, table = _profiles(members := roles[first])
        table = np.where(table > 0, table, np.nan)  # a dead input has no place on a log axis
        alive = ~np.isnan(table).all(axis=0)
        ranks, table = ranks[alive], table[:, alive]
        if not ranks.size:
            continue
        look = looks[role]
        median = np.nanmedian(table, axis=0)
        axes.plot(
            ranks, median, label=role, color=look.color, marker=look.marker, markersize=4, markevery=6, linewidth=1.6
        )
        if len(members) > 1:
            low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
            axes.fill_between(ranks, low, high, color=look.color, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set_xlabel("input column, by falling amplitude (1 is the largest)")
    axes.set_ylabel("amplitude α (share of the input's norm)")
    light_grid(axes)
    caption = "Line: median over the matrices of a role; band: lowest to highest. Σα² = 1 in every matrix."
    finish(figure, "Input amplitude by column", caption, legend=legend_entries([axes]))
    return figure


def _profiles(members: list[Amplitude]) -> tuple[np.ndarray, np.ndarray]:
    # On the ranks of the member with most columns; a narrower matrix ends where its columns do.
    ranks = np.array(max(members, key=lambda a: a.in_features).alpha_rank)
    rows = [np.interp(ranks, a.alpha_rank, a.alpha_sorted, right=np.nan) for a in members]
    return ranks, np.array(rows)


# ---- predicted leverage ---------------------------------------------------------------------------------------------


def predicted_leverage(record: LeverageRecord) -> Figure:
    """Predicted leverage of outlier over all columns, n·E[α²], by block; the measured one beside it.

    Args:
        record: The study.

    Returns:
        A figure with the predictions on the left and, where measured, outlier ÷ all with intervals on the right.
    """
    figure = new_figure()
    pairs = [
        p for p in leverage_pairs(record) if (p.matching, p.numerator, p.denominator) == ("count", "outlier", "all")
    ]
    measured = [p for p in pairs if any(e.status == "ok" and e.ratio is not None for e in p.entries)]
    if measured:
        axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    else:
        axes, beside = figure.subplots(), None
    roles: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for amplitude in record.amplitude:
        if amplitude.block is not None:
            roles[amplitude.role][amplitude.block].append(amplitude.n_alpha2_outlier)
    merged = _merge({role: tuple((b, tuple(v)) for b, v in blocks.items()) for role, blocks in roles.items()})
    looks = looks_of(list(merged.values()))
    for first, role in merged.items():
        look, blocks = looks[role], roles[first]
        numbers = sorted(blocks)
        heights = [float(np.median(blocks[b])) for b in numbers]
        axes.plot(
            numbers, heights, label=role, color=look.color, marker=look.marker, linestyle="", markersize=6, alpha=0.9
        )
    mean = record.prediction.n_alpha2_outlier
    for panel in (axes, beside):
        if panel is not None:
            panel.axhline(mean, color="#333333", linestyle="--", linewidth=1.2, label="mean prediction")
            panel.axhline(1, color="#999999", linestyle=":", linewidth=1.2, label="1: no outliers")
            light_grid(panel)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_title("predicted: n·E[α²] of the outlier columns", fontsize=11)
    axes.set_xlabel("block")
    axes.set_ylabel("leverage, outlier ÷ all")
    axes.xaxis.get_major_locator().set_params(integer=True)
    panels = [axes]
    if beside is not None:
        _measured_panel(beside, record)
        panels.append(beside)
    skipped = sum(a.block is None for a in record.amplitude)
    caption = (
        f"Right: outlier ÷ all as measured, with {percent(confidence_of(record))} interval. "
        if beside is not None
        else "Outlier ÷ all was not measured. "
    )
    caption += f"{skipped} matrices outside the blocks are not shown." if skipped else ""
    finish(figure, "Leverage by block, predicted from amplitude", caption, legend=legend_entries(panels))
    return figure


def _measured_panel(axes: Axes, record: LeverageRecord) -> None:
    pairs = [
        p for p in leverage_pairs(record) if (p.matching, p.numerator, p.denominator) == ("count", "outlier", "all")
    ]
    for offset, response, look in (
        (-0.12, "nll", Look("#000000", "h")),
        (0.12, "kl", Look("#666666", "d")),
    ):
        entries = [(i, p.nll if response == "nll" else p.kl) for i, p in enumerate(pairs)]
        known = [(i, e, e.ratio) for i, e in entries if e is not None and e.status == "ok" and e.ratio is not None]
        if not known:
            continue
        axes.errorbar(
            [i + offset for i, _, _ in known],
            [ratio for _, _, ratio in known],
            yerr=np.array([
                [ratio - (ratio if e.ci_low is None else e.ci_low) for _, e, ratio in known],
                [(ratio if e.ci_high is None else e.ci_high) - ratio for _, e, ratio in known],
            ]),
            label=f"measured, {RESPONSES['nll' if response == 'nll' else 'kl']}",
            color=look.color,
            marker=look.marker,
            linestyle="",
            markersize=7,
            capsize=4,
        )
    axes.set_xticks(range(len(pairs)), [percent(p.rate) for p in pairs])
    axes.set_xlim(-0.6, len(pairs) - 0.4)
    axes.set_title("measured", fontsize=11)
    axes.set_xlabel("flip rate")


# ---- shared ---------------------------------------------------------------------------------------------------------


def _merge(roles: dict[str, Hashable]) -> dict[str, str]:
    """Name roles with the same data once, since they read one input and would hide each other: q, k and v for example.

    Args:
        roles: Role to its data.

    Returns:
        First role of each group to the group's label.
    """
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for role, data in roles.items():
        groups[data].append(role)
    return {names[0]: ", ".join(names) for names in groups.values()}
