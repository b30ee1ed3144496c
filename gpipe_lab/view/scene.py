"""The explorer's pictures and lines of words, from settings and a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..plan.analysis import critical_path
from ..plan.memory import MemoryReport, peak_in_flight
from ..plan.ops import Kind
from ..plan.trace import SIMULATED, Trace
from .cells import busy_shares
from .gantt import plot_trace, what
from .picture import Picture
from .settings import Settings
from .style import number, percent
from .tables import held_at_once

ROWS_HEIGHT = 2.5  # inches: the chart keeps its size while P changes
NICE = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10)


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What things are called: a pipeline's words, or a laundry's."""

    stages: str = "P stages"
    microbatches: str = "M micro-batches"
    row: str = "rank"
    rows: Sequence[str] = ()  # names of the rows where exactly so many are shown
    title: str = ""  # with {stages} and {microbatches}
    unit: str = "ms"
    run_unit: str = "ms"  # of a measured trace, where one stands for the other
    kinds: Mapping[Kind, str] = field(default_factory=dict)  # other names in the legend
    held: str = "holds"
    memory: bool = True  # whether a run shows what its ranks hold
    help_stages: str = "P: how many stages the model is cut into, each on its own rank"
    help_microbatches: str = "M: how many micro-batches go through the pipeline in one step"

    def names(self, num_rows: int) -> list[str]:
        return list(self.rows) if num_rows == len(self.rows) else [f"{self.row} {k}" for k in range(num_rows)]


LAUNDRY = Wording(
    stages="stations",
    microbatches="loads",
    row="station",
    rows=("wash", "dry", "fold"),
    title="The laundry: {microbatches} loads, {stages} stations",
    unit="min",
    run_unit="min, each run as 1 ms",
    memory=False,
    kinds={Kind.F: "a load in the machine"},
    help_stages="how many machines each load goes through, one after the other",
    help_microbatches="how many loads of laundry there are",
)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What is drawn over a chart: the critical path, and a moment."""

    path: bool = False
    at_ms: float | None = None


NO_MARKS = Marks()


def draw(
    settings: Settings,
    trace: Trace,
    memory: MemoryReport | None,
    wording: Wording,
    *,
    until: float | None = None,
    rows_height: float | None = None,
    marks: Marks = NO_MARKS,
) -> Picture:
    """The explorer's picture of a trace, simulated or measured, with its memory where given."""
    schedule = trace.schedule
    assert schedule is not None, "a trace of the explorer carries its schedule"
    is_simulated = trace.source == SIMULATED
    held = peak_in_flight(schedule) if is_simulated else held_at_once(trace)
    return plot_trace(
        trace,
        memory if memory is not None and memory.rows and wording.memory else None,
        title=title(settings, trace, wording),
        notes=notes(trace, held, wording),
        row_names=wording.names(trace.num_ranks),
        kind_names=wording.kinds,
        unit=wording.unit if is_simulated else wording.run_unit,
        until_ms=until,
        rows_height=rows_height,
        path=critical_path(trace) if marks.path else None,
        at_ms=marks.at_ms,
    )


def notes(trace: Trace, held: Sequence[int], wording: Wording) -> list[str]:
    """What stands beside each row: its busy share, and the most micro-batches it holds at once."""
    return [
        f"{percent(busy)} busy" + (f", {wording.held} {count}" if any(held) else "")
        for busy, count in zip(busy_shares(trace), held, strict=True)
    ]


def title(settings: Settings, trace: Trace, wording: Wording) -> str:
    if not wording.title:
        return ", ".join(filter(None, [what(trace), settings.costs]))
    return wording.title.format(stages=settings.num_stages, microbatches=settings.num_microbatches)


def summary(trace: Trace, unit: str) -> str:
    """One line of main numbers."""
    return f"{trace.source}: {number(trace.makespan_ms)} {unit}, bubble {percent(trace.bubble_fraction)}"


def axis_end(held: float, makespan: float) -> float:
    """The end of the time axis: as it was while the trace fills 45 % of it or more, else a round number."""
    if 0.45 * held <= makespan <= held:
        return held
    power = 1.0
    while power * 10 <= makespan:
        power *= 10
    while power > makespan > 0:
        power /= 10
    return next((nice * power for nice in NICE if nice * power >= makespan * (1 - 1e-9)), makespan) or 1.0
