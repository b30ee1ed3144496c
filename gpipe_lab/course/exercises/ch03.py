"""Chapter 03, micro-batches: GPipe, written as a schedule."""

from __future__ import annotations

import math

from ...plan.formulas import pipeline_ms
from ...plan.ops import Kind, Op
from ...plan.schedule import Schedule
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over
from .schedules import it_runs

IMPORTS = "from gpipe_lab import Kind, Op, Schedule"


def my_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        row: list[Op] = []  # Op(Kind.F, stage, 0) is the forward of micro-batch 0 on this stage
        rows.append(tuple(row))
    raise NotImplementedError("fill the rows, then delete this line")
    return Schedule("my gpipe", num_microbatches, tuple(range(num_stages)), tuple(rows))


def solution(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        # Last in, first out: the micro-batch that went forward last has its activations at hand.
        backwards = [Op(Kind.B, stage, m) for m in reversed(range(num_microbatches))]
        rows.append(tuple(forwards + backwards))
    return Schedule("my gpipe", num_microbatches, tuple(range(num_stages)), tuple(rows))


@over(P=range(1, 5), M=range(1, 7))
def forwards_first(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every rank runs all its forwards before its first backward"""
    schedule = answer(P, M)
    for rank, row in enumerate(schedule.ops):
        kinds = [op.kind for op in row]
        if kinds != [Kind.F] * M + [Kind.B] * M:
            got = " ".join(schedule.label(op) for op in row)
            return Mismatch(f"{M} forwards, then {M} backwards on rank {rank}", got, schedule.grid())
    return None


@over(P=range(1, 5), M=range(1, 7), backward_ms=(1.0, 2.0, 3.5))
def on_time(answer: Answer, P: int, M: int, backward_ms: float) -> Mismatch | None:
    """the whole step takes (M + P − 1)(Tf + Tb), with Tf = 1 ms"""
    schedule = answer(P, M)
    makespan = simulate(schedule, Costs(forward=1.0, backward=backward_ms)).makespan_ms
    expected = pipeline_ms(P, M, 1.0, backward_ms)
    if math.isclose(makespan, expected, rel_tol=1e-9):
        return None
    return Mismatch(f"{expected:g} ms", f"{makespan:g} ms", schedule.grid())


GPIPE = Exercise(
    name="03-gpipe",
    statement=(
        "Write GPipe as a schedule: every rank runs all its forwards, then all its backwards. "
        "Either order of the backwards is right, as long as all stages agree on one."
    ),
    starter=my_gpipe,
    solution=solution,
    properties=(it_runs, forwards_first, on_time),
    hints=(
        "You say only the order on each rank. Waiting is what is left over, so nothing says when.",
        "A row has two parts of M operations each: the forwards, then the backwards.",
        "F0 F1 F2 F3 B3 B2 B1 B0 for four micro-batches, on every stage.",
    ),
    imports=IMPORTS,
)

EXERCISES = (GPIPE,)
