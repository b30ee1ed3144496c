"""Make schedules by a rule, and better ones out of those: what `search` is made of.

Operations are numbers here, so that a schedule is laid out quickly: `Problem` says what each of them takes,
needs and holds, and a plan lists them for every rank.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .ops import Kind, Op
from .schedule import Schedule
from .simulate import OpCosts

Plan = list[list[int]]  # plan[rank]: numbers of operations, in program order

BACKWARDS = (Kind.B, Kind.I)


class Limit(NamedTuple):
    """hold[stage] is taken from room[rank] while a micro-batch is held: from F until B, or W."""

    unit: str
    hold: tuple[float, ...]
    room: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
    """A valid schedule's operations, to be put into a better order, with their costs and the limits."""

    schedule: Schedule
    costs: OpCosts
    limits: tuple[Limit, ...]

    @cached_property
    def ops(self) -> list[Op]:
        return list(self.schedule.rank_of)

    @cached_property
    def number(self) -> dict[Op, int]:
        return {op: i for i, op in enumerate(self.ops)}

    @cached_property
    def rank(self) -> list[int]:
        return list(self.schedule.rank_of.values())

    @cached_property
    def time(self) -> list[float]:
        return [self.costs.duration_ms(op, self.schedule) for op in self.ops]

    @cached_property
    def before(self) -> list[list[tuple[int, float]]]:
        """For every operation: what must have finished, and how long its result travels."""
        home, delay = self.schedule.rank_of, self.costs.delay_ms
        return [
            [
                (self.number[need], delay(need, self.schedule) if home[need] != home[op] else 0.0)
                for need in self.schedule.needs[op]
            ]
            for op in self.ops
        ]

    @cached_property
    def touches(self) -> list[set[int]]:
        """For every operation: the ranks whose next choice its end may change, its own among them."""
        touched = [{rank} for rank in self.rank]
        for i, needs in enumerate(self.before):
            for need, _ in needs:
                touched[need].add(self.rank[i])
        return touched

    @cached_property
    def change(self) -> list[int]:
        """+1 where an operation makes its rank hold a micro-batch of its stage, -1 where it lets go."""
        split = {(op.stage, op.microbatch) for op in self.ops if op.kind is Kind.W}
        releases = {op: Kind.W if (op.stage, op.microbatch) in split else Kind.B for op in self.ops}
        return [(op.kind is Kind.F) - (op.kind is releases[op]) for op in self.ops]

    def plan(self, schedule: Schedule) -> Plan:
        return [[self.number[op] for op in row] for row in schedule.ops]

    def fits(self, rank: int, row: Iterable[int]) -> bool:
        """Whether a rank that runs its operations in this order stays within every limit."""
        for _, hold, room in self.limits:
            left = room[rank]
            for i in row:
                if self.change[i]:
                    left -= self.change[i] * hold[self.ops[i].stage]
                    if left < 0:
                        return False
        return True


def lay_out(problem: Problem, plan: Plan) -> tuple[float, float] | None:
    """(makespan, sum of the ranks' ends) of a plan, or None where its ranks wait in a circle."""
    time, before = problem.time, problem.before
    finish: dict[int, float] = {}
    free, cursor = [0.0] * len(plan), [0] * len(plan)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(plan)))
    while runnable:
        rank = runnable.pop()
        row, at, now = plan[rank], cursor[rank], free[rank]
        while at < len(row):
            i = row[at]
            for need, delay in before[i]:
                done = finish.get(need)
                if done is None:
                    waiting.setdefault(need, []).append(rank)
                    break
                now = max(now, done + delay)
            else:
                now += time[i]
                finish[i] = now
                at += 1
                runnable += waiting.pop(i, ())
                continue
            break
        cursor[rank], free[rank] = at, now
    return (max(free), sum(free)) if len(finish) == len(time) else None


class Rule(NamedTuple):
    """How a rank chooses: kinds in order of preference, how far forwards may run ahead, how long to wait."""

    prefer: str  # "BFW": backwards first, then forwards, then weights
    depth: float  # forwards ahead of their backwards, in multiples of what hides the way there and back
    patience: float  # idle for up to this share of an operation, if one that is preferred then comes
    oldest: bool = True  # among the same kind: the lowest micro-batch first, else the latest stage first


RULES = tuple(  # those that win most often come first
    Rule(prefer, depth, patience, oldest)
    for patience in (0.0, 0.5, 1.0)
    for oldest in (True, False)
    for depth in (math.inf, 3.0, 2.0, 1.5, 1.0)
    for prefer in ("BFW", "FBW", "BWF")
)


