"""What drives what: boxes and arrows between them, each arrow with a sign."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ..plan.errors import require
from .picture import Picture, Sheet
from .style import ALARM, INK, PAPER, SOFT, look

UP, DOWN = "more", "less"
COLORS = {UP: "#0072B2", DOWN: ALARM}
DASHES: dict[str, Any] = {UP: "-", DOWN: (0, (4, 2))}


class Arrow(NamedTuple):
    """Turning `source` up changes `target`: "more" or "less". `note` says why, in a few words."""

    source: str
    target: str
    effect: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source} up: {self.effect} {self.target}" + (f" ({self.note})" if self.note else "")


def plot_arrows(
    knobs: Mapping[str, str],
    effects: Mapping[str, str],
    arrows: Sequence[Arrow],
    *,
    title: str,
    subtitle: str = "",
    height: float = 3.4,
) -> Picture:
    """Knobs on the left, what they change on the right, an arrow for each influence.

    knobs, effects: {name: a line beneath it}. Solid blue arrows raise their target, dashed red ones lower it.
    """
    known = [*knobs, *effects]
    wrong = [
        arrow
        for arrow in arrows
        if arrow.source not in known or arrow.target not in known or arrow.effect not in COLORS
    ]
    require(
        not wrong,
        'an arrow goes from one box to another, and its effect is "more" or "less"',
        got=f"{wrong[:1]}",
        where="plot_arrows",
        remedy=f"boxes: {', '.join(known)}",
    )
    with look():
        sheet = Sheet([height], headline=title, subtitle=subtitle, left=0.1, right=0.1)
        (axes,) = sheet.axes
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.axis("off")
        places = {**_column(knobs, 0.02, 0.27), **_column(effects, 0.69, 0.29)}
        for arrow in arrows:
            _arrow(axes, arrow, places, arrows)
        for name, (left, bottom, width, tall) in places.items():
            axes.add_patch(
                FancyBboxPatch(
                    (left, bottom), width, tall, boxstyle="round,pad=0.006", facecolor=PAPER, edgecolor=SOFT
                )
            )
            middle = left + width / 2
            axes.text(
                middle,
                bottom + 0.63 * tall,
                name,
                ha="center",
                va="center",
                size=10.5,
                weight="bold",
                color=INK,
            )
            axes.text(
                middle,
                bottom + 0.27 * tall,
                {**knobs, **effects}[name],
                ha="center",
                va="center",
                size=8,
                color=SOFT,
            )
        sheet.picture.alt = f"{title}. " + ". ".join(map(str, arrows)) + "."
    return sheet.picture


Place = tuple[float, float, float, float]


def _column(boxes: Mapping[str, str], left: float, width: float) -> dict[str, Place]:
    """(left, bottom, width, height) of each box of a column, top to bottom."""
    step = 1 / len(boxes)
    tall = min(0.62 * step, 0.2)
    return {name: (left, 1 - (row + 0.5) * step - tall / 2, width, tall) for row, name in enumerate(boxes)}


def _arrow(axes: Axes, arrow: Arrow, places: Mapping[str, Place], arrows: Sequence[Arrow]) -> None:
    (left, bottom, width, tall), (to_left, to_bottom, _, to_tall) = places[arrow.source], places[arrow.target]
    start = (left + width + 0.01, bottom + tall * _share(arrow, arrows, lambda a: a.source))
    end = (to_left - 0.012, to_bottom + to_tall * _share(arrow, arrows, lambda a: a.target))
    color = COLORS[arrow.effect]
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=12,
            color=color,
            linewidth=1.4,
            linestyle=DASHES[arrow.effect],
        )
    )
    at = 0.13  # near its knob, where arrows lie apart
    x, y = start[0] + at * (end[0] - start[0]), start[1] + at * (end[1] - start[1])
    text = arrow.effect + (f": {arrow.note}" if arrow.note else "")
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        size=7.5,
        color=color,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"},
    )


def _share(arrow: Arrow, arrows: Sequence[Arrow], end: Callable[[Arrow], str]) -> float:
    """Where on the side of its box an arrow starts or ends, so that those of one box lie apart."""
    mine = [a for a in arrows if end(a) == end(arrow)]
    return 1 - (mine.index(arrow) + 0.5) / len(mine)
