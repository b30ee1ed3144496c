"""Drawing one trace into axes: cells, waits, numbers, arrows. Collections only, so that it is quick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Transform

from ..plan.ops import SENDS, Kind
from ..plan.schedule import Schedule
from ..plan.trace import WAIT_LANE, Event, Trace, messages
from .style import FAINT, IDLE, INK, KINDS, PAPER, SIZES, SOFT, WAITING, Look, fitting_size, glyphs, percent

MOST_ARROWS = 64


class Gap(NamedTuple):
    """A stretch in which a rank computes nothing."""

    rank: int
    start_ms: float
    end_ms: float


class Rows(NamedTuple):
    """Where ranks stand in axes: the middle of each row, and the height of its cells."""

    middle: Callable[[int], float]
    height: float = 0.74


ONE_ROW_A_RANK = Rows(float)


def looks_in(traces: Iterable[Trace], names: Mapping[Kind, str] | None = None) -> list[Look]:
    """The legend: what occurs in these traces, in a fixed order, under other names where given."""
    traces = tuple(traces)
    kinds = {e.op.kind for trace in traces for e in trace.computations}
    waits = any(e.lane == WAIT_LANE for trace in traces for e in trace.events)
    names = names or {}
    cells = [
        look._replace(label=names.get(kind, look.label)) for kind, look in KINDS.items() if kind in kinds
    ]
    return [*cells, *([WAITING] if waits else []), IDLE]


def gaps(trace: Trace) -> list[Gap]:
    """Every rank's idle stretches between the trace's first and last computation."""
    end = trace.start_ms + trace.makespan_ms
    found = []
    for rank in range(trace.num_ranks):
        at = trace.start_ms
        for event in sorted((e for e in trace.computations if e.rank == rank), key=lambda e: e.start_ms):
            if event.start_ms > at:
                found.append(Gap(rank, at, event.start_ms))
            at = max(at, event.end_ms)
        if end > at:
            found.append(Gap(rank, at, end))
    return found


def label_of(event: Event, schedule: Schedule | None) -> str:
    """The number in a cell: the micro-batch, with a letter for the stage where its rank has several."""
    if schedule is None or schedule.has_one_stage_a_rank:
        return str(event.op.microbatch)
    chunk = schedule.stages_of(event.rank).index(event.op.stage)
    return f"{event.op.microbatch}{'abcdefghijklmnopqrstuvwxyz'[chunk % 26]}"


def busy_shares(trace: Trace) -> list[float]:
    """Each rank's busy share of the makespan, in one pass."""
    busy = [0.0] * trace.num_ranks
    for event in trace.computations:
        busy[event.rank] += event.duration_ms
    makespan = trace.makespan_ms
    return [time / makespan if makespan else 0.0 for time in busy]


def draw_cells(
    axes: Axes,
    trace: Trace,
    rows: Rows = ONE_ROW_A_RANK,
    *,
    points_per_ms: float,
    numbers: bool = True,
) -> None:
    """Computations as filled cells and waits as hatched ones; the axes' limits are set before."""
    waits = [e for e in trace.events if e.lane == WAIT_LANE and e.duration_ms > 0]
    _fill(axes, waits, rows, WAITING, linewidth=0.3, zorder=1)
    by_kind: dict[Kind, list[Event]] = defaultdict(list)
    for event in trace.computations:
        by_kind[event.op.kind].append(event)
    typical = np.median([e.duration_ms for e in trace.computations] or [1.0]) * points_per_ms
    for kind, events in by_kind.items():
        _fill(axes, events, rows, KINDS[kind], linewidth=min(0.8, typical / 8), zorder=2)
    if numbers:
        draw_numbers(axes, trace, rows, points_per_ms=points_per_ms)


def _fill(
    axes: Axes, events: Sequence[Event], rows: Rows, look: Look, *, linewidth: float, zorder: float
) -> None:
    """All boxes of one look as one path: a hatch costs time per path."""
    if not events:
        return
    x = np.array([(e.start_ms, e.end_ms) for e in events])[:, [0, 1, 1, 0, 0]]
    middle = np.array([rows.middle(e.rank) for e in events])[:, None]
    y = middle + np.array([-0.5, -0.5, 0.5, 0.5, -0.5]) * rows.height
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(events)
    boxes = PathPatch(
        Path(np.stack([x, y], axis=-1).reshape(-1, 2), codes),
        facecolor=look.face,
        edgecolor=look.edge,
        hatch=look.hatch or None,
        linewidth=linewidth,
        zorder=zorder,
    )
    axes.add_artist(boxes)


