"""What all figures share: size, colours, markers, legend, caption, and the same bytes for the same data.

No pyplot, so nothing global is touched. Colours are Okabe and Ito's, safe for colour-blind readers, and every line also
has its own marker.
"""

from __future__ import annotations

import io
import textwrap
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ternary_probe.records import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

DPI = 150
OKABE_ITO = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
REFERENCES = ("slope 1", "below noise floor", "mean prediction", "1: no outliers")


class Look(NamedTuple):
    """How one series is drawn."""

    color: str
    marker: str


def new_figure() -> Figure:
    """Return an empty figure of the size all share."""
    figure = Figure(figsize=(9, 5.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def light_grid(axes: Axes) -> None:
    """Draw a light grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)


def plain_log(axis: Axis) -> None:
    """Label a log axis 0.01, 0.1, 1; add the 2s and 5s where it spans little more than a decade."""
    low, high = axis.get_view_interval()
    axis.set_major_formatter(FuncFormatter(lambda level, _: f"{level:g}"))
    wide = low <= 0 or high / low > 50
    axis.set_minor_formatter(NullFormatter() if wide else FuncFormatter(_two_or_five))


def _two_or_five(level: float, _: object) -> str:
    return f"{level:g}" if f"{level:e}"[0] in "25" else ""


def looks_of(names: list[str]) -> dict[str, Look]:
    """Give every name a colour and a marker, the same for the same order of names."""
    distinct = dict.fromkeys(names)
    # 8 colours and 8 markers, shifted by one each round: 64 names before a pair comes back.
    pairs = (Look(OKABE_ITO[i % 8], MARKERS[(i + i // 8) % 8]) for i in cycle(range(64)))
    return dict(zip(distinct, pairs, strict=False))


def legend_entries(panels: Iterable[Axes], order: Sequence[str] = ()) -> dict[str, Artist]:
    """Collect the legend of several panels, measured series first, then published ones, reference lines last."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(str(label), handle)

    def place(label: str) -> tuple[bool, bool, int]:
        # Measured series first, in the study's order; then the paper's, then reference lines.
        known = order.index(label) if label in order else len(order)
        return label in REFERENCES, label.startswith("paper"), known

    return {label: entries[label] for label in sorted(entries, key=place)}


def finish(figure: Figure, title: str, caption: str, legend: dict[str, Artist]) -> None:
    """Set title, legend and caption."""
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    if legend:
        figure.legend(list(legend.values()), list(legend), loc="outside right upper", fontsize=9, frameon=False)
    figure.supxlabel("\n".join(textwrap.wrap(caption.strip(), 120)), fontsize=8.5, x=0.01, ha="left", color="#333333")


def image_bytes(figure: Figure, kind: str) -> bytes:
    """Render a figure, the same bytes for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    # The salt makes the identifiers inside an SVG the same each time.
    with mpl.rc_context({"svg.hashsalt": "ternary_probe", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def write_figures(made: dict[str, Figure], folder: Path) -> dict[str, Path]:
    """Write figures as PNG, an SVG of the same name beside each.

    Args:
        made: Name to figure.
        folder: Where to write; made if missing.

    Returns:
        Name to PNG file.
    """
    written = {}
    for name, figure in made.items():
        written[name] = write_atomically(folder / f"{name}.png", image_bytes(figure, "png"))
        write_atomically(folder / f"{name}.svg", image_bytes(figure, "svg"))
    return written