def by_rule(problem: Problem, rule: Rule) -> Plan:
    """A plan made on the clock: whichever rank is free first takes the operation that the rule prefers.

    A forward is taken only if its rank keeps room for that micro-batch in all its later stages: the one
    furthest on can then always go on, so the limits never lock the pipeline.
    """
    place = problem.schedule.stage_to_rank
    ahead_allowed = _depths(problem, rule.depth)
    queues = _queues(problem)
    stages = range(len(place))
    later = [[s for s in stages[stage:] if place[s] == place[stage]] for stage in stages]
    left = [list(limit.room) for limit in problem.limits]
    ahead = [0] * len(place)
    finish: dict[int, float] = {}
    free = [0.0] * problem.schedule.num_ranks
    plan: Plan = [[] for _ in free]

    def may_start(op: Op) -> bool:
        if op.kind is not Kind.F:
            return True
        has_room = all(
            room[place[op.stage]] >= sum(hold[s] for s in later[op.stage])
            for (_, hold, _), room in zip(problem.limits, left, strict=True)
        )
        return has_room and ahead[op.stage] < ahead_allowed[op.stage]

    def choose(rank: int) -> tuple[float, int] | None:
        """(start, operation) of what a rank would run next, given what has been placed."""
        ready = []
        for queue in queues[rank]:
            if not queue or not may_start(problem.ops[queue[0]]):
                continue
            needs = problem.before[queue[0]]
            if all(need in finish for need, _ in needs):
                arrival = max((finish[need] + delay for need, delay in needs), default=0.0)
                ready.append((max(free[rank], arrival), queue[0]))
        if not ready:
            return None
        first, i = min(ready)
        soon = [(s, j) for s, j in ready if s <= first + rule.patience * problem.time[i]]
        return min(soon, key=lambda entry: (_preference(problem.ops[entry[1]], rule), entry))

    choices = {rank: choice for rank in range(len(free)) if (choice := choose(rank)) is not None}
    while choices:
        start, i = min(choices.values())
        op, rank = problem.ops[i], problem.rank[i]
        next(queue for queue in queues[rank] if queue and queue[0] == i).popleft()
        plan[rank].append(i)
        free[rank] = finish[i] = start + problem.time[i]
        ahead[op.stage] += (op.kind is Kind.F) - (op.kind in BACKWARDS)
        for (_, hold, _), room in zip(problem.limits, left, strict=True):
            room[rank] -= problem.change[i] * hold[op.stage]
        for touched in problem.touches[i]:
            choice = choose(touched)
            if choice is not None:
                choices[touched] = choice
            else:
                choices.pop(touched, None)
    assert len(finish) == len(problem.ops), "a pipeline with room for one micro-batch never locks"
    return plan


def _preference(op: Op, rule: Rule) -> tuple[int, int, int]:
    kind = rule.prefer.index("B" if op.kind in BACKWARDS else op.kind.value)
    return (kind, op.microbatch, -op.stage) if rule.oldest else (kind, -op.stage, op.microbatch)


def _queues(problem: Problem) -> list[list[deque[int]]]:
    """queues[rank]: for each of its stages and kinds the operations in order of their micro-batches."""
    queues: dict[tuple[int, Kind], deque[int]] = {}
    for op in sorted(problem.ops, key=lambda op: op.microbatch):
        queues.setdefault((op.stage, op.kind), deque()).append(problem.number[op])
    home = problem.schedule.stage_to_rank
    ranks = range(problem.schedule.num_ranks)
    return [[queue for (stage, _), queue in queues.items() if home[stage] == rank] for rank in ranks]


def _depths(problem: Problem, depth: float) -> list[float]:
    """How many forwards each stage may be ahead of its backwards, rounded up, and at least one.

    `depth` times what keeps the busiest rank busy while a micro-batch goes to the end and comes back.
    """
    num_stages, num_ranks = problem.schedule.num_stages, problem.schedule.num_ranks
    way, load = [0.0] * num_stages, [0.0] * num_ranks
    for i, op in enumerate(problem.ops):
        if op.microbatch == 0:
            load[problem.rank[i]] += problem.time[i]
            travels = sum(delay for _, delay in problem.before[i])
            way[op.stage] += travels + (problem.time[i] if op.kind is not Kind.W else 0.0)
    busiest = max(load) or 1.0
    return [max(1.0, depth * sum(way[stage:]) / busiest) for stage in range(num_stages)]


def improve(problem: Problem, plan: Plan, num_tries: int) -> Plan:
    """Move single operations within their rank, at random but reproducibly, and keep what is no worse."""
    rng = random.Random(0)
    best = lay_out(problem, plan)
    assert best is not None, "only a plan that runs is improved"
    for _ in range(num_tries):
        rank = rng.randrange(len(plan))
        row = plan[rank]
        source = rng.randrange(len(row))
        target = max(0, min(len(row) - 1, source + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))))
        moved = row[:source] + row[source + 1 :]
        moved.insert(target, row[source])
        if moved == row or not problem.fits(rank, moved):
            continue
        candidate = [*plan[:rank], moved, *plan[rank + 1 :]]
        result = lay_out(problem, candidate)
        if result is not None and result <= best:
            plan, best = candidate, result
    return plan


def schedule_of(problem: Problem, plan: Sequence[Sequence[int]], name: str) -> Schedule:
    ops = tuple(tuple(problem.ops[i] for i in row) for row in plan)
    return Schedule(name, problem.schedule.num_microbatches, problem.schedule.stage_to_rank, ops)
