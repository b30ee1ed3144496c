"""A race: schedules of one model on one time axis, with the memory that each needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..plan.errors import require
from ..plan.memory import MemoryReport, peak_in_flight
from ..plan.trace import Trace
from .cells import draw_cells, dress, looks_in
from .gantt import what
from .memory import peak_text
from .picture import Picture, Sheet
from .style import ALARM, INK, PAPER, join, look, number, percent, size_of

if TYPE_CHECKING:
    import pandas

MOST = 4


def plot_race(
    traces: Mapping[str, Trace],
    memories: Mapping[str, MemoryReport] | None = None,
    *,
    limit_bytes: int | None = None,
    title: str | None = None,
    unit: str = "ms",
) -> Picture:
    """Up to four schedules, {name: trace}, each one's end as a line; the quickest that fits comes first.

    `memories` are their memory reports; one whose peak is above `limit_bytes` is struck out. A report
    measured under a limit fits by itself.
    """
    _check(traces, memories)
    order = _order(traces, memories, limit_bytes)
    until = 1.02 * max(trace.makespan_ms for trace in traces.values()) or 1.0
    most_ranks = max(trace.num_ranks for trace in traces.values())
    row = 0.2 if most_ranks <= 4 else 0.14
    sources = ", ".join(dict.fromkeys(trace.source for trace in traces.values()))
    limit = f"memory limit {size_of(limit_bytes)} a rank" if limit_bytes is not None else ""
    lines = {name: _line(place, name, traces, memories, limit_bytes, unit) for place, name in order}
    with look():
        sheet = Sheet(
            [0.01, *[max(0.5, row * traces[name].num_ranks) for _, name in order]],
            headline=title or f"Race: {_sizes(traces)}",
            subtitle=join([sources, limit, "line: the end"]),
            legends=[looks_in(traces.values())],
            gap=0.3,
            left=0.35,
        )
        spare, *bands = sheet.axes
        spare.set_visible(False)  # the room between the legend and the first name
        for axes, (_, name) in zip(bands, order, strict=True):
            trace = traces[name]
            axes.set_ylim(trace.num_ranks - 0.5, -0.5)
            ranks = {0.0: "0", trace.num_ranks - 1.0: str(trace.num_ranks - 1)}
            dress(axes, rows=ranks, until=until, unit=unit, last=axes is bands[-1])
            draw_cells(axes, trace, points_per_ms=sheet.inner_points / until, numbers=most_ranks <= 4)
            axes.axvline(trace.start_ms + trace.makespan_ms, color=INK, linewidth=1.8, zorder=6)
            fits = _fits(memories, name, limit_bytes)
            axes.text(
                0,
                1.06,
                lines[name],
                transform=axes.transAxes,
                fontsize=9,
                color=INK if fits else ALARM,
                weight="bold" if fits else "normal",
            )
            if not fits:
                _strike_out(axes)
    sheet.picture.alt = f"Race on one time axis. {_sizes(traces)}; {sources}. " + " ".join(
        f"{line}." for line in (limit, *lines.values()) if line
    )
    return sheet.picture


def race_table(
    traces: Mapping[str, Trace],
    memories: Mapping[str, MemoryReport] | None = None,
    *,
    limit_bytes: int | None = None,
) -> pandas.DataFrame:
    """One row a schedule, the quickest that fits first: makespan, bubble, peaks, whether it fits."""
    import pandas

    _check(traces, memories)
    rows = {}
    for _, name in _order(traces, memories, limit_bytes):
        trace, schedule = traces[name], traces[name].schedule
        assert schedule is not None, "checked"
        peak = "" if memories is None else size_of(max(map(memories[name].peak_bytes, memories[name].ranks)))
        rows[name] = {
            "makespan (ms)": round(trace.makespan_ms, 2),
            "bubble (%)": round(100 * trace.bubble_fraction, 2),
            "most in flight": max(peak_in_flight(schedule)),
            "peak of a rank": peak,
            "fits": "yes" if _fits(memories, name, limit_bytes) else "no",
            "source": trace.source,
        }
    return pandas.DataFrame.from_dict(rows, orient="index")


def _check(traces: Mapping[str, Trace], memories: Mapping[str, MemoryReport] | None) -> None:
    require(
        1 <= len(traces) <= MOST,
        f"a race has one to {MOST} schedules",
        got=f"{len(traces)}",
        where="plot_race",
        remedy='plot_race({"gpipe": trace, "one_f_one_b": other})',
    )
    require(
        all(trace.schedule is not None for trace in traces.values())
        and (memories is None or traces.keys() <= memories.keys()),
        "every trace carries its schedule, and has a memory report if one has",
        got=f"traces {list(traces)}, memories {list(memories or {})}",
        where="plot_race",
    )


def _fits(memories: Mapping[str, MemoryReport] | None, name: str, limit: int | None) -> bool:
    if memories is None or limit is None:
        return True
    return max((memories[name].peak_bytes(rank) for rank in memories[name].ranks), default=0) <= limit


def _order(
    traces: Mapping[str, Trace], memories: Mapping[str, MemoryReport] | None, limit: int | None
) -> list[tuple[int | None, str]]:
    """(place, name): those that fit by makespan, equals share a place; then the others, without one."""
    ordered = sorted(traces, key=lambda n: (not _fits(memories, n, limit), round(traces[n].makespan_ms, 6)))
    times = sorted({round(traces[n].makespan_ms, 6) for n in traces if _fits(memories, n, limit)})
    return [
        (times.index(round(traces[n].makespan_ms, 6)) + 1 if _fits(memories, n, limit) else None, n)
        for n in ordered
    ]


def _line(
    place: int | None,
    name: str,
    traces: Mapping[str, Trace],
    memories: Mapping[str, MemoryReport] | None,
    limit: int | None,
    unit: str,
) -> str:
    trace = traces[name]
    parts = [f"{number(trace.makespan_ms)} {unit}", f"bubble {percent(trace.bubble_fraction)}"]
    if memories is not None:
        report = memories[name]
        rank = max(report.ranks, key=report.peak_bytes)
        parts.append(f"peak {peak_text(report, rank)} on rank {rank}")
    if place is None:
        parts.append(f"does not fit into {size_of(limit or 0)}")
    return f"{'—' if place is None else f'{place}.'} {name}: {', '.join(parts)}"


def _sizes(traces: Mapping[str, Trace]) -> str:
    sizes = {what(trace).partition(", ")[2] for trace in traces.values()}
    return sizes.pop() if len(sizes) == 1 else f"{len(traces)} schedules"


def _strike_out(axes: Axes) -> None:
    axes.add_patch(
        Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor=PAPER, alpha=0.55, linewidth=0, zorder=7)
    )
    axes.plot([0, 1], [0, 1], transform=axes.transAxes, color=ALARM, linewidth=1.4, zorder=8)
