"""Predict a trace: lay a schedule out on a clock with given costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import itemgetter
from typing import Protocol

from .errors import require
from .ops import COMPUTE, SENDS, Kind, Op
from .schedule import Schedule
from .trace import COMM_LANE, COMPUTE_LANE, SIMULATED, Event, Row, Trace
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
class OpTimes:
    """Each computation with a time of its own, in ms; messages take no time."""

    times: Mapping[Op, float]

    def duration_ms(self, op: Op, schedule: Schedule) -> float:
        return self.times.get(op, 0.0)

    def delay_ms(self, op: Op, schedule: Schedule) -> float:
        return 0.0


def simulate(schedule: Schedule, costs: OpCosts | None = None) -> Trace:
    """The trace that `schedule` would leave with these costs (default: forward 1 ms, backward 2 ms).

    Raises `ScheduleError` for a schedule that cannot run. A lowered schedule's messages start when both
    ends have posted them; an authored one's when their result is there.
    """
    validate(schedule)
    times = Times(schedule, Costs() if costs is None else costs)
    _ = times.columns  # costs that do not fit the schedule are refused here
    return Trace.laid_out(times, SIMULATED, schedule)


@dataclass(frozen=True)
class Times:
    """When every operation of a schedule that can run starts and ends with these costs, in columns.

    A trace of it reads what it needs: its metrics the rows, a picture the events.
    """

    schedule: Schedule
    costs: OpCosts

    @cached_property
    def columns(self) -> tuple[list[float], list[float]]:
        """(starts, ends) in ms of the steps of `schedule.walked`."""
        walked = self.schedule.walked
        if not isinstance(self.costs, Costs):
            messages = [self._price(op, is_message=True) for op in walked.steps.messages]
            works = [self._price(op) for op in walked.steps.works]
            return walked.steps.times(messages, works)
        groups = walked.groups  # what is alike costs alike: one price a kind and stage will do
        delays = [self._price(op, is_message=True) for op in groups.message_examples]
        durations = [self._price(op) for op in groups.work_examples]
        messages = [delays[group] for group in groups.messages] if any(delays) else walked.steps.zeros
        return walked.steps.times(messages, [durations[group] for group in groups.works])

    def _price(self, op: Op | None, *, is_message: bool = False) -> float:
        if op is None:
            return 0.0
        travels = is_message or op.kind in SENDS
        return (self.costs.delay_ms if travels else self.costs.duration_ms)(op, self.schedule)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The computations of every rank, in the order they run."""
        starts, ends = self.columns
        return tuple(
            Row(kinds, [starts[step] for step in steps], [ends[step] for step in steps])
            for kinds, steps in self.schedule.walked.computed
        )

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """In order of time; of an authored schedule, also the messages that it implies."""
        walked = self.schedule.walked
        starts, ends = self.columns
        events = [
            Event(rank, COMPUTE_LANE if op.kind in COMPUTE else COMM_LANE, op, starts[step], ends[step])
            for rank, op, step in zip(walked.ranks, walked.ops, walked.step_of, strict=True)
        ]
        for message in () if walked.is_lowered else self.schedule.messages:
            end = ends[message.step]
            arrives = end + self.costs.delay_ms(message.op, self.schedule)
            events.append(Event(message.sender, COMM_LANE, message.send, end, arrives))
            events.append(Event(message.receiver, COMM_LANE, message.receive, arrives, arrives))
        return tuple(sorted(events, key=itemgetter(3, 0)))  # by start, then rank


def replay(trace: Trace) -> Trace:
    """Simulate a measured trace's schedule with the trace's own operation times: what waiting alone cost.

    The difference of the makespans is communication and launch, since computation is the same in both.
    """
    assert trace.schedule is not None, "a measured trace carries its schedule"
    return simulate(trace.schedule, OpTimes({e.op: e.duration_ms for e in trace.computations}))


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
