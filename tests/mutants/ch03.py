"""Wrong answers to the exercises of chapter 03, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch03 import solution
from gpipe_lab.plan.ops import Kind, Op
from gpipe_lab.plan.schedule import Schedule
from gpipe_lab.plan.schedules import naive, one_f_one_b


def loses_the_last_microbatch(num_stages: int, num_microbatches: int) -> Schedule:
    kept = tuple(
        tuple(op for op in row if op.microbatch < max(1, num_microbatches - 1))
        for row in solution(num_stages, num_microbatches).ops
    )
    return Schedule("short", num_microbatches, tuple(range(num_stages)), kept)


def orders_differ(num_stages: int, num_microbatches: int) -> Schedule:
    """Odd stages run their backwards first in, first out, the others last in, first out."""

    def row(stage: int) -> tuple[Op, ...]:
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [Op(Kind.B, stage, m) for m in range(num_microbatches)]
        return tuple(forwards + (backwards if stage % 2 else backwards[::-1]))

    return Schedule(
        "mixed", num_microbatches, tuple(range(num_stages)), tuple(row(stage) for stage in range(num_stages))
    )


def two_halves(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, but for each half of the micro-batches: the pipeline drains twice."""
    half = (num_microbatches + 1) // 2

    def row(stage: int) -> tuple[Op, ...]:
        parts = [range(half), range(half, num_microbatches)]
        return tuple(Op(kind, stage, m) for part in parts for kind in (Kind.F, Kind.B) for m in part)

    return Schedule(
        "two halves",
        num_microbatches,
        tuple(range(num_stages)),
        tuple(row(stage) for stage in range(num_stages)),
    )


MUTANTS = {
    "03-gpipe": {
        "1F1B: the same time, but backwards come early": one_f_one_b,
        "naive: one micro-batch at a time": naive,
        "the last micro-batch is lost": loses_the_last_microbatch,
        "stages disagree on the order of backwards": orders_differ,
        "two halves, drained one after the other": two_halves,
    },
}