def draw_numbers(axes: Axes, trace: Trace, rows: Rows, *, points_per_ms: float) -> None:
    """Micro-batch numbers, all at one size, in the kinds of cells that have room for them."""
    room = rows.height * abs(axes.bbox.height / np.subtract(*axes.get_ylim())) * 72 / axes.figure.dpi
    sizes = [size for size in SIZES if size <= room - 1]
    if not sizes or not trace.computations:
        return
    cells: dict[Kind, list[tuple[Event, str]]] = defaultdict(list)
    for event in trace.computations:
        cells[event.op.kind].append((event, label_of(event, trace.schedule)))
    wanted = {}
    for kind, found in cells.items():
        widths = [event.duration_ms * points_per_ms for event, _ in found]
        wanted[kind] = fitting_size([label for _, label in found], widths, sizes)
    size = min((fit for fit in wanted.values() if fit), default=None)
    if size is None:
        return
    scale = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    for kind, found in cells.items():
        if wanted[kind] is None:
            continue
        look = KINDS[kind]
        paths = [glyphs(label, size) for _, label in found]
        at = [((e.start_ms + e.end_ms) / 2, rows.middle(e.rank)) for e, _ in found]
        if look.hatch:  # a number over a hatch needs a quiet patch under it
            _stamp(axes, [_patch(width, size) for _, width in paths], at, look.face, scale, zorder=3)
        _stamp(axes, [path for path, _ in paths], at, look.ink, scale, zorder=4)


def _patch(width: float, size: float) -> Path:
    return Path.unit_rectangle().transformed(Affine2D().translate(-0.5, -0.5).scale(width + 2, size + 0.5))


def _stamp(
    axes: Axes, paths: list[Path], at: list[tuple[float, float]], color: str, scale: Transform, zorder: int
) -> None:
    stamps = PathCollection(
        paths, offsets=at, offset_transform=axes.transData, facecolors=color, linewidths=0, zorder=zorder
    )
    stamps.set_transform(scale)
    axes.add_collection(stamps, autolim=False)


def draw_arrows(axes: Axes, trace: Trace, rows: Rows = ONE_ROW_A_RANK) -> int:
    """A thin arrow for every message, from the end of its send's row to its receiver's; returns how many."""
    segments = []
    tips: dict[str, list[tuple[float, float]]] = {"v": [], "^": []}
    for send, receive in messages(trace):
        way = 1 if receive.rank > send.rank else -1
        start = (send.start_ms, rows.middle(send.rank) + way * rows.height * 0.38)
        tip = (
            max(receive.end_ms, send.start_ms),
            rows.middle(receive.rank) - way * rows.height * 0.5,
        )
        segments.append((start, tip))
        tips["v" if way > 0 else "^"].append(tip)
    axes.add_collection(LineCollection(segments, colors=INK, linewidths=0.7, zorder=5), autolim=False)
    for marker, points in tips.items():
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linestyle="none", marker=marker, markersize=3, color=INK, zorder=5)
    return len(segments)


def wants_arrows(trace: Trace, arrows: bool | str) -> bool:
    """`arrows`: True, False, or "auto" for as long as they can be told apart."""
    sends = sum(e.op.kind in SENDS for e in trace.events)
    return 0 < sends <= MOST_ARROWS if arrows == "auto" else bool(arrows)


def label_bubble(axes: Axes, trace: Trace, *, points_per_ms: float) -> None:
    """Write the bubble's share into the longest idle stretch that has room for it."""
    widest = max(gaps(trace), key=lambda gap: gap.end_ms - gap.start_ms, default=None)
    bubble = trace.bubble_fraction
    if widest is None or bubble < 0.0005:
        return
    share = percent(bubble)
    room = (widest.end_ms - widest.start_ms) * points_per_ms - 6
    wordings = (f"bubble: {share} of all time", f"bubble {share}", share)
    text = next((wording for wording in wordings if 4.9 * len(wording) < room), None)
    if text is None:
        return
    axes.text(
        (widest.start_ms + widest.end_ms) / 2,
        widest.rank,
        text,
        ha="center",
        va="center",
        fontsize=8.5,
        color=INK,
        zorder=6,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )


def dress(axes: Axes, *, rows: Mapping[float, str], until: float, unit: str, last: bool = True) -> None:
    """Row names on the left, time along the bottom, faint verticals to follow a moment up and down."""
    axes.set_xlim(0, until)
    axes.yaxis.set_visible(False)
    for middle, name in rows.items():
        axes.annotate(
            name,
            (0, middle),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=SOFT,
        )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if last:
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"time ({unit})", fontsize=8.5, color=SOFT, labelpad=2)
    else:
        _draw_verticals(axes)
        axes.spines["bottom"].set_visible(False)


def _draw_verticals(axes: Axes) -> None:
    """The grid alone: an axis and its ticks would take longer than all the cells above them."""
    axes.xaxis.set_visible(False)
    lines = [[(time, 0.0), (time, 1.0)] for time in axes.xaxis.get_majorticklocs()]
    grid = LineCollection(
        lines,
        transform=axes.get_xaxis_transform(),
        colors=FAINT,
        linewidths=0.6,
        capstyle="projecting",
        zorder=0.5,
    )
    axes.add_collection(grid, autolim=False)
