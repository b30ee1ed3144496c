"""Predict a trace: lay a schedule out on a clock with given costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from .errors import require
from .ops import COMPUTE, TRANSFERS, Kind, Op
from .schedule import Placed, Schedule, peer, send_of, walk
from .trace import COMM_LANE, COMPUTE_LANE, SIMULATED, Event, Trace
from .validate import validate

Cost = float | Sequence[float]  # one for all stages, or one per stage


class OpCosts(Protocol):
    """What the simulator asks: how long a computation takes and how long its result travels."""

    def duration_ms(self, op: Op, schedule: Schedule) -> float: ...

    def delay_ms(self, op: Op, schedule: Schedule) -> float: ...


def _is_time(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of each kind of operation on one micro-batch, in ms: a number, or one number per stage.

    Unless given, backward_input and backward_weight take half a backward each and a recompute takes a
    forward. `send` is the time a message between two ranks travels; it delays its receiver and holds
    up nobody else. A stage cut into segments spends its recompute and backward in equal parts.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    backward_input: Cost | None = None
    backward_weight: Cost | None = None
    recompute: Cost | None = None
    send: Cost = 0.0

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            given = getattr(self, name)
            if given is None and field.default is None:
                continue
            plain = given.tolist() if hasattr(given, "tolist") else given  # numpy's numbers and arrays
            numbers = list(plain) if isinstance(plain, Sequence) else [plain]
            require(
                bool(numbers) and all(_is_time(x) for x in numbers),
                "a cost is a finite number of ms, not negative, or a list of them, one per stage",
                got=f"{name}={given!r}",
                where="Costs",
                remedy=f"{name}=1.0",
            )
            times = tuple(float(x) for x in numbers)
            object.__setattr__(self, name, times if isinstance(plain, Sequence) else times[0])

    def _of(self, name: str, stage: int, schedule: Schedule) -> float:
        value = getattr(self, name)
        if isinstance(value, float):
            return value
        require(
            len(value) == schedule.num_stages,
            "a list of costs has one entry per stage",
            got=f"{name} has {len(value)} entries for {schedule.num_stages} stages",
            where="Costs",
            remedy=f"{name}={[value[0]] * schedule.num_stages}",
        )
        return value[stage]

    def duration_ms(self, op: Op, schedule: Schedule) -> float:
        num_segments = 1 + schedule.last_segment.get((op.stage, op.microbatch), 0)
        match op.kind:
            case Kind.F:
                return self._of("forward", op.stage, schedule)
            case Kind.B:
                return self._of("backward", op.stage, schedule) / num_segments
            case Kind.R:
                name = "forward" if self.recompute is None else "recompute"
                return self._of(name, op.stage, schedule) / num_segments
            case Kind.I | Kind.W:
                name = "backward_input" if op.kind is Kind.I else "backward_weight"
                if getattr(self, name) is None:
                    return self._of("backward", op.stage, schedule) / 2
                return self._of(name, op.stage, schedule)
        return 0.0

    def delay_ms(self, op: Op, schedule: Schedule) -> float:
        return self._of("send", op.stage, schedule)


@dataclass(frozen=True)
class OwnTimes:
    """Every operation as long as it took in a measured trace; messages take no time."""

    trace: Trace

    def __post_init__(self) -> None:
        object.__setattr__(self, "_times", {e.op: e.duration_ms for e in self.trace.computations})

    def duration_ms(self, op: Op, schedule: Schedule) -> float:
        return self._times[op]  # type: ignore[attr-defined]

    def delay_ms(self, op: Op, schedule: Schedule) -> float:
        return 0.0


def simulate(schedule: Schedule, costs: OpCosts | None = None) -> Trace:
    """The trace that `schedule` would leave with these costs (default: forward 1 ms, backward 2 ms).

    Raises `ScheduleError` for a schedule that cannot run. A lowered schedule's messages start when both
    ends have posted them; an authored one's when their result is there.
    """
    validate(schedule)
    costs = Costs() if costs is None else costs
    walked = walk(
        schedule,
        duration=lambda op: costs.duration_ms(op, schedule),
        delay=lambda op: costs.delay_ms(op, schedule),
    )
    events = [_event(placed) for placed in walked.events]
    if not any(e.op.kind in TRANSFERS for e in events):
        events += _messages(walked.events, schedule, costs)
    return Trace(tuple(sorted(events, key=lambda e: (e.start_ms, e.rank))), SIMULATED, schedule)


def replay(trace: Trace) -> Trace:
    """Simulate a measured trace's schedule with the trace's own operation times: what waiting alone cost.

    The difference of the makespans is communication and launch, since computation is the same in both.
    """
    assert trace.schedule is not None, "a measured trace carries its schedule"
    return simulate(trace.schedule, OwnTimes(trace))


def costs_of(trace: Trace, *, send: Cost = 0.0) -> Costs:
    """Costs per stage from a trace: the median time of each kind, for predicting other schedules.

    Where a trace holds split backwards only, a whole one is taken to last as long as its two parts.
    """
    from statistics import median  # here, because it is slow to import

    assert trace.schedule is not None, "a trace carries its schedule"

    def per_stage(kind: Kind) -> list[float] | None:
        assert trace.schedule is not None
        stages = []
        for stage in range(trace.schedule.num_stages):
            totals: dict[int, float] = {}
            for e in trace.computations:
                if e.op.kind is kind and e.op.stage == stage:
                    totals[e.op.microbatch] = totals.get(e.op.microbatch, 0.0) + e.duration_ms
            if not totals:
                return None
            stages.append(median(totals.values()))
        return stages

    forward, backward = per_stage(Kind.F), per_stage(Kind.B)
    inputs, weights = per_stage(Kind.I), per_stage(Kind.W)
    if backward is None and inputs is not None and weights is not None:
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    return Costs(
        forward=forward if forward is not None else 0.0,
        backward=backward if backward is not None else 0.0,
        backward_input=inputs,
        backward_weight=weights,
        recompute=per_stage(Kind.R),
        send=send,
    )


def _event(placed: Placed) -> Event:
    lane = COMPUTE_LANE if placed.op.kind in COMPUTE else COMM_LANE
    return Event(placed.rank, lane, placed.op, placed.start, placed.end)


def _messages(placed: Sequence[Placed], schedule: Schedule, costs: OpCosts) -> list[Event]:
    """The sends and receives that an authored schedule implies, as comm events."""
    events = []
    for _, op, _, end in placed:
        send = send_of(op, schedule)
        if send is not None:
            receive = peer(send)
            arrives = end + costs.delay_ms(op, schedule)
            sender, receiver = (schedule.home(e.stage, e.microbatch) for e in (send, receive))
            events.append(Event(sender, COMM_LANE, send, end, arrives))
            events.append(Event(receiver, COMM_LANE, receive, arrives, arrives))
    return events
