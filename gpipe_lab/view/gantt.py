"""Gantt charts: one trace with the memory beneath it, a schedule in unit time, and several traces at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..plan.analysis import CriticalPath
from ..plan.errors import require
from ..plan.memory import MemoryReport, Moment
from ..plan.ops import Kind
from ..plan.schedule import Schedule
from ..plan.simulate import Costs, simulate
from ..plan.trace import Event, Trace
from .cells import (
    ONE_ROW_A_RANK,
    Rows,
    busy_shares,
    draw_arrows,
    draw_cells,
    dress,
    label_bubble,
    looks_in,
    wants_arrows,
)
from .marks import PATH, draw_moment, draw_path, path_in_words
from .memory import categories_in, chosen_ranks, draw_memory, memory_legend, peaks_text
from .picture import Picture, Sheet
from .style import CURVES, INK, SOFT, Line, join, look, number, percent


def plot_trace(
    trace: Trace,
    memory: MemoryReport | None = None,
    *,
    title: str | None = None,
    arrows: bool | str = "auto",
    memory_ranks: Sequence[int] | None = None,
    row_names: Sequence[str] | None = None,
    notes: Sequence[str] | None = None,
    kind_names: Mapping[Kind, str] | None = None,
    unit: str = "ms",
    until_ms: float | None = None,
    rows_height: float | None = None,
    path: CriticalPath | None = None,
    at_ms: float | None = None,
) -> Picture:
    """What every rank did when: a Gantt chart, with the memory on the same time axis where given.

    Ranks go from top to bottom, time from left to right in ms. `arrows`: messages from send to receive,
    "auto" leaves them out where they are dense. `memory_ranks`: whose memory is drawn; all up to four
    ranks, else the first, the last and the one that peaks highest. `row_names` and `notes` stand left
    and right of the rows, `kind_names` in the legend. `until_ms` fixes the end of the time axis and
    `rows_height` (inches) the height of the chart, so that pictures compare. `unit` names the time axis.
    `path` (`critical_path(trace)`) is boxed from rank to rank; `at_ms` is a moment, marked by a line through
    the chart and the memory.
    """
    require(
        isinstance(trace, Trace),
        "what is drawn is a trace, simulated or measured",
        got=type(trace).__name__,
        where="plot_trace",
        remedy="run.trace, gl.simulate(schedule), or gl.plot_schedule(schedule)",
    )
    shown = chosen_ranks(memory, memory_ranks) if memory is not None else ()
    categories = categories_in(memory, shown) if memory is not None else ()
    names = row_names or [f"rank {rank}" for rank in range(trace.num_ranks)]
    require(
        len(names) == trace.num_ranks and (notes is None or len(notes) == trace.num_ranks),
        "row_names and notes have one entry per rank",
        got=f"{len(names)} names for {trace.num_ranks} ranks",
        where="plot_trace",
    )
    facts = _facts(trace, unit)
    headline = title or what(trace)
    marked = [key for key, is_drawn in ((PATH, path is not None), (PEAK, bool(shown))) if is_drawn]
    with look():
        sheet = Sheet(
            [rows_height or _rows_height(trace.num_ranks), *[0.62] * len(shown)],
            headline=headline,
            subtitle=join(["" if what(trace) in headline else what(trace), facts]),
            legends=[
                [*looks_in([trace], kind_names), *marked],
                *([memory_legend(categories, memory)] if memory is not None else []),
            ],
            legend_above=[0, 1] if memory is not None else [0],
            left=_left(names),
            right=0.15 if notes is None else 0.3 + 0.062 * max(16, *map(len, notes)),
        )
        gantt, *panels = sheet.axes
        until = until_ms or _until(trace)
        per_ms = sheet.inner_points / until
        gantt.set_ylim(trace.num_ranks - 0.5, -0.5)
        dress(gantt, rows=dict(enumerate(names)), until=until, unit=unit, last=not shown)
        draw_cells(gantt, trace, points_per_ms=per_ms)
        if wants_arrows(trace, arrows):
            draw_arrows(gantt, trace)
        label_bubble(gantt, trace, points_per_ms=per_ms)
        for rank, note in enumerate(notes or ()):
            gantt.annotate(
                note,
                (1, rank),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=SOFT,
            )
        if memory is not None:
            draw_memory(panels, memory, shown, categories, until=until, unit=unit, names=names)
            for rank in shown:
                _mark_peak(gantt, cause(trace, rank, memory.peak(rank)), ONE_ROW_A_RANK)
        if path is not None:
            draw_path(gantt, path)
        if at_ms is not None:
            draw_moment(sheet.axes, at_ms, f"{number(at_ms)} {unit}")
    sheet.picture.alt = " ".join(
        [
            _describe(trace, names, headline, facts) + (peaks_text(memory, shown) if memory else ""),
            *([f"Critical path: {path_in_words(path)}."] if path is not None else []),
            *([f"Marked moment: {number(at_ms)} {unit}."] if at_ms is not None else []),
        ]
    ).strip()
    return sheet.picture


def plot_schedule(schedule: Schedule, costs: Costs | None = None, *, title: str | None = None) -> Picture:
    """A schedule laid out by the simulator; without `costs` every operation takes one unit of time."""
    trace = simulate(schedule, costs or UNIT_COSTS)
    return plot_trace(trace, title=title, unit="slots" if costs is None else "ms")


PEAK = Line("memory peak of its rank", (0, (1, 1)), 2.0)  # apart from the path's unbroken boxes
UNIT_COSTS = Costs(forward=1.0, backward=1.0, backward_input=1.0, backward_weight=1.0, recompute=1.0)


def plot_overlay(
    traces: Sequence[Trace],
    labels: Sequence[str] | None = None,
    *,
    title: str | None = None,
    by: str = "rank",
    unit: str = "ms",
) -> Picture:
    """Several traces (predicted, simulated, measured) on one time axis, each one's end as a line.

    `by="rank"` puts the rows of one rank together, `by="trace"` draws one chart beneath the other.
    """
    labels = [trace.source for trace in traces] if labels is None else list(labels)
    require(
        0 < len(traces) == len(labels),
        "an overlay takes at least one trace, and one label for each",
        got=f"{len(traces)} traces and {len(labels)} labels",
        where="plot_overlay",
    )
    require(by in ("rank", "trace"), 'by is "rank" or "trace"', got=repr(by), where="plot_overlay")
    rows, place, names = _grouped([trace.num_ranks for trace in traces], labels, by)
    ends = [Line(f"end of {label}", _dashes(index)) for index, label in enumerate(labels)]
    until = 1.005 * max(_until(trace) for trace in traces)
    with look():
        sheet = Sheet(
            [min(0.2 * len(names), 7.0) + 0.1],
            headline=title or f"{what(traces[0])}: {_listed(labels)} on one time axis",
            subtitle=join(
                f"{label}: {number(trace.makespan_ms)} {unit}, bubble {percent(trace.bubble_fraction)}"
                for label, trace in zip(labels, traces, strict=True)
            ),
            legends=[[*looks_in(traces), *ends]],
            left=_left(names),
        )
        (axes,) = sheet.axes
        axes.set_ylim(max(place.values()) + 0.6, -0.6)
        dress(axes, rows=dict(zip(place.values(), names, strict=True)), until=until, unit=unit)
        for index, trace in enumerate(traces):
            draw_cells(axes, trace, rows[index], points_per_ms=sheet.inner_points / until)
            end = trace.start_ms + trace.makespan_ms
            axes.axvline(end, color=INK, linestyle=_dashes(index), linewidth=1.1, zorder=6)
    sheet.picture.alt = f"Gantt charts on one time axis. {what(traces[0])}. " + " ".join(
        f"{label} ({trace.source}): makespan {number(trace.makespan_ms)} {unit}, "
        f"bubble {percent(trace.bubble_fraction)}."
        for label, trace in zip(labels, traces, strict=True)
    )
    return sheet.picture


def _dashes(index: int) -> Any:
    return CURVES[index % len(CURVES)][1]


def _grouped(
    num_ranks: Sequence[int], labels: Sequence[str], by: str
) -> tuple[list[Rows], dict[tuple[int, int], float], list[str]]:
    """Rows for each trace, the place of every (trace, rank), and the names of the places in order."""
    pairs = [(index, rank) for index, count in enumerate(num_ranks) for rank in range(count)]
    if by == "rank":
        pairs.sort(key=lambda pair: pair[1])
    group = 1 if by == "rank" else 0  # which of (trace, rank) is kept together
    gap = 0.45 if by == "rank" else 0.6
    place: dict[tuple[int, int], float] = {}
    names = []
    for at, pair in enumerate(pairs):
        is_first = at == 0 or pairs[at - 1][group] != pair[group]
        place[pair] = at + gap * (len({p[group] for p in pairs[: at + 1]}) - 1)
        parts = labels[pair[0]], f"rank {pair[1]}"
        first, second = parts[::-1] if by == "rank" else parts
        names.append(f"{first}   {second}" if is_first else second)

    def rows(index: int) -> Rows:
        return Rows(lambda rank: place[index, rank], 0.84)

    return [rows(index) for index in range(len(labels))], place, names


def cause(trace: Trace, rank: int, moment: Moment) -> Event | None:
    """The computation of `trace` after which `rank` held what it held at `moment`."""
    mine = [e for e in trace.computations if e.rank == rank]
    named = next((e for e in mine if e.op == moment.op), None)
    before = [e for e in mine if e.start_ms <= moment.time_ms]
    return named or max(before, key=lambda e: e.start_ms, default=None)


def _mark_peak(axes: Axes, event: Event | None, rows: Rows) -> None:
    if event is None:
        return
    corner = (event.start_ms, rows.middle(event.rank) - rows.height / 2)
    style: dict[str, Any] = {"linestyle": PEAK.dashes, "linewidth": PEAK.width, "zorder": 7}
    axes.add_patch(Rectangle(corner, event.duration_ms, rows.height, fill=False, edgecolor=INK, **style))


def _rows_height(num_ranks: int) -> float:
    return max(0.55, num_ranks * (0.44 if num_ranks <= 4 else 0.34 if num_ranks <= 8 else 0.24))


def _until(trace: Trace) -> float:
    return (trace.start_ms + trace.makespan_ms) or 1.0


def _left(names: Sequence[str]) -> float:
    return max(0.5, 0.2 + 0.073 * max(map(len, names)))


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def what(trace: Trace) -> str:
    """Schedule, P and M, and whether it recomputes."""
    schedule = trace.schedule
    if schedule is None:
        return f"P = {trace.num_ranks}"
    name = schedule.name
    stages = "" if schedule.has_one_stage_a_rank else f" ({schedule.num_stages} stages)"
    replicas = f"{schedule.num_replicas} replicas, " if schedule.num_replicas > 1 else ""
    p, m = schedule.ranks_per_replica, schedule.microbatches_per_replica
    recompute = ", recompute" if any(op.kind is Kind.R for op in schedule.rank_of) else ""
    return f"{name}, {replicas}P = {p}{stages}, M = {m}{recompute}"


def _facts(trace: Trace, unit: str) -> str:
    """Provenance, device, makespan, bubble; the useful share where recompute makes it differ."""
    bubble, useful = trace.bubble_fraction, trace.useful_fraction
    return join(
        [
            trace.source + (f" on {trace.device}" if trace.device else ""),
            f"makespan {number(trace.makespan_ms)} {unit}",
            f"bubble {percent(bubble)}",
            f"useful {percent(useful)}" if abs(1 - bubble - useful) > 1e-9 else "",
            _overran(trace.overran),
            _unsplit(trace),
        ]
    )


def _overran(count: int) -> str:
    if count == 1:
        return "1 operation overran its pace"
    return f"{count} operations overran their pace" if count else ""


def _unsplit(trace: Trace) -> str:
    """At which stages a backward was not split; `trace.notes` says why."""
    stages = sorted({stage for stage, _ in trace.unsplit})
    return f"not split: stage {', '.join(map(str, stages))}" if stages else ""


def _describe(trace: Trace, names: Sequence[str], headline: str, facts: str) -> str:
    shares = zip(names, busy_shares(trace), strict=True)
    busy = ", ".join(f"{name} {percent(share)}" for name, share in shares)
    told = join([headline, "" if what(trace) in headline else what(trace), facts])
    notes = "".join(f"{note} " for note in trace.notes)
    return f"Gantt chart. {told.replace(' · ', '; ')}. Busy: {busy}. {notes}"
