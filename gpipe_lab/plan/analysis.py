"""What a trace says about its schedule: the bubble taken apart, and the path that decides the makespan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .errors import require
from .ops import COMPUTE, RECEIVES, WORDS, Kind, Op, peer
from .schedule import Schedule, dependencies, send_of
from .simulate import OpTimes, simulate
from .trace import COMM_LANE, SIMULATED, Event, Trace

if TYPE_CHECKING:
    import pandas


PARTS = {
    "fill": "before a rank's first operation",
    "middle": "between a rank's first and last operation, though all else is ideal",
    "drain": "after a rank's last operation",
    "imbalance": "gone if every operation of a kind took equally long",
    "communication": "gone if messages took no time (measured: with what launching costs)",
    "recompute": "gone if nothing were recomputed; the recomputing itself is busy time",
}

NOISE = 1e-9  # of all time: sums of the same times in other orders differ by less


@dataclass(frozen=True)
class Bubble:
    """Idle time summed over ranks, in ms, and its parts, which add up to it. See `take_apart`."""

    parts_ms: dict[str, float]
    busy_ms: float
    makespan_ms: float
    num_ranks: int
    longest_span_ms: float  # of a rank, from its first operation's start to its last one's end
    source: str

    @property
    def idle_ms(self) -> float:
        return self.makespan_ms * self.num_ranks - self.busy_ms

    @property
    def share(self) -> float:
        """Idle over total time, `Trace.bubble_fraction`: (P-1)/(M+P-1) for GPipe (§2.3)."""
        total = self.makespan_ms * self.num_ranks
        return self.idle_ms / total if total else 0.0

    @property
    def overhead(self) -> float:
        """Idle over busy time, Megatron-LM's "bubble" (§2.2): (P-1)/M for GPipe."""
        return self.idle_ms / self.busy_ms if self.busy_ms else 0.0

    @property
    def within(self) -> float:
        """1 − busy/(longest span × ranks): the share of Zero Bubble (§5), blind to who starts later."""
        total = self.longest_span_ms * self.num_ranks
        return 1 - self.busy_ms / total if total else 0.0

    def __str__(self) -> str:
        total = self.makespan_ms * self.num_ranks
        parts = ", ".join(
            f"{name} {100 * ms / total:.1f} %" for name, ms in self.parts_ms.items() if total and ms > 0
        )
        return (
            f"bubble, {self.source}: {100 * self.share:.1f} % of all time"
            + (f" = {parts}" if parts else "")
            + f"; {100 * self.overhead:.1f} % over the ideal time"
        )

    def frame(self) -> pandas.DataFrame:
        """One row a part and their total: ms of all ranks, % of all time, % of busy time, what it means."""
        import pandas

        values = {**self.parts_ms, "total": self.idle_ms}
        total, busy = self.makespan_ms * self.num_ranks or 1.0, self.busy_ms or 1.0
        return pandas.DataFrame(
            {
                "ms": [round(ms, 2) for ms in values.values()],
                "% of all time": [round(100 * ms / total, 2) for ms in values.values()],
                "% of busy time": [round(100 * ms / busy, 2) for ms in values.values()],
                "what it is": [PARTS.get(name, "the bubble") for name in values],
            },
            index=list(values),
        )


def take_apart(trace: Trace) -> Bubble:
    """Idle time of all ranks (P × makespan − busy time) by cause, for a simulated or a measured trace.

    The trace's own operations are laid out again, each rank's in its order, with one cause after another
    taken away. The idle time that goes with a cause is its part:

    1. communication: every message arrives at once. In a measured trace launching goes too.
    2. imbalance: every operation takes the mean time of its kind, over stages and micro-batches.
    3. recompute: every recompute takes no time.

    What is left is the shape of the schedule: fill is before a rank's first operation, drain after its
    last, middle in between. No part is negative: a cause whose removal would leave more idle time (equal
    stages can suit an order that was made for unequal ones worse) counts as 0 and stays. Equal stages,
    free messages and no recompute therefore leave fill, middle and drain only.
    Raises `InputError` for a trace without its schedule.
    """
    authored = _schedule_of(trace, "take_apart")
    schedule = _computing(authored)
    own = {e.op: e.duration_ms for e in trace.computations}
    parts = dict.fromkeys(PARTS, 0.0)
    total = trace.makespan_ms * trace.num_ranks
    left, times = trace, own
    for cause, change in (("communication", dict), ("imbalance", _evened), ("recompute", _spared)):
        changed = change(times)
        without = simulate(schedule, OpTimes(changed))
        gain = _idle(left) - _idle(without)
        if gain > NOISE * total:
            parts[cause], left, times = gain, without, changed
    parts |= _shape(left)
    return Bubble(
        parts,
        busy_ms=sum(own.values()),
        makespan_ms=trace.makespan_ms,
        num_ranks=trace.num_ranks,
        longest_span_ms=max((end - start for start, end in _spans(trace)), default=0.0),
        source=trace.source,
    )


