"""Look for a schedule that is better than the built-in ones, for given costs and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .build import build, check_counts, loop_placement, v_placement
from .errors import InputError, is_count, require
from .interleaved import interleaved
from .list_scheduling import RULES, Limit, Plan, Problem, by_rule, improve, lay_out, schedule_of
from .memory import StageBytes
from .ops import Kind, Op
from .schedule import Schedule
from .schedules import gpipe, naive, one_f_one_b
from .simulate import Costs, OpCosts
from .units import format_bytes, parse_bytes
from .validate import validate
from .zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v

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
    schedule = schedule_of(problem, best.plan, best.name)
    validate(schedule)
    return schedule


class Candidate(NamedTuple):
    """A plan that runs and fits, under the name of the schedule it is, or "search"."""

    makespan: float
    ends: float  # the sum of the ranks' ends: the less, the more room for improvement
    name: str
    plan: Plan


def _candidate(problem: Problem, name: str, plan: Plan) -> Candidate:
    length = lay_out(problem, plan)
    assert length is not None, "every candidate runs"
    return Candidate(*length, name, plan)


def _best(problem: Problem, effort: int) -> Candidate:
    """The best that was found: built-in schedules come first, so that one of them wins a tie."""
    size = len(problem.ops)
    found = [
        _candidate(problem, schedule.name, problem.plan(schedule))
        for schedule in _built_in(problem.schedule)
        if schedule.rank_of.keys() == problem.number.keys() and _fits(problem, problem.plan(schedule))
    ]
    one_stage_each = problem.schedule.num_stages == problem.schedule.num_ranks
    rules = [rule for rule in RULES if rule.oldest or not one_stage_each]  # there the two are the same
    for rule in rules[: effort // 2 // (RULE_EFFORT * size)]:
        found.append(_candidate(problem, "search", by_rule(problem, rule)))
    starts: list[Plan] = []
    for candidate in sorted(found):
        if candidate.plan not in starts and len(starts) < NUM_IMPROVED:
            starts.append(candidate.plan)
    num_tries = effort // 2 // size // NUM_IMPROVED
    found += [_candidate(problem, "search", improve(problem, plan, num_tries)) for plan in starts]
    least = min(candidate.makespan for candidate in found)
    return next(candidate for candidate in found if _ties(candidate, least))


def _ties(candidate: Candidate, least: float) -> bool:
    return candidate.makespan <= least * (
        1 + 1e-12
    )  # sums of the same times in other orders differ by as much


def _fits(problem: Problem, plan: Plan) -> bool:
    return all(problem.fits(rank, row) for rank, row in enumerate(plan))


def _built_in(basis: Schedule) -> list[Schedule]:
    """The built-in schedules that place their stages as this one does, and this one."""
    place, p, m = basis.stage_to_rank, basis.num_ranks, basis.num_microbatches
    num_chunks = len(place) // p
    found = []
    if place == loop_placement(p):
        found += [naive(p, m), one_f_one_b(p, m), gpipe(p, m), gpipe(p, m, backward="fifo")]
        found += [zero_bubble_h1(p, m), zero_bubble_h2(p, m)]
    if place == loop_placement(p, num_chunks) and m % p == 0:
        found.append(interleaved(p, m, num_chunks))
    if place == v_placement(p):
        found.append(zero_bubble_v(p, m))
    return [*found, basis]


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
