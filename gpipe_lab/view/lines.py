"""Quantities against a setting: one line for each case, with what was measured marked on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from ..plan.errors import require
from .picture import Picture, Sheet
from .style import CURVES, FAINT, binary_step, join, look, number, size_of

Points = Mapping[float, float]  # x -> y


def plot_lines(
    lines: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    measured: Mapping[str, Points] | None = None,
    subtitle: str = "",
    log_x: bool = False,
    in_bytes: bool = False,
    height: float = 2.9,
) -> Picture:
    """Lines of y against x, each named in the legend, from zero up.

    lines: what is predicted, simulated or recorded, {name: {x: y}}. measured: hollow marks on the line of
    the same name, or a name of their own. in_bytes: y is shown as KiB or MiB.
    """
    measured = measured or {}
    names = list(dict.fromkeys([*lines, *measured]))
    points = [*lines.values(), *measured.values()]
    require(
        bool(points) and all(points),
        "a picture of lines has at least one, each with at least one point",
        got=f"{len(points)} lines",
        where="plot_lines",
        remedy='plot_lines({"peak": {1: 3.0, 2: 6.0}}, ...)',
    )
    show_y = size_of if in_bytes else number
    with look():
        sheet = Sheet(
            [height],
            headline=title,
            subtitle=join([subtitle, "large hollow mark: measured" if measured else ""]),
            left=0.85,
            right=0.25,
        )
        (axes,) = sheet.axes
        for index, name in enumerate(names):
            color, dashes, marker = CURVES[index % len(CURVES)]
            label: str | None = name
            if name in lines:
                _draw(axes, lines[name], color, label=label, linestyle=dashes, linewidth=1.6)
                label = None
            if name in measured:
                hollow: dict[str, Any] = {"marker": marker, "markersize": 8, "markerfacecolor": "none"}
                _draw(axes, measured[name], color, label=label, linestyle="none", **hollow)
        _dress(axes, points, log_x=log_x, x_label=x_label, y_label=y_label)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: show_y(y)))
        if in_bytes:
            axes.yaxis.set_major_locator(MultipleLocator(binary_step(axes.get_ylim()[1])))
    sheet.picture.alt = f"{title}. {y_label} against {x_label}. " + " ".join(
        f"{name} ({kind}): {_ends(found, show_y)}."
        for kind, group in (("line", lines), ("measured", measured))
        for name, found in group.items()
    )
    return sheet.picture


def _draw(axes: Axes, points: Points, color: str, **style: Any) -> None:
    at = sorted(points)
    axes.plot(at, [points[x] for x in at], color=color, markeredgewidth=1.4, clip_on=False, **style)


def _dress(axes: Axes, points: Sequence[Points], *, log_x: bool, x_label: str, y_label: str) -> None:
    places = sorted({x for found in points for x in found})
    highest = max(y for found in points for y in found.values())
    lowest = min(0.0, *(y for found in points for y in found.values()))
    if log_x:
        axes.set_xscale("log", base=2)
    if len(places) <= 16:
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()
    elif not log_x and all(float(x).is_integer() for x in places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(lowest, highest * 1.12 or 1.0)
    axes.set_xlabel(x_label, labelpad=2)
    axes.set_ylabel(y_label, fontsize=8.5)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, handlelength=3.2)


def _ends(points: Points, show_y: Any) -> str:
    ends = sorted(points)[:: max(1, len(points) - 1)]
    return ", ".join(f"{show_y(points[x])} at {x:g}" for x in ends)
