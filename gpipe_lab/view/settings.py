"""The panel's settings as a value, and what follows from them without any widget or process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..plan.errors import InputError
from ..plan.memory import MemoryReport, peak_in_flight
from ..plan.ops import Kind
from ..plan.partition import uniform
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from ..plan.simulate import Costs, simulate
from ..plan.trace import Trace
from .cells import busy_shares
from .gantt import plot_trace, what
from .picture import Picture
from .style import number, percent
from .tables import held_at_once

NUM_LAYERS = 16
CHECKPOINTS = ("never", "always", "except_last", "every:2")
LONGEST_RUN_MS = 60_000
ROWS_HEIGHT = 2.5  # inches: the chart keeps its size while P changes
NICE = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point of the panel. `ratio` is backward over forward time; `forward_ms` is of one micro-batch."""

    num_stages: int = 4
    num_microbatches: int = 8
    schedule: str = "gpipe"
    checkpoint: str = "never"
    ratio: float = 2.0
    forward_ms: float = 10.0

    @property
    def backward_ms(self) -> float:
        return self.ratio * self.forward_ms

    @property
    def words(self) -> str:
        """All of them as one line: what tells a run from another."""
        sizes = f"{self.schedule}, P = {self.num_stages}, M = {self.num_microbatches}"
        return ", ".join(filter(None, [sizes, self.costs]))

    @property
    def costs(self) -> str:
        """Ratio and checkpoint mode; nothing where there is no backward."""
        if self.schedule == "forward_only":
            return ""
        return f"backward ÷ forward = {self.ratio:g}, checkpoint {self.checkpoint}"


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


def authored(settings: Settings) -> Schedule:
    """The schedule without recompute, as a lab runs it; `InputError` for settings it does not allow."""
    return SCHEDULES[settings.schedule](settings.num_stages, settings.num_microbatches)


def simulated(settings: Settings) -> Trace:
    """What the simulator predicts for these settings."""
    layers = [len(part) for part in uniform(NUM_LAYERS, settings.num_stages)]
    schedule = with_recompute(authored(settings), settings.checkpoint, layers_per_stage=layers)
    return simulate(schedule, Costs(forward=settings.forward_ms, backward=settings.backward_ms))


def problem(settings: Settings) -> str | None:
    """Why these settings cannot be run, in one line, or None."""
    try:
        layers = uniform(NUM_LAYERS, settings.num_stages)
        schedule = authored(settings)
        every = parse_mode(settings.checkpoint)
    except InputError as error:
        return f"{error.rule} (got {error.got})"
    if settings.checkpoint != "never" and not schedule.trains:
        return f"checkpoint={settings.checkpoint!r}: without a backward there is nothing to recompute"
    fewest = min(map(len, layers))
    if every is not None and fewest < every:
        return f"{settings.checkpoint!r} needs {every} layers in every stage; here one has {fewest}"
    longest = settings.num_stages * settings.num_microbatches * (settings.forward_ms + settings.backward_ms)
    if settings.schedule == "naive" and longest > LONGEST_RUN_MS:
        return f"a run would take {number(longest / 1000)} s, more than {LONGEST_RUN_MS / 1000:.0f} s"
    return None


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


def draw(
    settings: Settings,
    trace: Trace,
    wording: Wording,
    *,
    until: float | None = None,
    rows_height: float | None = None,
) -> Picture:
    """The panel's picture of a simulated trace."""
    schedule = trace.schedule
    assert schedule is not None, "a simulated trace carries its schedule"
    return plot_trace(
        trace,
        title=title(settings, trace, wording),
        notes=notes(trace, peak_in_flight(schedule), wording),
        row_names=wording.names(trace.num_ranks),
        kind_names=wording.kinds,
        unit=wording.unit,
        until_ms=until,
        rows_height=rows_height,
    )


def draw_measured(
    settings: Settings,
    trace: Trace,
    memory: MemoryReport | None,
    wording: Wording,
    *,
    until: float | None = None,
) -> Picture:
    """The panel's picture of a run, with its memory."""
    return plot_trace(
        trace,
        memory if memory is not None and memory.rows and wording.memory else None,
        title=title(settings, trace, wording),
        notes=notes(trace, held_at_once(trace), wording),
        row_names=wording.names(trace.num_ranks),
        kind_names=wording.kinds,
        unit=wording.run_unit,
        until_ms=until,
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
