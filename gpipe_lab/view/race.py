"""A race: schedules of one model on one time axis, simulated or run, with the memory that each needs."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..plan.errors import require
from ..plan.memory import MemoryReport, peak_in_flight
from ..plan.trace import Trace
from .cells import draw_cells, dress, looks_in
from .gantt import what
from .live import Phase, Tell
from .memory import peak_text
from .picture import Picture, Sheet
from .runner import MEASURING, Runner, does_not_fit
from .settings import Settings, problem, simulated, simulated_memory
from .style import ALARM, INK, PAPER, join, look, number, percent, size_of

if TYPE_CHECKING:
    import pandas

MOST = 4
OVERHEAD_S = 0.5  # of a measured lane besides its pace: workers, the warm-up step


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


@dataclass
class Lanes:
    """Traces and memory by schedule, and for each that is out the reason."""

    settings: Settings
    traces: dict[str, Trace] = field(default_factory=dict)
    memories: dict[str, MemoryReport] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)

    def picture(self) -> Picture | None:
        """None where every lane is out."""
        if not self.traces:
            return None
        words = f"Race: P = {self.settings.num_stages}, M = {self.settings.num_microbatches}"
        title = ", ".join([words, *self.settings.costs.split(", limit")[:1]])
        limit = self.settings.memory_limit
        return plot_race(self.traces, self.memories, limit_bytes=limit, title=title)

    def table(self) -> pandas.DataFrame:
        """`race_table`, with a last column for why a lane is out."""
        import pandas

        if not self.traces:
            return pandas.DataFrame({"out": self.out})
        table = race_table(self.traces, self.memories, limit_bytes=self.settings.memory_limit)
        return table.reindex([*table.index, *self.out]).assign(
            out=[self.out.get(name, "") for name in [*table.index, *self.out]]
        )

    def reasons(self) -> str:
        """HTML: a line for each lane that is out."""
        lines = (f"<li><b>{html.escape(name)}</b>: {html.escape(why)}</li>" for name, why in self.out.items())
        return f"<p>Out of the race:</p><ul>{''.join(lines)}</ul>" if self.out else ""


def simulated_lanes(settings: Settings, names: Sequence[str]) -> Lanes:
    """Every schedule of `names` simulated; one that these settings do not allow is out."""
    lanes = Lanes(settings)
    for name in names:
        lane = replace(settings, schedule=name)
        reason = problem(lane)
        if reason is not None:
            lanes.out[name] = reason
            continue
        lanes.traces[name] = simulated(lane)
        lanes.memories[name] = simulated_memory(lane, lanes.traces[name])
    return lanes


def measured_lanes(settings: Settings, names: Sequence[str], runner: Runner, tell: Tell) -> Lanes:
    """Every schedule of `names` run for real, one after another; one that passes the limit is out."""
    expected = simulated_lanes(settings, names)
    lanes = Lanes(settings, out=expected.out)
    seconds = {name: OVERHEAD_S + trace.makespan_ms / 1000 for name, trace in expected.traces.items()}
    whole, before = sum(seconds.values()), 0.0
    for name, needed in seconds.items():
        done, until = before / whole, (before + needed) / whole
        before += needed

        def progress(text: str, name: str = name, done: float = done, until: float = until) -> None:
            moving = seconds[name] if text == MEASURING else 0.0
            tell(Phase(text=f"{name}: {text}", done=done, until=until, seconds=moving))

        try:
            run = runner.run(replace(settings, schedule=name), progress)
        except Exception as error:
            if not does_not_fit(error):
                raise
            lanes.out[name] = str(error.__cause__)
            continue
        assert run.memory is not None, "a schedule that trains leaves a memory report"
        lanes.traces[name], lanes.memories[name] = run.trace, run.memory
    return lanes