def _schedule_of(trace: Trace, where: str) -> Schedule:
    require(
        trace.schedule is not None,
        "what a trace is made of follows from its schedule, so it carries one",
        got="a trace without a schedule",
        where=where,
        remedy="Trace(events, source, schedule)",
    )
    assert trace.schedule is not None
    return trace.schedule


def _computing(schedule: Schedule) -> Schedule:
    """The schedule without what lowering added to it."""
    return replace(schedule, ops=tuple(tuple(op for op in row if op.kind in COMPUTE) for row in schedule.ops))


def _evened(times: dict[Op, float]) -> dict[Op, float]:
    """Every operation as long as the mean of its kind; the segments of one stage's operation share it."""
    whole: dict[tuple[Kind, int, int], float] = defaultdict(float)
    segments: dict[tuple[Kind, int, int], int] = defaultdict(int)
    for op, time in times.items():
        whole[op[:3]] += time
        segments[op[:3]] += 1
    sums: dict[Kind, list[float]] = defaultdict(list)
    for (kind, *_), time in whole.items():
        sums[kind].append(time)
    return {op: sum(sums[op.kind]) / len(sums[op.kind]) / segments[op[:3]] for op in times}


def _spared(times: dict[Op, float]) -> dict[Op, float]:
    return {op: 0.0 if op.kind is Kind.R else time for op, time in times.items()}


def _idle(trace: Trace) -> float:
    busy = sum(trace.busy_ms(rank) for rank in range(trace.num_ranks))
    return trace.makespan_ms * trace.num_ranks - busy


def _spans(trace: Trace) -> list[tuple[float, float]]:
    """Every rank's first start and last end. A rank without work only drains."""
    start = trace.start_ms
    return [(min(row.starts, default=start), max(row.ends, default=start)) for row in trace.rows]


def _shape(trace: Trace) -> dict[str, float]:
    """Idle time before, within and after the ranks' own work."""
    start, end = trace.start_ms, trace.start_ms + trace.makespan_ms
    spans = _spans(trace)
    middles = [last - first - trace.busy_ms(rank) for rank, (first, last) in enumerate(spans)]
    return {
        "fill": sum(first - start for first, _ in spans),
        "middle": sum(max(0.0, middle) for middle in middles),
        "drain": sum(end - last for _, last in spans),
    }


def speed_ups(trace: Trace, *, faster: float = 0.1) -> pandas.DataFrame:
    """What to make quicker first: how much sooner a step would end were one stage's operations of a kind so.

    faster: the share by which their time goes down. The trace's own operations are laid out again with those
    times, messages and pauses left out on both sides. One row a stage and kind, the greatest gain first: the
    stage, its rank, the kind in words, the mean time of one, the gain in ms and in % of the step.
    Raises `InputError` for a trace without its schedule.
    """
    import pandas

    require(
        0 < faster < 1,
        "what becomes quicker takes a share less",
        got=f"faster={faster!r}",
        where="speed_ups",
        remedy="faster=0.1",
    )
    authored = _schedule_of(trace, "speed_ups")
    schedule = _computing(authored)
    times = {e.op: e.duration_ms for e in trace.computations}
    as_is = simulate(schedule, OpTimes(times)).makespan_ms
    rows = []
    for stage, letter in sorted({(op.stage, op.kind.value) for op in times}):
        kind = Kind(letter)
        mine = {op: time for op, time in times.items() if (op.stage, op.kind) == (stage, kind)}
        quicker = {op: (1 - faster) * time for op, time in mine.items()}
        gain = as_is - simulate(schedule, OpTimes(times | quicker)).makespan_ms
        mean = sum(mine.values()) / len(mine)
        rank = authored.rank_of[next(iter(mine))]
        rows.append((stage, rank, WORDS[kind], mean, gain, 100 * gain / trace.makespan_ms))
    columns = ["stage", "rank", "what", "ms each", "gain (ms)", "gain (%)"]
    table = pandas.DataFrame(rows, columns=columns)
    return table.sort_values("gain (ms)", ascending=False, kind="stable", ignore_index=True)


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
        self.schedule = _schedule_of(trace, "critical_path")
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
    for needed in dependencies(op, schedule):
        found += [needed] if needed.kind in COMPUTE else sources(needed, schedule)
    return tuple(found)


def _span(leg: tuple[Step, ...]) -> str:
    first, last = leg[0].op, leg[-1].op
    return str(first) if len(leg) == 1 else f"{first} to {last}"
