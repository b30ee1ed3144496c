"""Chapter 02, the naive pipeline: the share of the slots that is worked in, and one rank busy at a time."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

from ...plan.ops import Kind, Op
from ...plan.schedule import Schedule
from ...plan.schedules import SCHEDULES
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over
from .schedules import it_runs

# The utilisation, counted in a grid.


def share_at_work(rows):
    """The utilisation of a step: the share of all ranks' slots in which they work.

    rows: a list for each rank, with an entry for each slot: "F0", "B0", ..., or "." where the rank is idle.
    """
    return 1.0  # change this line


def share_at_work_solution(rows):
    return sum(cell != "." for row in rows for cell in row) / sum(len(row) for row in rows)


@over(schedule=("naive", "gpipe"), P=range(1, 5), M=range(1, 5), stages=("equal", "unequal"))
def equals_the_trace(answer: Answer, schedule: str, P: int, M: int, stages: str) -> Mismatch | None:
    """it is the busy share of the simulated step, with unequal stages too"""
    forward = [1 if stages == "equal" else 1 + stage for stage in range(P)]
    costs = Costs(forward=forward, backward=[2 * slots for slots in forward])
    trace = simulate(SCHEDULES[schedule](P, M), costs)
    rows = [["."] * round(trace.makespan_ms) for _ in range(P)]
    for event in trace.computations:
        for slot in range(round(event.start_ms), round(event.end_ms)):
            rows[event.rank][slot] = event.op.short
    grid = "\n".join(" ".join(cell.ljust(2) for cell in row).rstrip() for row in rows)
    got = answer(rows)
    right = 1 - trace.bubble_fraction
    return None if isclose(got, right, abs_tol=1e-9) else Mismatch(f"{right:.3f}", got, grid)


SHARE_AT_WORK = Exercise(
    name="02-share-at-work",
    statement=(
        "Change one line: the utilisation of a step, counted in its grid. It is the share of all ranks' "
        "slots in which they work, whatever the schedule and however unequal the stages."
    ),
    starter=share_at_work,
    solution=share_at_work_solution,
    properties=(equals_the_trace,),
    hints=(
        "In the grid of gl.naive(4) there are 4 rows of 8 slots. In how many of the 32 is a rank at work?",
        'A rank is at work where its entry is not ".". Count over all rows: where stages are unequal, '
        "the rows are too.",
        'Divide sum(cell != "." for row in rows for cell in row) by the number of all cells.',
    ),
)


# The naive pipeline for many micro-batches.

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
    imports=IMPORTS,
)

EXERCISES = (SHARE_AT_WORK, NAIVE)
