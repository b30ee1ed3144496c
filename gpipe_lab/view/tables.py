"""The numbers behind the pictures: one small table, and where the difference from the simulation went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from ..plan import formulas
from ..plan.errors import require
from ..plan.ops import Kind, Op
from ..plan.simulate import OpTimes, costs_of, replay, simulate
from ..plan.trace import PACED, Trace
from .style import number

if TYPE_CHECKING:
    import pandas

ROWS = ("makespan (ms)", "bubble (%)", "useful (%)", "peak in flight")


def summary_table(
    simulated: Trace, measured: Trace | Sequence[Trace] | None = None, *, predicted: bool = True
) -> pandas.DataFrame:
    """Makespan, bubble, useful share and peak in flight (highest rank): predicted, simulated, measured.

    "predicted" holds the closed forms with the simulated trace's times; it is empty where they do not
    apply (unequal stages, a schedule without a formula). With several measured traces the median
    stands beside the lowest and highest.
    """
    import pandas

    columns: dict[str, Sequence[float | None]] = {}
    if predicted:
        columns["predicted"] = _predicted(simulated)
    columns["simulated"] = _observed(simulated)
    runs = [measured] if isinstance(measured, Trace) else list(measured or ())
    if runs:
        observed = list(zip(*(_observed(run) for run in runs), strict=True))
        columns[runs[0].source] = [median(row) for row in observed]
        if len(runs) > 1:
            columns["lowest"] = [min(row) for row in observed]
            columns["highest"] = [max(row) for row in observed]
    return pandas.DataFrame(columns, index=list(ROWS), dtype=float).round(2)


def _observed(trace: Trace) -> list[float]:
    return [
        trace.makespan_ms,
        100 * trace.bubble_fraction,
        100 * trace.useful_fraction,
        float(max(held_at_once(trace), default=0)),
    ]


def held_at_once(trace: Trace) -> tuple[int, ...]:
    """The most micro-batches each rank held between forward and backward, read from the events."""
    changes = [sorted(held_changes(trace, rank)) for rank in range(trace.num_ranks)]
    return tuple(max(accumulate((change for _, change in mine), initial=0)) for mine in changes)


def held_changes(trace: Trace, rank: int) -> list[tuple[float, int]]:
    """(time, 1) when a forward of `rank` ends, (time, -1) when its backward does, or its W where split."""
    schedule = trace.schedule
    if schedule is None or not schedule.trains:
        return []
    changes = []
    for e in trace.computations:
        if e.rank != rank or e.op.segment:
            continue
        split = Op(Kind.W, e.op.stage, e.op.microbatch) in schedule.rank_of
        if e.op.kind is Kind.F:
            changes.append((e.end_ms, 1))
        elif e.op.kind is (Kind.W if split else Kind.B):
            changes.append((e.end_ms, -1))
    return changes


def _predicted(trace: Trace) -> list[float | None]:
    """The closed forms, where they hold."""
    schedule = trace.schedule
    assert schedule is not None, "a trace carries its schedule"
    p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.num_stages // schedule.num_ranks
    times = _equal_times(trace)
    recomputed = sum(op.kind is Kind.R and op.segment == 0 for op in schedule.rank_of)
    applies = (
        times is not None
        and schedule.num_replicas == 1
        and (recomputed == 0 or (recomputed == schedule.num_stages * m and schedule.recompute_waits))
    )
    if not applies or times is None:
        return [None] * len(ROWS)
    forward, backward, recompute, inputs, weights = times
    work = v * m * (forward + backward + recompute)  # of one rank
    match schedule.name:
        case "naive":
            makespan = formulas.naive_ms(p, m, forward, backward + recompute)
        case "gpipe" | "one_f_one_b" | "forward_only":
            makespan = formulas.pipeline_ms(p, m, forward, backward + recompute)
        case "interleaved" if m % p == 0:
            makespan = formulas.interleaved_ms(p, m, v, forward, backward + recompute)
        case "zero_bubble_h1" if m >= p and not recomputed and weights <= min(forward, inputs):
            makespan = work + formulas.zero_bubble_h1_bubble_ms(p, forward, inputs, weights)
        case _:
            return [None] * len(ROWS)
    if schedule.name == "interleaved":
        peak = formulas.interleaved_peak(p, m, v)
    else:
        peak = max(formulas.peak_in_flight(schedule.name, p, m, stage) for stage in range(p))
    busy = work / makespan if makespan else 0.0
    useful = busy * (1 - v * m * recompute / work) if work else 0.0
    return [makespan, 100 * (1 - busy), 100 * useful, float(peak)]


def _equal_times(trace: Trace) -> tuple[float, ...] | None:
    """Forward, backward, recompute, backward_input and -weight in ms, if no stage or micro-batch differs."""
    costs = costs_of(trace)
    kinds = (costs.forward, costs.backward, costs.recompute, costs.backward_input, costs.backward_weight)
    times = []
    for cost in kinds:
        per_stage = [0.0] if cost is None else [cost] if isinstance(cost, int | float) else list(cost)
        if max(per_stage) - min(per_stage) > 1e-9 * max(1.0, max(per_stage)):
            return None
        times.append(float(per_stage[0]))
    return tuple(times)


@dataclass(frozen=True)
class ErrorExplained:
    """Measured minus simulated makespan, split into parts that add up to it. Prints as one line."""

    measured_ms: float
    simulated_ms: float
    parts_ms: dict[str, float]
    note: str = ""

    def __str__(self) -> str:
        gap = self.measured_ms - self.simulated_ms
        share = f" ({100 * gap / self.simulated_ms:+.1f} %)" if self.simulated_ms else ""
        parts = ", ".join(f"{name} {value:+.1f}" for name, value in self.parts_ms.items())
        return (
            f"error explained: measured {number(self.measured_ms)} ms − simulated "
            f"{number(self.simulated_ms)} ms = {gap:+.1f} ms{share}: {parts}"
            + (f"; {self.note}" if self.note else "")
        )

    __repr__ = __str__

    def frame(self) -> pandas.DataFrame:
        """One row a part: ms, and per cent of the simulated makespan."""
        import pandas

        values = {**self.parts_ms, "total": self.measured_ms - self.simulated_ms}
        scale = 100 / self.simulated_ms if self.simulated_ms else 0.0
        return pandas.DataFrame(
            {"ms": list(values.values()), "% of simulated": [v * scale for v in values.values()]},
            index=list(values),
        ).round(2)


def explain_error(measured: Trace, simulated: Trace, *, contention: float | None = None) -> ErrorExplained:
    """Where the measured makespan's difference from the simulated one comes from, in ms.

    Schedules are laid out again with the measured times of the operations, one cause at a time, so the
    parts add up to the difference: computation (the typical operation is slower or faster than assumed),
    imbalance (operations differ from the typical one), pace missed (operations of a paced run that took
    longer than their pace), and communication and launch (waiting that neither the operations' own times
    nor the simulated messages explain).

    contention: how many times as long work takes while every rank works (`doctor(contention=True)`). For
    an unpaced run, the computation part is then split: "contention" is what that factor predicts from how
    many other ranks worked during each operation, at most the whole part; computation is the rest.
    """
    require(
        contention is None or contention > 0,
        "contention is a time over a time, above 0",
        got=f"contention={contention}",
        where="explain_error",
    )
    require(
        measured.schedule is not None and simulated.schedule is not None,
        "both traces carry their schedule",
        got="a trace without one",
        where="explain_error",
    )
    schedule = measured.schedule
    assert schedule is not None
    own = {e.op: e.duration_ms for e in measured.computations}
    assumed = {e.op: e.duration_ms for e in simulated.computations}
    require(
        own.keys() == assumed.keys(),
        "both traces hold the same operations",
        got=f"{len(own.keys() ^ assumed.keys())} operations that only one of them has",
        where="explain_error",
        remedy="simulate the schedule that was measured, with the same checkpoint mode",
    )
    paced = measured.source == PACED
    held = {op: min(time, assumed[op]) for op, time in own.items()} if paced else own
    typical = _typical(held, assumed)

    def makespan(times: dict[Op, float]) -> float:
        return simulate(schedule, OpTimes(times)).makespan_ms

    replayed = replay(measured).makespan_ms
    messages = simulated.makespan_ms - makespan(assumed)  # what the simulation allows for them
    parts = {
        "computation": makespan(typical) - makespan(assumed),
        "imbalance": makespan(held) - makespan(typical),
        "pace missed": replayed - makespan(held),
        "communication and launch": measured.makespan_ms - replayed - messages,
    }
    if not paced:
        del parts["pace missed"]
    if contention is not None and not paced:
        slowed = {op: assumed[op] * slower for op, slower in _slowdowns(measured, contention).items()}
        predicted = makespan(slowed) - makespan(assumed)
        share = max(0.0, min(parts["computation"], predicted))
        parts = {"contention": share, **parts, "computation": parts["computation"] - share}
    note = f"{measured.overran} of {len(own)} operations overran their pace" if measured.overran else ""
    return ErrorExplained(measured.makespan_ms, simulated.makespan_ms, parts, note)


def _typical(own: dict[Op, float], assumed: dict[Op, float]) -> dict[Op, float]:
    """The assumed times, each kind scaled by the median ratio of its own times to the assumed ones."""
    ratios: dict[Kind, list[float]] = defaultdict(list)
    for op, time in own.items():
        if assumed[op] > 0:
            ratios[op.kind].append(time / assumed[op])
    return {op: assumed[op] * median(ratios[op.kind] or [1.0]) for op in own}


def _slowdowns(trace: Trace, factor: float) -> dict[Op, float]:
    """For each operation: 1 where it ran alone, `factor` where all ranks worked, in proportion between."""
    others = max(1, trace.num_ranks - 1)
    slowdowns = {}
    for event in trace.computations:
        shared = sum(
            max(0.0, min(event.end_ms, other.end_ms) - max(event.start_ms, other.start_ms))
            for other in trace.computations
            if other.rank != event.rank
        )
        company = shared / event.duration_ms / others if event.duration_ms else 0.0
        slowdowns[event.op] = 1 + (factor - 1) * company
    return slowdowns
