"""Memory curves: what each rank holds over time, stacked by category, with its peak and its limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from numpy.typing import NDArray

from ..plan.errors import require
from ..plan.memory import CATEGORIES, MemoryReport, in_flight
from ..plan.schedule import Schedule
from ..plan.simulate import Costs, simulate
from .cells import draw_arrows, draw_cells, dress, looks_in, wants_arrows
from .picture import Picture, Sheet
from .style import ALARM, CATEGORY_LOOKS, INK, PAPER, SOFT, Look, binary_step, join, look, size_of

MOST_PANELS = 4


def chosen_ranks(memory: MemoryReport, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks to draw: those asked for, else all up to four, else first, last and the highest peak."""
    if ranks is not None:
        unknown = sorted(set(ranks) - set(memory.ranks))
        require(not unknown, f"ranks are among {memory.ranks}", got=f"{unknown}", where="memory ranks")
        return tuple(ranks)
    if len(memory.ranks) <= MOST_PANELS:
        return memory.ranks
    highest = max(memory.ranks, key=memory.peak_bytes)
    return tuple(sorted({memory.ranks[0], memory.ranks[-1], highest}))


def categories_in(memory: MemoryReport, ranks: Sequence[int]) -> tuple[str, ...]:
    """The categories that any of `ranks` ever holds, in the order they are stacked."""
    held = {row.category for row in memory.rows if row.bytes > 0 and row.rank in ranks}
    return tuple(c for c in CATEGORIES if c in held) + tuple(sorted(held - set(CATEGORIES)))


def _look_of(category: str) -> Look:
    return CATEGORY_LOOKS.get(category, Look(category, "#d9dbde", "#85898f", "oo"))


def memory_legend(categories: Sequence[str], memory: MemoryReport) -> list[Look | str]:
    return [f"bytes held, {memory.source}:", *(_look_of(category) for category in categories)]


def draw_memory(
    panels: Sequence[Axes],
    memory: MemoryReport,
    ranks: Sequence[int],
    categories: Sequence[str],
    *,
    until: float,
    unit: str,
    names: Sequence[str] | None = None,
) -> None:
    """One panel a rank, all to one scale, so that heights compare."""
    top = max([memory.peak_bytes(rank) for rank in ranks] + [memory.limit_bytes or 0, 1])
    round_top = top - top % binary_step(top, most=8)
    for axes, rank in zip(panels, ranks, strict=True):
        _draw_stack(axes, memory, rank, categories, until)
        dress(axes, rows={}, until=until, unit=unit, last=axes is panels[-1])
        axes.set_ylim(0, top * 1.5)
        axes.spines["bottom"].set_visible(True)
        name = names[rank] if names is not None else f"rank {rank}"
        axes.yaxis.set_visible(True)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks([0, round_top], ["0", size_of(round_top)], fontsize=7)
        axes.text(
            -0.006, 0.33, name, transform=axes.transAxes, ha="right", va="center", fontsize=8.5, color=SOFT
        )
        _mark_peak(axes, memory, rank, until)
        if memory.limit_bytes is not None:
            axes.axhline(memory.limit_bytes, color=ALARM, linewidth=1.1, linestyle=(0, (5, 2)), zorder=5)


def _draw_stack(axes: Axes, memory: MemoryReport, rank: int, categories: Sequence[str], until: float) -> None:
    moments = memory.moments(rank)
    if not moments:
        return
    times = _steps([*(moment.time_ms for moment in moments), max(until, moments[-1].time_ms)])[1:]
    base = np.zeros(len(times))
    for category in categories:
        held = [moment.bytes.get(category, 0) for moment in moments]
        top = base + _steps([*held, held[-1]])[:-1]
        style = _look_of(category)
        if np.any(top > base):
            outline = np.column_stack([[*times, *times[::-1]], [*top, *base[::-1]]])
            band = Polygon(
                outline,
                facecolor=style.face,
                edgecolor=style.edge if style.hatch else style.face,
                hatch=style.hatch or None,
                linewidth=0.3,
                zorder=2,
            )
            axes.add_artist(band)  # `fill_between` would find limits that are set anyway, and take longer
        base = top
    axes.add_artist(Line2D(times, base, color=INK, linewidth=0.8, zorder=3))


def _steps(values: Sequence[float]) -> NDArray[np.float64]:
    """Each value twice: with the times one entry later, what holds from a time until the next."""
    return np.repeat(np.asarray(values, dtype=float), 2)


def _mark_peak(axes: Axes, memory: MemoryReport, rank: int, until: float) -> None:
    peak = memory.peak(rank)
    axes.plot([peak.time_ms], [peak.total], marker="v", markersize=5, color=INK, zorder=6, clip_on=False)
    _tell_peak(axes, f"peak {peak_text(memory, rank)}", (peak.time_ms, peak.total), until, gap=6)


def _tell_peak(axes: Axes, text: str, at: tuple[float, float], until: float, *, gap: float = 0) -> None:
    """Write beside a peak what it is, on the side of it that has more room; `gap` in points."""
    left = at[0] < 0.5 * until
    axes.annotate(
        text,
        at,
        xytext=(gap if left else -gap, 3),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
        fontsize=7.5,
        zorder=6,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6, "alpha": 0.9},
    )


