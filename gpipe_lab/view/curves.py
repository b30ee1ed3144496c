"""The bubble against the number of micro-batches: formula, simulation and measurement in one picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ..plan import formulas
from ..plan.errors import require, require_count
from ..plan.schedules import gpipe
from ..plan.simulate import simulate
from ..plan.trace import Trace
from .picture import Picture, Sheet
from .style import CURVES, FAINT, INK, PAPER, SOFT, glyphs, look, percent


class Spread(NamedTuple):
    """Several measurements of one setting."""

    middle: float
    lowest: float
    highest: float
    runs: int


def plot_bubble_curve(
    num_stages: Sequence[int] = (2, 4, 8),
    num_microbatches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    *,
    simulated: Sequence[Trace] | None = None,
    measured: Sequence[Trace] = (),
    utilisations: Sequence[float] = (0.7, 0.8),
    title: str | None = None,
) -> Picture:
    """The bubble fraction against M, one curve for each P.

    Lines are the formula (P-1)/(M+P-1); small marks are simulated (by default gpipe is simulated at each
    M); large hollow marks are measured, with the spread where a setting was measured several times. Each
    utilisation u is marked at the M from which on the stages are busy for u of the time,
    M >= (P-1)u/(1-u).
    """
    for value in (*num_stages, *num_microbatches):
        require_count(value, "P or M", where="plot_bubble_curve")
    require(
        bool(num_stages) and bool(num_microbatches) and all(0 < u < 1 for u in utilisations),
        "at least one P and one M, and utilisations between 0 and 1",
        got=f"P={num_stages}, M={num_microbatches}, utilisations={utilisations}",
        where="plot_bubble_curve",
    )
    if simulated is None:
        simulated = [simulate(gpipe(p, m)) for p in num_stages for m in num_microbatches]
    points, spreads = bubbles(simulated), bubbles(measured)
    shown = sorted({*num_stages, *(p for p, _ in spreads)})
    highest = max([*num_microbatches, *(m for _, m in spreads), 2])
    with look():
        sheet = Sheet(
            [3.3],
            headline=title or "The bubble shrinks as micro-batches are added",
            subtitle="line: formula (P−1)/(M+P−1) · small mark: simulated"
            + (f" · {_marks(spreads)}: {measured[0].source}, {_of_what(spreads)}" if measured else ""),
            left=0.7,
            right=0.25,
        )
        (axes,) = sheet.axes
        _dress(axes, highest)
        for index, p in enumerate(shown):
            color, dashes, marker = CURVES[index % len(CURVES)]
            many = np.geomspace(1, highest, 200)
            axes.plot(many, (p - 1) / (many + p - 1), color=color, linestyle=dashes, linewidth=1.6, zorder=3)
            axes.annotate(
                f"P = {p}",
                (1, formulas.bubble_fraction(p, 1)),
                xytext=(9, 5),
                textcoords="offset points",
                color=color,
                fontweight="bold",
            )
            for found, size, fill in ((points, 4.0, color), (spreads, 9.0, "none")):
                mine = {m: spread for (q, m), spread in found.items() if q == p}
                _points(axes, mine, color, marker, size=size, fill=fill)
        taken = _drawn(axes, shown, highest, [(points, 4.0), (spreads, 9.0)])
        for u in utilisations:
            taken += _mark_utilisation(axes, u, shown, highest, taken)
    sheet.picture.alt = _describe(shown, sorted(num_microbatches), spreads, utilisations)
    return sheet.picture


def bubbles(traces: Sequence[Trace]) -> dict[tuple[int, int], Spread]:
    """(P, M) -> the bubble fractions of the traces with that setting: median, lowest, highest."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for trace in traces:
        assert trace.schedule is not None, "a trace carries its schedule"
        found[trace.num_ranks, trace.schedule.num_microbatches].append(trace.bubble_fraction)
    return {
        key: Spread(median(shares), min(shares), max(shares), len(shares))
        for key, shares in sorted(found.items())
    }


def _marks(spreads: Mapping[tuple[int, int], Spread]) -> str:
    return "large mark" + (" with bar" if _repeated(spreads) else "")


def _of_what(spreads: Mapping[tuple[int, int], Spread]) -> str:
    return "median and spread" if _repeated(spreads) else "one run each"


def _repeated(spreads: Mapping[tuple[int, int], Spread]) -> bool:
    return any(spread.runs > 1 for spread in spreads.values())


