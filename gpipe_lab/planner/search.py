"""Look for a better schedule under a memory limit."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..plan.errors import InputError, is_count, require
from ..plan.memory import StageBytes
from ..plan.ops import Kind, Op
from ..plan.schedule import Schedule
from ..plan.schedules import (
    build,
    check_counts,
    gpipe,
    interleaved,
    loop_placement,
    naive,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from ..plan.simulate import Costs, OpCosts, Times
from ..plan.units import format_bytes, parse_bytes
from ..plan.validate import validate
from ..plan.walk import walk

Rows = list[list[int]]  # rows[rank]: its operations in program order, by their numbers in the graph

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

    @property
    def ops(self) -> list[Op]:
        return self.schedule.graph.ops

    @property
    def rank(self) -> list[int]:
        return self.schedule.graph.ranks

    @cached_property
    def prices(self) -> tuple[list[float], list[float]]:
        """What every operation takes, and how long its result travels to another rank, in ms."""
        return Times(self.schedule, self.costs).prices

    @cached_property
    def needs(self) -> list[list[int]]:
        """For every operation: what must have finished."""
        return [self.schedule.graph.needed(op) for op in self.ops]

    @cached_property
    def touches(self) -> list[set[int]]:
        """For every operation: the ranks whose next choice its end may change, its own among them."""
        touched = [{rank} for rank in self.rank]
        for i, needs in enumerate(self.needs):
            for need in needs:
                touched[need].add(self.rank[i])
        return touched

    @cached_property
    def change(self) -> list[int]:
        """+1 where an operation makes its rank hold a micro-batch of its stage, -1 where it lets go."""
        split = {(op.stage, op.microbatch) for op in self.ops if op.kind is Kind.W}
        releases = {op: Kind.W if (op.stage, op.microbatch) in split else Kind.B for op in self.ops}
        return [(op.kind is Kind.F) - (op.kind is releases[op]) for op in self.ops]

    def travel_ms(self, need: int, rank: int) -> float:
        """How long the result of an operation travels to a rank: no time where it is there."""
        return self.prices[1][need] if self.rank[need] != rank else 0.0

    def rows(self, schedule: Schedule) -> Rows:
        number = {op: i for i, op in enumerate(self.ops)}
        return [[number[op] for op in row] for row in schedule.ops]

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


def length(problem: Problem, rows: Rows) -> tuple[float, float] | None:
    """(makespan, sum of the ranks' ends) in the simulator, or None where ranks wait in a circle.

    No operation may come before one that it needs on its own rank.
    """
    walked = walk(problem.schedule.graph, rows)
    if walked.is_stuck:
        return None
    _, ends = walked.times(*problem.prices)
    last = [ends[row[-1]] for row in rows]
    return max(last), sum(last)


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


def by_rule(problem: Problem, rule: Rule) -> Rows:
    """An order made on the clock: whichever rank is free first takes the operation that the rule prefers.

    A forward is taken only if its rank keeps room for that micro-batch in all its later stages: the one
    furthest on can then always go on, so the limits never lock the pipeline.
    """
    place = problem.schedule.stage_to_rank
    work_ms, _ = problem.prices
    ahead_allowed = _depths(problem, rule.depth)
    queues = _queues(problem)
    stages = range(len(place))
    later = [[s for s in stages[stage:] if place[s] == place[stage]] for stage in stages]
    left = [list(limit.room) for limit in problem.limits]
    ahead = [0] * len(place)
    finish: dict[int, float] = {}
    free = [0.0] * problem.schedule.num_ranks
    rows: Rows = [[] for _ in free]

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
            needs = problem.needs[queue[0]]
            if all(need in finish for need in needs):
                arrivals = [finish[need] + problem.travel_ms(need, rank) for need in needs]
                ready.append((max([free[rank], *arrivals]), queue[0]))
        if not ready:
            return None
        first, i = min(ready)
        soon = [(s, j) for s, j in ready if s <= first + rule.patience * work_ms[i]]
        return min(soon, key=lambda entry: (_preference(problem.ops[entry[1]], rule), entry))

    choices = {rank: choice for rank in range(len(free)) if (choice := choose(rank)) is not None}
    while choices:
        start, i = min(choices.values())
        op, rank = problem.ops[i], problem.rank[i]
        next(queue for queue in queues[rank] if queue and queue[0] == i).popleft()
        rows[rank].append(i)
        free[rank] = finish[i] = start + work_ms[i]
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
    return rows


def _preference(op: Op, rule: Rule) -> tuple[int, int, int]:
    kind = rule.prefer.index("B" if op.kind in BACKWARDS else op.kind.value)
    return (kind, op.microbatch, -op.stage) if rule.oldest else (kind, -op.stage, op.microbatch)


def _queues(problem: Problem) -> list[list[deque[int]]]:
    """queues[rank]: for each of its stages and kinds the operations in order of their micro-batches."""
    queues: dict[tuple[int, Kind], deque[int]] = {}
    for i, op in sorted(enumerate(problem.ops), key=lambda entry: entry[1].microbatch):
        queues.setdefault((op.stage, op.kind), deque()).append(i)
    home = problem.schedule.stage_to_rank
    ranks = range(problem.schedule.num_ranks)
    return [[queue for (stage, _), queue in queues.items() if home[stage] == rank] for rank in ranks]


def _depths(problem: Problem, depth: float) -> list[float]:
    """How many forwards each stage may be ahead of its backwards, rounded up, and at least one.

    `depth` times what keeps the busiest rank busy while a micro-batch goes to the end and comes back.
    """
    num_stages, num_ranks = problem.schedule.num_stages, problem.schedule.num_ranks
    work_ms, _ = problem.prices
    way, load = [0.0] * num_stages, [0.0] * num_ranks
    for i, op in enumerate(problem.ops):
        if op.microbatch == 0:
            load[problem.rank[i]] += work_ms[i]
            travels = sum(problem.travel_ms(need, problem.rank[i]) for need in problem.needs[i])
            way[op.stage] += travels + (work_ms[i] if op.kind is not Kind.W else 0.0)
    busiest = max(load) or 1.0
    return [max(1.0, depth * sum(way[stage:]) / busiest) for stage in range(num_stages)]


def improve(problem: Problem, rows: Rows, num_tries: int) -> Rows:
    """Move single operations within their rank, at random but reproducibly, and keep what is no worse."""
    rng = random.Random(0)
    best = length(problem, rows)
    assert best is not None, "only what runs is improved"
    for _ in range(num_tries):
        rank = rng.randrange(len(rows))
        row = rows[rank]
        source = rng.randrange(len(row))
        target = max(0, min(len(row) - 1, source + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))))
        moved = row[:source] + row[source + 1 :]
        moved.insert(target, row[source])
        if not _keeps_order(problem, row, source, target) or not problem.fits(rank, moved):
            continue
        candidate = [*rows[:rank], moved, *rows[rank + 1 :]]
        result = length(problem, candidate)
        if result is not None and result <= best:
            rows, best = candidate, result
    return rows


def _keeps_order(problem: Problem, row: list[int], source: int, target: int) -> bool:
    """Whether an operation may move: not to where it is, and not past one it needs or that needs it."""
    if source < target:
        return all(row[source] not in problem.needs[i] for i in row[source + 1 : target + 1])
    return source != target and not set(row[target:source]).intersection(problem.needs[row[source]])


def schedule_of(problem: Problem, rows: Sequence[Sequence[int]], name: str) -> Schedule:
    ops = tuple(tuple(problem.ops[i] for i in row) for row in rows)
    return Schedule(name, problem.schedule.num_microbatches, problem.schedule.stage_to_rank, ops)


NUM_IMPROVED = 3  # local improvement starts from so many of the best plans
RULE_EFFORT = 20  # choosing an operation by a rule takes about as long as laying out so many


def search(
    num_stages: int,
    num_microbatches: int,
    costs: OpCosts | None = None,
    *,
    stage_to_rank: Sequence[int] | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    memory_limit: str | int | None = None,
    sizes: Sequence[StageBytes] | None = None,
    split: bool = True,
    effort: int = 2_000_000,
) -> Schedule:
    """The schedule with the shortest simulated makespan that was found within the limits.

    Tries the built-in schedules of this placement, then a list scheduler with several priority rules (as
    the heuristic of Zero Bubble §3 does), then moves of single operations. Never invalid, never over a
    limit, never slower than the best built-in schedule that fits: that one is returned, under its own
    name, where nothing better is found.

    costs: of one micro-batch; `costs_of(trace)` for measured ones. stage_to_rank: where the stages are,
    one a rank unless given. max_in_flight: micro-batches that every rank, or each rank, may hold at once
    (as `peak_in_flight` counts them: once for each stage that holds one). memory_limit with sizes: bytes
    of a rank, and what each stage needs. split=False leaves backwards whole. effort: operations laid out
    in all, about three million a second; the same arguments give the same schedule on every machine.

    Raises `InputError` where no schedule fits: a rank needs room for one micro-batch in all its stages.
    """
    check_counts("search", num_stages=num_stages, num_microbatches=num_microbatches)
    require(
        is_count(effort, least=0),
        "effort is a whole number of operations, at least 0",
        got=f"effort={effort!r}",
        where="search",
        remedy="effort=2_000_000",
    )
    place = _placement(num_stages, stage_to_rank)
    limits = _limits(place, max_in_flight, memory_limit, sizes)
    _require_room(place, limits)
    backwards = [(Kind.B,), (Kind.I, Kind.W)] if split else [(Kind.B,)]
    costs = Costs() if costs is None else costs
    problems = [Problem(_one_at_a_time(place, num_microbatches, kinds), costs, limits) for kinds in backwards]
    found = [(_best(problem, effort // len(problems)), problem) for problem in problems]
    least = min(best.makespan for best, _ in found)
    best, problem = next(entry for entry in found if _ties(entry[0], least))
    schedule = schedule_of(problem, best.rows, best.name)
    validate(schedule)
    return schedule


class Candidate(NamedTuple):
    """An order that runs and fits, under the name of the schedule it is, or "search"."""

    makespan: float
    ends: float  # the sum of the ranks' ends: the less, the more room for improvement
    name: str
    rows: Rows


def _candidate(problem: Problem, name: str, rows: Rows) -> Candidate:
    found = length(problem, rows)
    assert found is not None, "every candidate runs"
    return Candidate(*found, name, rows)


def _best(problem: Problem, effort: int) -> Candidate:
    """The best that was found: built-in schedules come first, so that one of them wins a tie."""
    size = len(problem.ops)
    built_in = [
        (schedule.name, problem.rows(schedule))
        for schedule in _built_in(problem.schedule)
        if schedule.rank_of == problem.schedule.rank_of
    ]
    found = [
        _candidate(problem, name, rows)
        for name, rows in built_in
        if all(problem.fits(rank, row) for rank, row in enumerate(rows))
    ]
    one_stage_each = problem.schedule.num_stages == problem.schedule.num_ranks
    rules = [rule for rule in RULES if rule.oldest or not one_stage_each]  # there the two are the same
    for rule in rules[: effort // 2 // (RULE_EFFORT * size)]:
        found.append(_candidate(problem, "search", by_rule(problem, rule)))
    starts: list[Rows] = []
    for candidate in sorted(found):
        if candidate.rows not in starts and len(starts) < NUM_IMPROVED:
            starts.append(candidate.rows)
    num_tries = effort // 2 // size // NUM_IMPROVED
    found += [_candidate(problem, "search", improve(problem, rows, num_tries)) for rows in starts]
    least = min(candidate.makespan for candidate in found)
    return next(candidate for candidate in found if _ties(candidate, least))


def _ties(candidate: Candidate, least: float) -> bool:
    """Sums of the same times in other orders differ by as much."""
    return candidate.makespan <= least * (1 + 1e-12)


def _built_in(basis: Schedule) -> list[Schedule]:
    """The built-in schedules that place their stages as this one does, and this one."""
    place, p, m = basis.stage_to_rank, basis.num_ranks, basis.num_microbatches
    found = [naive(p, m), one_f_one_b(p, m), gpipe(p, m), gpipe(p, m, backward="fifo")]
    found += [zero_bubble_h1(p, m), zero_bubble_h2(p, m), zero_bubble_v(p, m)]
    if m % p == 0:
        found.append(interleaved(p, m, max(1, len(place) // p)))
    return [*(schedule for schedule in found if schedule.stage_to_rank == place), basis]


def _one_at_a_time(place: tuple[int, ...], num_microbatches: int, backward: tuple[Kind, ...]) -> Schedule:
    """A micro-batch through all stages and back, then the next: what fits if anything does."""
    stages = range(len(place))

    def row(rank: int) -> list[Op]:
        mine = [s for s in stages if place[s] == rank]
        return [
            op
            for m in range(num_microbatches)
            for op in (
                *(Op(Kind.F, s, m) for s in mine),
                *(Op(kind, s, m) for s in reversed(mine) for kind in backward),
            )
        ]

    return build("one_at_a_time", num_microbatches, place, row)


def _placement(num_stages: int, stage_to_rank: Sequence[int] | None) -> tuple[int, ...]:
    if stage_to_rank is None:
        return loop_placement(num_stages)
    place = tuple(stage_to_rank)
    is_placement = len(place) == num_stages and all(is_count(rank, least=0) for rank in place)
    require(
        is_placement and set(place) == set(range(1 + max(place))),
        "stage_to_rank has the rank of each stage, and every rank from 0 on has a stage",
        got=f"stage_to_rank={stage_to_rank!r} for {num_stages} stages",
        where="search",
        remedy=f"stage_to_rank={loop_placement(num_stages)}",
    )
    return place


def _limits(
    place: tuple[int, ...],
    max_in_flight: int | Sequence[int] | None,
    memory_limit: str | int | None,
    sizes: Sequence[StageBytes] | None,
) -> tuple[Limit, ...]:
    """The limits as numbers: what a micro-batch takes in each stage, and how much room each rank has."""
    num_stages, num_ranks = len(place), 1 + max(place)
    limits = []
    if max_in_flight is not None:
        given = max_in_flight
        counts = list(given) if isinstance(given, Sequence) else [given] * num_ranks
        require(
            len(counts) == num_ranks and all(is_count(n) for n in counts),
            "max_in_flight is a whole number of at least 1, or one per rank",
            got=f"max_in_flight={max_in_flight!r} for {num_ranks} ranks",
            where="search",
            remedy=f"max_in_flight={num_ranks}",
        )
        limits.append(Limit("in flight", (1.0,) * num_stages, tuple(map(float, counts))))
    limit_bytes = parse_bytes(memory_limit)
    require(
        (limit_bytes is None) == (sizes is None) and (sizes is None or len(sizes) == num_stages),
        "memory_limit comes with sizes, one StageBytes per stage",
        got=f"memory_limit={memory_limit!r}, {0 if sizes is None else len(sizes)} sizes, {num_stages} stages",
        where="search",
        remedy=f"memory_limit='64MiB', sizes=[StageBytes(saved=..., boundary=...)] * {num_stages}",
    )
    if limit_bytes is not None and sizes is not None:
        room = [float(limit_bytes)] * num_ranks
        for stage, size in enumerate(sizes):
            room[place[stage]] -= sum(size.weights.values())
        limits.append(Limit("bytes", tuple(float(size.saved) for size in sizes), tuple(room)))
    return tuple(limits)


def _require_room(place: tuple[int, ...], limits: tuple[Limit, ...]) -> None:
    for limit in limits:
        for rank, room in enumerate(limit.room):
            needed = sum(limit.hold[stage] for stage, home in enumerate(place) if home == rank)
            if needed > room:
                number = format_bytes if limit.unit == "bytes" else "{:.0f} in flight".format
                raise InputError(
                    "a rank has room for one micro-batch in all its stages, beside their weights",
                    got=f"room for {number(room)}, and one micro-batch takes {number(needed)}",
                    where=f"search, rank {rank}",
                    remedy="a higher limit, more ranks, smaller micro-batches, or recompute",
                )