def peak_text(memory: MemoryReport, rank: int) -> str:
    """The peak and the operation that caused it: 12 MiB at F7."""
    peak = memory.peak(rank)
    return size_of(peak.total) + (f" at {peak.op.short}" if peak.op is not None else "")


def peaks_text(memory: MemoryReport, ranks: Sequence[int]) -> str:
    """Alt text: the peak of each rank drawn, with the limit if there is one."""
    peaks = ", ".join(f"rank {rank} {peak_text(memory, rank)}" for rank in ranks)
    limit = f" Limit {size_of(memory.limit_bytes)}." if memory.limit_bytes is not None else ""
    return f"Memory, {memory.source}, peak: {peaks}.{limit}"


def plot_memory(
    memory: MemoryReport,
    *,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
    unit: str = "ms",
) -> Picture:
    """What each rank holds over time in bytes, stacked by category, with its peak and the limit.

    `ranks`: all up to four, else the first, the last and the one with the highest peak.
    """
    shown = chosen_ranks(memory, ranks)
    require(bool(shown), "a memory report has at least one row", got="no rows", where="plot_memory")
    categories = categories_in(memory, shown)
    until = max(row.time_ms for row in memory.rows) or 1.0
    schedule = memory.schedule
    what = f"{schedule.name}, P = {schedule.num_ranks}, M = {schedule.num_microbatches}" if schedule else ""
    limit = "" if memory.limit_bytes is None else f"limit {size_of(memory.limit_bytes)} (dashed)"
    with look():
        sheet = Sheet(
            [0.85] * len(shown),
            headline=title or f"Memory of each rank{': ' if what else ''}{what}",
            subtitle=join([what if title else "", memory.source, _highest(memory, shown), limit]),
            legends=[memory_legend(categories, memory)],
            left=1.25,
        )
        draw_memory(sheet.axes, memory, shown, categories, until=until, unit=unit)
    sheet.picture.alt = f"Memory over time. {what}. {peaks_text(memory, shown)}"
    return sheet.picture


def _highest(memory: MemoryReport, ranks: Sequence[int]) -> str:
    rank = max(ranks, key=memory.peak_bytes)
    return f"highest peak {peak_text(memory, rank)} on rank {rank}"


def plot_in_flight(
    schedule: Schedule, costs: Costs | None = None, *, title: str | None = None, unit: str = "ms"
) -> Picture:
    """Micro-batches that each rank holds over simulated time, beneath the schedule that causes them.

    A micro-batch is held from the end of its forward to the end of its backward.
    """
    trace = simulate(schedule, costs)
    ranks = range(schedule.num_ranks)
    counts = {rank: in_flight(schedule, rank) for rank in ranks}
    peaks = [max(counts[rank], default=0) for rank in ranks]
    until = trace.makespan_ms or 1.0
    row = 0.4 if schedule.num_ranks <= 4 else 0.28
    with look():
        sheet = Sheet(
            [row * schedule.num_ranks, *[row * 1.15] * schedule.num_ranks],
            headline=title
            or f"Micro-batches in flight: {schedule.name}, P = {len(peaks)}, M = {schedule.num_microbatches}",
            subtitle=join([trace.source, "peak per rank: " + ", ".join(map(str, peaks))]),
            legends=[looks_in([trace]), [Look("held for a backward", *_look_of("saved")[1:])]],
            legend_above=[0, 1],
        )
        gantt, *panels = sheet.axes
        gantt.set_ylim(schedule.num_ranks - 0.5, -0.5)
        names = [f"rank {rank}" for rank in ranks]
        dress(gantt, rows=dict(enumerate(names)), until=until, unit=unit, last=False)
        draw_cells(gantt, trace, points_per_ms=sheet.inner_points / until)
        if wants_arrows(trace, "auto"):
            draw_arrows(gantt, trace)
        for rank, axes in enumerate(panels):
            mine = [e for e in trace.computations if e.rank == rank]
            ends = {e.op: e.end_ms for e in mine}
            times = [0.0, *(ends[op] for op in schedule.ops[rank] if op in ends), until]
            held = [0, *(n for op, n in zip(schedule.ops[rank], counts[rank], strict=True) if op in ends)]
            held.append(held[-1])
            style = _look_of("saved")
            axes.fill_between(times, held, step="post", color=style.face, zorder=2)
            axes.step(times, held, where="post", color=INK, linewidth=0.8, zorder=3)
            top = max([*peaks, 1])
            dress(axes, rows={top / 2: names[rank]}, until=until, unit=unit, last=axes is panels[-1])
            axes.set_ylim(0, top * 1.6)
            axes.spines["bottom"].set_visible(True)
            at = held.index(peaks[rank])
            _tell_peak(axes, f"peak {peaks[rank]}", (times[at], peaks[rank]), until)
    sheet.picture.alt = (
        f"Micro-batches in flight over simulated time. {schedule.name}, P = {len(peaks)}, "
        f"M = {schedule.num_microbatches}. Peak per rank: {', '.join(map(str, peaks))}."
    )
    return sheet.picture
