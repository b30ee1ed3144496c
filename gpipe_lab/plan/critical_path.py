"""The critical path: the chain of operations and messages that makes a step as long as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .errors import require
from .ops import COMPUTE, RECEIVES, Kind, Op
from .schedule import Schedule, peer, send_of
from .trace import COMM_LANE, SIMULATED, Event, Trace

if TYPE_CHECKING:
    import pandas

WORK = "compute"  # an operation
MESSAGE = "message"  # from the end of an operation to the start of the one on another rank that needed it
PAUSE = "pause"  # between two operations of one rank that nothing else explains: launch, a busy machine


class Step(NamedTuple):
    """A stretch of the path. `rank` and `op` are those that compute, or that the stretch leads to."""

    kind: str
    rank: int
    op: Op
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class CriticalPath:
    """Steps without a gap from a trace's start to its end: their lengths add up to its makespan."""

    steps: tuple[Step, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The operations on the path, in order of time."""
        return tuple(step.op for step in self.steps if step.kind == WORK)

    @cached_property
    def lengths_ms(self) -> dict[str, float]:
        """What the path consists of: F, B, I, W, R, message, pause → ms. They add up to the makespan."""
        lengths: dict[str, float] = defaultdict(float)
        for step in self.steps:
            lengths[step.op.kind.value if step.kind == WORK else step.kind] += step.length_ms
        return dict(lengths)

    @cached_property
    def legs(self) -> tuple[tuple[Step, ...], ...]:
        """The path's operations, cut where it goes over to another rank."""
        legs: list[list[Step]] = []
        for step in self.steps:
            if step.kind == WORK:
                if not legs or legs[-1][-1].rank != step.rank:
                    legs.append([])
                legs[-1].append(step)
        return tuple(tuple(leg) for leg in legs)

    def __str__(self) -> str:
        """The ranks it goes through with what each does there, then what it consists of."""
        through = " → ".join(f"rank {leg[0].rank}: {_span(leg)}" for leg in self.legs)
        parts = ", ".join(f"{name} {length:.4g} ms" for name, length in self.lengths_ms.items())
        return f"{through}; {parts}"

    def frame(self) -> pandas.DataFrame:
        """One row a step: kind, rank, op, start_ms, end_ms, length_ms."""
        import pandas

        rows = [{**s._asdict(), "op": str(s.op), "length_ms": s.length_ms} for s in self.steps]
        return pandas.DataFrame(rows, columns=[*Step._fields, "length_ms"])


def critical_path(trace: Trace) -> CriticalPath:
    """The chain that ends with the last operation, followed back to the start of the trace.

    An operation starts when the one before it on its rank has ended and its inputs are there. The path
    goes back to whichever came last; of equals it stays on the rank, so that it changes ranks as late as
    can be. In a simulated trace every step is the whole reason for the next: one ms more in any of them
    is one ms more in the makespan.

    A measured receive is stamped when its rank takes the message, which may be long after it came. So a
    message is taken to have travelled as long as the quickest one between the same two stages, and what
    an operation waited beyond its reason belongs to the step before it ("message" or "pause").
    Raises `InputError` for a trace without its schedule.
    """
    require(
        trace.schedule is not None,
        "a critical path follows the dependencies of a trace's schedule",
        got="a trace without one",
        where="critical_path",
        remedy="Trace(events, source, schedule)",
    )
    return CriticalPath(tuple(reversed(list(_backwards(trace)))))


def _backwards(trace: Trace) -> Iterator[Step]:
    """The steps from the last to the first. Each ends where the one after it begins."""
    reasons = Reasons(trace)
    event = max(trace.computations, key=lambda e: e.end_ms, default=None)
    at = event.end_ms if event else 0.0
    while event is not None:
        yield Step(WORK, event.rank, event.op, event.start_ms, at)
        at = event.start_ms
        reason = reasons.of(event)
        ended = trace.start_ms if reason is None else min(reason.end_ms, at)
        if ended < at:
            stays = reason is None or reason.rank == event.rank
            yield Step(PAUSE if stays else MESSAGE, event.rank, event.op, ended, at)
            at = ended
        event = reason


class Reasons:
    """Why each computation of a trace started no sooner."""

    def __init__(self, trace: Trace) -> None:
        assert trace.schedule is not None, "checked before"
        self.schedule = trace.schedule
        self.ran = {e.op: e for e in trace.computations}
        self.before: dict[Op, Event] = {}  # the computation before it on its rank
        last: dict[int, Event] = {}
        for event in sorted(trace.computations, key=lambda e: (e.start_ms, e.end_ms)):
            if event.rank in last:
                self.before[event.op] = last[event.rank]
            last[event.rank] = event
        self.arrived = self._arrivals(trace)

    def _arrivals(self, trace: Trace) -> dict[Op, float]:
        """When each message was there, by its receive."""
        taken = {e.op: e.end_ms for e in trace.events if e.lane == COMM_LANE and e.op.kind in RECEIVES}
        if trace.source == SIMULATED:
            return taken
        sent = {peer(send): e.end_ms for e in trace.computations if (send := send_of(e.op, self.schedule))}
        flights: dict[tuple[Kind, int], float] = {}
        for receive in taken.keys() & sent.keys():
            link = receive.kind, receive.stage
            flights[link] = min(taken[receive] - sent[receive], flights.get(link, float("inf")))
        return {op: sent[op] + max(0.0, flights[op.kind, op.stage]) for op in taken.keys() & sent.keys()}

    def of(self, event: Event) -> Event | None:
        """The computation whose end, or whose message, `event` waited for; None at the very start."""
        before = self.before.get(event.op)
        found = [(before.end_ms, True, before)] if before is not None else []
        for op in sources(event.op, self.schedule):
            source = self.ran.get(op)
            if source is not None and source.rank != event.rank:
                send = send_of(op, self.schedule)
                there = self.arrived.get(peer(send), source.end_ms) if send else source.end_ms
                found.append((there, False, source))
        return max(found, key=lambda reason: reason[:2])[2] if found else None


def sources(op: Op, schedule: Schedule) -> tuple[Op, ...]:
    """The computations whose results `op` needs, through the messages of a lowered schedule."""
    found: list[Op] = []
    for needed in schedule.needs[op]:
        found += [needed] if needed.kind in COMPUTE else sources(needed, schedule)
    return tuple(found)


def _span(leg: tuple[Step, ...]) -> str:
    first, last = leg[0].op, leg[-1].op
    return str(first) if len(leg) == 1 else f"{first} to {last}"
