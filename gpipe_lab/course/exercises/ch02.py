"""Chapter 02, the naive pipeline: many micro-batches, and never two ranks busy at the same time."""

from __future__ import annotations

from itertools import pairwise

from ...plan.ops import Kind, Op
from ...plan.schedule import Schedule
from ...plan.schedules import gpipe, one_f_one_b
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over
from .schedules import it_runs

IMPORTS = "from gpipe_lab import Kind, Op, Schedule"


def my_naive(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        row: list[Op] = []  # Op(Kind.F, stage, 0) is the forward of micro-batch 0 on this stage
        rows.append(tuple(row))
    raise NotImplementedError("fill the rows, then delete this line")
    return Schedule("my naive", num_microbatches, tuple(range(num_stages)), tuple(rows))


def solution(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        row = []
        for m in range(num_microbatches):
            # The backward comes before the next forward, so stage 0 admits one micro-batch at a time.
            row += [Op(Kind.F, stage, m), Op(Kind.B, stage, m)]
        rows.append(tuple(row))
    return Schedule("my naive", num_microbatches, tuple(range(num_stages)), tuple(rows))


def only_the_first_microbatch(num_stages: int, num_microbatches: int) -> Schedule:
    rows = tuple((Op(Kind.F, stage, 0), Op(Kind.B, stage, 0)) for stage in range(num_stages))
    return Schedule("short", num_microbatches, tuple(range(num_stages)), rows)


def backward_first(num_stages: int, num_microbatches: int) -> Schedule:
    turned = tuple(tuple(reversed(row)) for row in solution(num_stages, num_microbatches).ops)
    return Schedule("backward first", num_microbatches, tuple(range(num_stages)), turned)


def two_at_a_time(num_stages: int, num_microbatches: int) -> Schedule:
    def row(stage: int) -> tuple[Op, ...]:
        pairs = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
        return tuple(Op(kind, stage, m) for pair in pairs for kind in (Kind.F, Kind.B) for m in pair)

    return Schedule(
        "two at a time",
        num_microbatches,
        tuple(range(num_stages)),
        tuple(row(stage) for stage in range(num_stages)),
    )


@over(P=range(1, 5), M=range(1, 6))
def never_two_busy(answer: Answer, P: int, M: int) -> Mismatch | None:
    """no two ranks are ever busy at the same time"""
    schedule = answer(P, M)
    costs = Costs(forward=[1.0 + stage for stage in range(P)], backward=[2.0 + stage for stage in range(P)])
    events = sorted(simulate(schedule, costs).computations, key=lambda event: event.start_ms)
    for earlier, later in pairwise(events):
        if later.start_ms < earlier.end_ms - 1e-9:
            return Mismatch(
                "one rank busy at a time",
                f"rank {earlier.rank} in {earlier.op} while rank {later.rank} runs {later.op}",
                schedule.grid(),
            )
    return None


NAIVE = Exercise(
    name="02-naive",
    statement=(
        "Write the naive pipeline for many micro-batches: each goes all the way down and all the way back "
        "before the next one starts, so that two ranks are never busy at the same time."
    ),
    starter=my_naive,
    solution=solution,
    properties=(it_runs, never_two_busy),
    hints=(
        "All stages have the same row, but for the number of the stage.",
        "What must stage 0 have finished before it may start micro-batch 1?",
        "A row is F0 B0 F1 B1 F2 B2 ...: stage 0 waits for B0 to come back before it starts F1.",
    ),
    mutants={
        "1F1B: right gradients, but ranks overlap": one_f_one_b,
        "gpipe: right gradients, but ranks overlap": gpipe,
        "only the first micro-batch": only_the_first_microbatch,
        "backward before forward": backward_first,
        "two micro-batches at a time": two_at_a_time,
    },
    imports=IMPORTS,
)

EXERCISES = (NAIVE,)