def _dress(axes: Axes, highest: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.93, highest * 1.04)
    ticks = [2**k for k in range(int(np.log2(highest)) + 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"])
    axes.set_xlabel("micro-batches M", labelpad=2)
    axes.set_ylabel("bubble: idle share of all ranks' time", fontsize=8.5)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _points(
    axes: Axes, spreads: dict[int, Spread], color: str, marker: str, *, size: float, fill: str
) -> None:
    if not spreads:
        return
    middle = np.array([s.middle for s in spreads.values()])
    axes.errorbar(
        list(spreads),
        middle,
        yerr=[
            middle - [s.lowest for s in spreads.values()],
            [s.highest for s in spreads.values()] - middle,
        ],
        linestyle="none",
        marker=marker,
        markersize=size,
        markerfacecolor=fill,
        markeredgewidth=1.4,
        color=color,
        capsize=3 if fill == "none" else 0,
        zorder=5,
        clip_on=False,
    )


class Box(NamedTuple):
    """A rectangle on the page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top


def _at(axes: Axes, x: float, y: float, left: float, bottom: float, right: float, top: float) -> Box:
    """The box that reaches so many points to each side of a point in data."""
    scale = 72 / axes.figure.dpi
    px, py = axes.transData.transform((x, y)) * scale
    return Box(px + left, py + bottom, px + right, py + top)


def _drawn(
    axes: Axes,
    stages: Sequence[int],
    highest: int,
    groups: Sequence[tuple[Mapping[tuple[int, int], Spread], float]],
) -> list[Box]:
    """What no label may cover: curves, and marks with their bars."""
    curves = [
        _at(axes, m, (p - 1) / (m + p - 1), -1, -1, 1, 1)
        for p in stages
        for m in np.geomspace(1, highest, 400)
    ]
    marks = [
        _at(axes, m, share, -size / 2 - 3, -size / 2 - 3, size / 2 + 3, size / 2 + 3)
        for found, size in groups
        for (_, m), spread in found.items()
        for share in (spread.middle, spread.lowest, spread.highest)
    ]
    return curves + marks


LABEL = 7.5  # points
LIFTS = (5, -12, 9, -16, 13, -20, 17, -24)  # points from a level to the foot of its label, best first


def _place(axes: Axes, text: str, x: float, y: float, taken: Sequence[Box]) -> tuple[float, float, Box]:
    """Where a label of the point (x, y) covers least: its lower left corner as an offset in points."""
    width = glyphs(text, LABEL)[1]
    offsets = [(dx, dy) for dy in LIFTS for dx in (4, -4 - width, 9, -9 - width)]
    boxes = [_at(axes, x, y, dx - 1, dy - 1, dx + width + 1, dy + LABEL) for dx, dy in offsets]
    covered = [sum(box.overlaps(other) for other in taken) for box in boxes]
    best = covered.index(min(covered))
    return *offsets[best], boxes[best]


def _mark_utilisation(
    axes: Axes, u: float, stages: Sequence[int], highest: int, taken: Sequence[Box]
) -> list[Box]:
    """A level for the share u, and on it the M that reaches it for each P; where their labels stand."""
    labels: list[Box] = []
    axes.axhline(1 - u, color=SOFT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.text(
        0.95,
        1 - u,
        f"busy {u:.0%}",
        fontsize=7.5,
        color=SOFT,
        va="center",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
    )
    for p in stages:
        needed = formulas.microbatches_for(u, p)
        if 1 <= needed <= highest:
            axes.plot([needed], [1 - u], marker="|", markersize=9, markeredgewidth=1.6, color=INK, zorder=6)
            text = f"M ≥ {needed:.3g}"
            dx, dy, box = _place(axes, text, needed, 1 - u, [*taken, *labels])
            labels.append(box)
            axes.annotate(
                text, (needed, 1 - u), xytext=(dx, dy), textcoords="offset points", fontsize=LABEL, zorder=6
            )
    return labels


def _describe(
    stages: Sequence[int],
    microbatches: Sequence[int],
    spreads: dict[tuple[int, int], Spread],
    utilisations: Sequence[float],
) -> str:
    ends = sorted({microbatches[0], microbatches[-1]})
    lines = [
        f"P = {p}: "
        + ", ".join(f"{percent(formulas.bubble_fraction(p, m))} at M = {m}" for m in ends)
        + "".join(f"; busy {u:.0%} from M = {formulas.microbatches_for(u, p):.3g}" for u in utilisations)
        for p in stages
    ]
    found = [f"P = {p}, M = {m}: {percent(s.middle)}" for (p, m), s in spreads.items()]
    return (
        "Bubble fraction against the number of micro-batches M. Formula: "
        + ". ".join(lines)
        + "."
        + (f" Measured, {_of_what(spreads)}: {'; '.join(found)}." if found else "")
    )
