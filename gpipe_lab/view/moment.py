"""One moment of a trace in words: what every rank does, holds and waits for."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.analysis import Reasons
from ..plan.errors import require
from ..plan.memory import MemoryReport, Moment
from ..plan.ops import Kind, Op
from ..plan.trace import Event, Trace
from .style import number, size_of
from .tables import held_changes

DOING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.R: "recompute",
}


def state_in_words(
    trace: Trace,
    time_ms: float,
    memory: MemoryReport | None = None,
    *,
    row_names: Sequence[str] | None = None,
    unit: str = "ms",
) -> list[str]:
    """A sentence for each rank: what it computes or waits for at `time_ms`, and what it holds.

    An operation lasts from its start up to, not including, its end. The bytes are those of `memory`,
    a report of the same run, where given. Raises `InputError` for a trace without its schedule.
    """
    require(
        trace.schedule is not None,
        "what a rank waits for is read from the trace's schedule",
        got="a trace without one",
        where="state_in_words",
    )
    names = row_names or [f"rank {rank}" for rank in range(trace.num_ranks)]
    reasons = Reasons(trace)
    return [
        f"{names[rank]} {_doing(trace, rank, time_ms, reasons, names, unit)}"
        f"{_holding(trace, rank, time_ms, memory)}."
        for rank in range(trace.num_ranks)
    ]


def _doing(trace: Trace, rank: int, at: float, reasons: Reasons, names: Sequence[str], unit: str) -> str:
    mine = sorted((e for e in trace.computations if e.rank == rank), key=lambda e: e.start_ms)
    running = next((e for e in mine if e.start_ms <= at < e.end_ms), None)
    if running is not None:
        return f"computes {_named(running.op, trace)} until {number(running.end_ms)} {unit}"
    following = next((e for e in mine if e.start_ms > at), None)
    if following is None:
        return "is done" if mine else "has nothing to do"
    until = f"idle until {number(following.start_ms)} {unit}"
    return f"is {until}: {_waiting(trace, following, at, reasons, names, unit)}"


def _waiting(
    trace: Trace, following: Event, at: float, reasons: Reasons, names: Sequence[str], unit: str
) -> str:
    todo = f"its {_named(following.op, trace)}"
    reason = reasons.of(following)
    if reason is None or reason.rank == following.rank:
        return f"{todo} is about to start"
    other = f"the {_named(reason.op, trace)} on {names[reason.rank]}"
    if reason.end_ms <= at:
        return f"{todo} waits for a message; {other} ended at {number(reason.end_ms)} {unit}"
    return f"{todo} waits for {other}"


def _named(op: Op, trace: Trace) -> str:
    assert trace.schedule is not None
    stage = "" if trace.schedule.has_one_stage_a_rank else f" on stage {op.stage}"
    return f"{DOING[op.kind]} of micro-batch {op.microbatch}{stage}"


def _holding(trace: Trace, rank: int, at: float, memory: MemoryReport | None) -> str:
    parts = []
    schedule = trace.schedule
    assert schedule is not None
    if schedule.trains:
        held = sum(change for time, change in held_changes(trace, rank) if time <= at)
        parts.append(f"holds {held} micro-batch{'' if held == 1 else 'es'}")
    moment = moment_at(memory, rank, at) if memory is not None else None
    if moment is not None:
        most = sorted(((n, c) for c, n in moment.bytes.items() if n > 0), reverse=True)[:2]
        split = ", ".join(f"{category} {size_of(n)}" for n, category in most)
        parts.append(f"{'' if parts else 'holds '}{size_of(moment.total)}" + (f" ({split})" if split else ""))
    return f"; {', '.join(parts)}" if parts else ""


def moment_at(memory: MemoryReport, rank: int, at: float) -> Moment | None:
    """What `rank` held at `at`; None before its first entry."""
    return max(
        (moment for moment in memory.moments(rank) if moment.time_ms <= at),
        key=lambda moment: moment.time_ms,
        default=None,
    )
