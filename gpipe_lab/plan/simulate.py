"""Predict a trace: lay a schedule out on a clock with given costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import itemgetter
from typing import Protocol

from .errors import InputError, require
from .ops import COMPUTE, SENDS, B, F, I, Kind, Op, R, W, peer, sent
from .schedule import Schedule
from .trace import COMM_LANE, COMPUTE_LANE, SIMULATED, Event, Row, Trace
from .validate import validate

Cost = float | Sequence[float]  # one for all stages, or one per stage


class OpCosts(Protocol):
    """What the simulator asks: how long a computation takes and how long its result travels."""

    def duration_ms(self, op: Op, schedule: Schedule) -> float: ...

    def delay_ms(self, op: Op, schedule: Schedule) -> float: ...


def is_time(value: object) -> bool:
    """Whether this is a finite number of ms, not negative."""
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
                bool(numbers) and all(is_time(x) for x in numbers),
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
        if len(value) != schedule.num_stages:
            raise InputError(
                "a list of costs has one entry per stage",
                got=f"{name} has {len(value)} entries for {schedule.num_stages} stages",
                where="Costs",
                remedy=f"{name}={[value[0]] * schedule.num_stages}",
            )
        return value[stage]

    def duration_ms(self, op: Op, schedule: Schedule) -> float:
        num_segments = 1 + schedule.last_segment.get((op.stage, op.microbatch), 0)
        if op.kind is F:
            return self._of("forward", op.stage, schedule)
        if op.kind is B:
            return self._of("backward", op.stage, schedule) / num_segments
        if op.kind is R:
            name = "forward" if self.recompute is None else "recompute"
            return self._of(name, op.stage, schedule) / num_segments
        if op.kind in (I, W):
            name = "backward_input" if op.kind is I else "backward_weight"
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
    """When every operation of a schedule that can run starts and ends with these costs.

    A trace of it reads what it needs: its metrics the rows, a picture the events.
    """

    schedule: Schedule
    costs: OpCosts

    @cached_property
    def columns(self) -> tuple[list[float], list[float]]:
        """(starts, ends) in ms of the operations, by their numbers in `schedule.graph`."""
        return self.schedule.walked.times(*self.prices)

    @cached_property
    def prices(self) -> tuple[list[float], list[float]]:
        """What each operation, or its message, takes, and how long a result travels that no send takes."""
        graph, costs = self.schedule.graph, self.costs
        work_ms, travel_ms = [0.0] * len(graph.ops), [0.0] * len(graph.ops)
        alike = isinstance(costs, Costs) and not self.schedule.last_segment  # one price a stage and kind

        def fill(prices: list[float], row: dict[int, int], price: Callable[[Op, Schedule], float]) -> None:
            one = price(graph.ops[next(iter(row.values()))], self.schedule)
            for number in row.values():
                prices[number] = one if alike else price(graph.ops[number], self.schedule)

        for (kind, _, _), row in graph.at.items():
            if kind in COMPUTE:
                fill(work_ms, row, costs.duration_ms)
            if kind in SENDS:
                fill(work_ms, row, costs.delay_ms)
            elif graph.kinds.isdisjoint(SENDS):
                fill(travel_ms, row, costs.delay_ms)
        return work_ms, travel_ms

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The computations of every rank, in the order they run."""
        starts, ends = self.columns
        return tuple(
            Row(kinds, [starts[n] for n in numbers], [ends[n] for n in numbers])
            for kinds, numbers in self.schedule.graph.computed
        )

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """In order of time; of an authored schedule, also the messages that it implies."""
        graph, (starts, ends) = self.schedule.graph, self.columns
        lanes = {kind: COMPUTE_LANE if kind in COMPUTE else COMM_LANE for kind in graph.kinds}
        events = [
            Event(graph.ranks[n], lanes[graph.ops[n].kind], graph.ops[n], starts[n], ends[n])
            for n in self.schedule.walked.order
        ]
        takers = graph.takers if graph.kinds.isdisjoint(SENDS) else {}
        for n in self.schedule.walked.order:
            if n in takers:
                send = sent(graph.ops[n])
                arrives = ends[n] + self.prices[1][n]
                events.append(Event(graph.ranks[n], COMM_LANE, send, ends[n], arrives))
                events.append(Event(graph.ranks[takers[n]], COMM_LANE, peer(send), arrives, arrives))
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

    totals: dict[tuple[Kind, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for e in trace.computations:
        totals[e.op.kind, e.op.stage][e.op.microbatch] += e.duration_ms  # a backward's segments together

    def per_stage(kind: Kind) -> tuple[float, ...] | None:
        assert trace.schedule is not None
        found = [totals[kind, stage].values() for stage in range(trace.schedule.num_stages)]
        return tuple(median(times) for times in found) if all(found) else None

    forward, backward = per_stage(F), per_stage(B)
    inputs, weights = per_stage(I), per_stage(W)
    if backward is None and inputs is not None and weights is not None:
        backward = tuple(i + w for i, w in zip(inputs, weights, strict=True))
    return Costs(
        forward=forward if forward is not None else 0.0,
        backward=backward if backward is not None else 0.0,
        backward_input=inputs,
        backward_weight=weights,
        recompute=per_stage(R),
        send=send,
    )
