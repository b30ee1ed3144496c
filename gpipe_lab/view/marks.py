"""What is drawn over a Gantt chart: the critical path, and the moment that somebody looks at."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ..plan.analysis import CriticalPath, Step
from .cells import ONE_ROW_A_RANK, Rows
from .style import INK, PAPER, Line, number

PATH = Line("critical path", "-", 2.4)
MARGIN = 0.08  # of a row: the box of a leg stands around its cells
MOST_LEGS = 8  # that are told in words


def draw_path(axes: Axes, path: CriticalPath, rows: Rows = ONE_ROW_A_RANK) -> None:
    """A heavy box around each stretch on one rank, and a heavy line to the next rank."""
    half = rows.height / 2 + MARGIN
    boxes, jumps = [], []
    for leg in path.legs:
        y = rows.middle(leg[0].rank)
        start, end = leg[0].start_ms, leg[-1].end_ms
        boxes.append(
            [(start, y - half), (end, y - half), (end, y + half), (start, y + half), (start, y - half)]
        )
    for leg, following in zip(path.legs, path.legs[1:], strict=False):
        y, to = rows.middle(leg[-1].rank), rows.middle(following[0].rank)
        way = 1 if to > y else -1
        jumps.append([(leg[-1].end_ms, y + way * half), (following[0].start_ms, to - way * half)])
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(boxes)
    corners = [corner for box in boxes for corner in box]
    for color, width in ((PAPER, 4.0), (INK, PATH.width)):  # white beneath, to stand out from dark cells
        style = {"edgecolor": color, "linewidth": width, "fill": False, "zorder": 8}
        if corners:
            axes.add_artist(PathPatch(Path(corners, codes), joinstyle="miter", **style))
        lines = LineCollection(jumps, colors=color, linewidths=width, zorder=8)
        axes.add_collection(lines, autolim=False)


def draw_moment(panels: Sequence[Axes], at_ms: float, label: str) -> None:
    """A line at one time through all `panels`, with the time written on the time axis."""
    for axes in panels:
        axes.axvline(at_ms, color=PAPER, linewidth=3.6, zorder=9)
        axes.axvline(at_ms, color=INK, linewidth=1.6, zorder=9.1)
    panels[-1].annotate(  # over the axis, like a cursor's reading
        label,
        (at_ms, 0),
        xycoords=("data", "axes fraction"),
        xytext=(0, -4),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=8,
        color=PAPER,
        zorder=9.2,
        bbox={"facecolor": INK, "edgecolor": INK, "pad": 1.6},
    )


def path_in_words(path: CriticalPath) -> str:
    """The ranks it goes through, and what its time consists of; a path of many legs by its two ends."""
    legs = [_leg_in_words(leg) for leg in path.legs]
    if len(legs) > MOST_LEGS:
        legs = [*legs[:4], f"{len(legs) - 6} more", *legs[-2:]]
    parts = ", ".join(f"{name} {number(ms)}" for name, ms in path.lengths_ms.items())
    return f"{' → '.join(legs)}; {parts}"


def _leg_in_words(leg: Sequence[Step]) -> str:
    ops = leg[0].op.short if len(leg) == 1 else f"{leg[0].op.short} to {leg[-1].op.short}"
    return f"rank {leg[0].rank} {ops}"
