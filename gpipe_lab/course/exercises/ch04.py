"""Chapter 04, activation memory: the last M that fits, and how many micro-batches each rank holds when."""

from __future__ import annotations

import random
from itertools import count as count_from

from ...plan.memory import StageBytes, simulate_memory
from ...plan.ops import Kind, Op
from ...plan.schedule import Schedule, dependencies
from ...plan.schedules import gpipe
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Case, Exercise, Mismatch, over_cases

# The last M that fits.


def most_microbatches(limit_bytes, weight_bytes, saved_bytes):
    """The largest M at which every stage of GPipe fits on a card of limit_bytes; 0 if none does.

    weight_bytes: what each stage holds all the time, its weights and their gradients, one entry a stage.
    saved_bytes: what one micro-batch keeps on each stage, the A of the chapter, one entry a stage.
    """
    return 0  # change this line


def most_microbatches_solution(limit_bytes, weight_bytes, saved_bytes):
    # Every stage peaks at M · A, so the stage with the least room for its A decides.
    return max(0, min((limit_bytes - w) // a for w, a in zip(weight_bytes, saved_bytes, strict=True)))


Sizes = tuple[int, ...]  # bytes, one entry a stage


def _cards(num_cases: int) -> list[Case]:
    """Stages drawn at random, on a card that one of them fills to the byte, or leaves a few bytes free."""
    cases = []
    for seed in range(num_cases):
        draw = random.Random(seed)
        num_stages = 1 + seed % 4
        weights = tuple(draw.randint(0, 12) for _ in range(num_stages))
        saved = tuple(draw.randint(3, 9) for _ in range(num_stages))
        stage = draw.randrange(num_stages)
        limit = weights[stage] + draw.randint(0, 5) * saved[stage] + draw.choice((0, 0, 1, 2))
        cases.append({"limit_bytes": limit, "weight_bytes": weights, "saved_bytes": saved})
    return sorted(cases, key=lambda case: len(case["weight_bytes"]))


@over_cases(*_cards(40))
def fits_and_one_more_does_not(
    answer: Answer, limit_bytes: int, weight_bytes: Sizes, saved_bytes: Sizes
) -> Mismatch | None:
    """in the simulated ledger of GPipe, M micro-batches fit on every card, and M + 1 do not"""
    sizes = [
        StageBytes(saved=a, boundary=0, weights={"parameters": w})
        for w, a in zip(weight_bytes, saved_bytes, strict=True)
    ]

    def peaks(M: int) -> list[int]:
        report = simulate_memory(simulate(gpipe(len(sizes), M)), sizes)
        return [report.peak_bytes(rank) for rank in range(len(sizes))]

    right = next(M for M in count_from() if max(peaks(M + 1)) > limit_bytes)
    got = answer(limit_bytes, weight_bytes, saved_bytes)
    if got == right:
        return None
    one_more = f"bytes of the stages at M = {right + 1}: {peaks(right + 1)}"
    return Mismatch(f"M = {right}", f"M = {got}", one_more)


MOST_MICROBATCHES = Exercise(
    name="04-most-microbatches",
    statement=(
        "Change one line: the largest M at which every stage of GPipe fits on its card of `limit_bytes`, "
        "full to the byte included; 0 if none does. Each stage has its own weights and its own A."
    ),
    starter=most_microbatches,
    solution=most_microbatches_solution,
    properties=(fits_and_one_more_does_not,),
    hints=(
        "Take one stage alone. What is left of its card beside the weights, and how many A fit into that?",
        "All stages run the same M, and each of them peaks at M · A. Which of them decides?",
        "Take the smallest (limit - w) // a of all stages. Where the weights alone exceed a card it is "
        "negative, and the answer is 0.",
    ),
)


# What every rank holds, and when.

Curve = list[tuple[float, int]]  # (time in ms, micro-batches held from then on), in order of time

IMPORTS = "from gpipe_lab import Kind, simulate"


def held(schedule, costs):
    """For every rank a list of (time, count), in order of time.

    time: when an operation ends, in ms. count: micro-batches whose activations the rank holds from then on.
    """
    trace = simulate(schedule, costs)  # trace.computations: events with rank, op, start_ms, end_ms
    raise NotImplementedError("walk through the events")
    return trace


def solution(schedule, costs):
    trace = simulate(schedule, costs)
    curves = [[] for rank in range(schedule.num_ranks)]
    count = [0] * schedule.num_ranks
    for event in sorted(trace.computations, key=lambda event: event.end_ms):
        if event.op.kind is Kind.F:
            count[event.rank] += 1
        elif event.op.kind in (Kind.B, Kind.W):  # a split backward still needs them until its W
            count[event.rank] -= 1
        curves[event.rank].append((event.end_ms, count[event.rank]))
    return curves


def random_schedule(seed: int) -> Schedule:
    """A valid schedule drawn at random: any operation whose inputs are there may come next on its rank."""
    draw = random.Random(seed)
    num_ranks, num_microbatches = draw.randint(1, 4), draw.randint(1, 5)
    num_stages = num_ranks * draw.choice((1, 1, 2))
    kinds = draw.choice(((Kind.F, Kind.B), (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)))
    stage_to_rank = tuple(stage % num_ranks for stage in range(num_stages))
    ops = [Op(kind, s, m) for kind in kinds for s in range(num_stages) for m in range(num_microbatches)]
    whole = Schedule(
        f"random {seed}",
        num_microbatches,
        stage_to_rank,
        tuple(tuple(op for op in ops if stage_to_rank[op.stage] == rank) for rank in range(num_ranks)),
    )
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]
    done: set[Op] = set()
    while len(done) < len(ops):
        ready = [op for op in ops if op not in done and done.issuperset(dependencies(op, whole))]
        op = draw.choice(ready)
        done.add(op)
        rows[stage_to_rank[op.stage]].append(op)
    return Schedule(whole.name, num_microbatches, stage_to_rank, tuple(map(tuple, rows)))


def ledger(schedule: Schedule, costs: Costs) -> list[Curve]:
    """What the simulated memory ledger holds when a micro-batch weighs one byte on every stage."""
    report = simulate_memory(
        simulate(schedule, costs), [StageBytes(saved=1, boundary=1)] * schedule.num_stages
    )
    return [
        [(moment.time_ms, moment.total) for moment in report.moments(rank)]
        for rank in range(schedule.num_ranks)
    ]


def changes(curve: Curve) -> Curve:
    """Only the points at which the count changes: an answer may list an operation that changes nothing."""
    points: Curve = []
    for time, count in curve:
        if count != (points[-1][1] if points else 0):
            points.append((float(time), int(count)))
    return points


def _cases(num_cases: int) -> list[Case]:
    schedules = (random_schedule(seed) for seed in range(num_cases))
    by_size = sorted(schedules, key=lambda schedule: len(schedule.rank_of))
    return [{"schedule": schedule, "costs": _costs(schedule)} for schedule in by_size]


def _costs(schedule: Schedule) -> Costs:
    """Times that differ by stage, and never so that two operations of a rank end at once."""
    draw = random.Random(len(schedule.rank_of))
    forward = [draw.randint(1, 4) + 0.25 for _ in range(schedule.num_stages)]
    return Costs(forward=forward, backward=[2 * time for time in forward])


@over_cases(*_cases(60))
def equals_the_ledger(answer: Answer, schedule: Schedule, costs: Costs) -> Mismatch | None:
    """on schedules drawn at random, what every rank holds equals the ledger at all times"""
    expected = [changes(curve) for curve in ledger(schedule, costs)]
    got = [changes(curve) for curve in answer(schedule, costs)]
    if len(got) != schedule.num_ranks:
        return Mismatch(f"{schedule.num_ranks} lists, one a rank", f"{len(got)} lists", schedule.grid())
    for rank, (right, mine) in enumerate(zip(expected, got, strict=True)):
        if right != mine:
            return Mismatch(f"rank {rank}: {right}", f"rank {rank}: {mine}", schedule.grid())
    return None


HELD = Exercise(
    name="04-held",
    statement=(
        "Write held(schedule, costs): for every rank the number of micro-batches whose activations it holds, "
        "as a list of (time, count) with a point wherever an operation ends. A rank may hold several stages: "
        "a micro-batch counts once on each. Some schedules split a backward in two, I (the gradient of the "
        "input) and W (of the weights), which chapter 11 explains; the micro-batch is released by W."
    ),
    starter=held,
    solution=solution,
    properties=(equals_the_ledger,),
    hints=(
        "Simulate first; then walk through the computations in the order in which they end.",
        "A forward adds one. Which operation no longer needs the activations once it is done?",
        "B takes one away. Where the backward is split, I still needs them for its W: W takes one away.",
    ),
    imports=IMPORTS,
)

EXERCISES = (MOST_MICROBATCHES, HELD)
