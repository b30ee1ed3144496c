"""The bubble taken apart, as bars: one for each trace, one stretch for each cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from ..plan.analysis import Bubble, take_apart
from ..plan.errors import require
from ..plan.trace import Trace
from .picture import Picture, Sheet
from .style import FAINT, INK, PAPER, PARTS, SOFT, glyphs, join, look, number, percent

if TYPE_CHECKING:
    import pandas

BAR = 0.62  # of a row


def plot_bubble(traces: Mapping[str, Trace], *, title: str | None = None) -> Picture:
    """The idle share of each trace, {label: trace}, in the parts that `take_apart` finds.

    The bars are per cent of all ranks' time and end at `Trace.bubble_fraction`; beside each stands the
    other meaning of "bubble", idle time over busy time.
    """
    require(
        bool(traces),
        "a picture of bubbles has at least one trace",
        got="none",
        where="plot_bubble",
        remedy='plot_bubble({"gpipe": trace})',
    )
    bubbles = {label: take_apart(trace) for label, trace in traces.items()}
    found = [name for name in PARTS if any(_shares(b)[name] > 5e-4 for b in bubbles.values())]
    until = 100 * max(max(b.share for b in bubbles.values()), 0.01) * 1.28
    with look():
        sheet = Sheet(
            [0.42 * len(bubbles) + 0.1],
            headline=title or "The bubble taken apart",
            subtitle=join(
                ["idle time of all ranks as a share of their whole time", "in brackets: idle ÷ busy time"]
            ),
            legends=[[PARTS[name] for name in found]],
            left=max(0.9, 0.25 + max(glyphs(label, 8.5)[1] for label in bubbles) / 72),
            right=0.2,
        )
        (axes,) = sheet.axes
        axes.set_ylim(len(bubbles) - 0.5, -0.5)
        axes.set_xlim(0, until)
        axes.set_yticks(range(len(bubbles)), list(bubbles))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("% of all ranks' time", fontsize=8.5, color=SOFT, labelpad=2)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        for row, bubble in enumerate(bubbles.values()):
            _draw_bar(axes, row, bubble, points_per_percent=sheet.inner_points / until)
    sheet.picture.alt = f"Stacked bars. {title or 'The bubble taken apart'}. " + " ".join(
        f"{label} ({bubble.source}): {bubble_in_words(bubble)}." for label, bubble in bubbles.items()
    )
    return sheet.picture


def bubble_in_words(bubble: Bubble) -> str:
    """Both meanings, and the parts that are there."""
    parts = ", ".join(f"{name} {percent(share)}" for name, share in _shares(bubble).items() if share > 5e-4)
    return (
        f"bubble {percent(bubble.share)} of all time"
        + (f" ({parts})" if parts else "")
        + f", {percent(bubble.overhead)} of the busy time"
    )


def bubble_table(traces: Mapping[str, Trace]) -> pandas.DataFrame:
    """% of all ranks' time by part, one column a trace; then the meanings of "bubble", and the idle ms."""
    import pandas

    columns = {}
    for label, trace in traces.items():
        bubble = take_apart(trace)
        shares = {name: 100 * share for name, share in _shares(bubble).items()}
        columns[label] = {
            **shares,
            "bubble: idle ÷ all time (%)": 100 * bubble.share,
            "overhead: idle ÷ busy time (%)": 100 * bubble.overhead,
            "within the longest rank's span (%)": 100 * bubble.within,
            "idle, all ranks (ms)": bubble.idle_ms,
        }
    return pandas.DataFrame(columns).round(2)


def _shares(bubble: Bubble) -> dict[str, float]:
    total = bubble.makespan_ms * bubble.num_ranks
    return {name: ms / total if total else 0.0 for name, ms in bubble.parts_ms.items()}


def _draw_bar(axes: Axes, row: int, bubble: Bubble, *, points_per_percent: float) -> None:
    at = 0.0
    for name, share in _shares(bubble).items():
        if share <= 5e-4:
            continue
        style, width = PARTS[name], 100 * share
        axes.barh(
            row,
            width,
            BAR,
            left=at,
            facecolor=style.face,
            edgecolor=style.edge,
            hatch=style.hatch or None,
            linewidth=0.6,
        )
        text = number(width)
        if glyphs(text, 8)[1] + 6 <= width * points_per_percent:
            quiet = {"facecolor": style.face, "edgecolor": "none", "pad": 1.2}
            middle = at + width / 2
            axes.text(
                middle, row, text, ha="center", va="center", fontsize=8, color=style.ink, bbox=quiet, zorder=4
            )
        at += width
    axes.annotate(
        f"{percent(bubble.share)}  ({percent(bubble.overhead)})",
        (at, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
    )
