"""Wrong answers to the exercises of chapter 02, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch02 import share_at_work_solution, solution
from gpipe_lab.plan.ops import Kind, Op
from gpipe_lab.plan.schedule import Schedule
from gpipe_lab.plan.schedules import gpipe, one_f_one_b

Rows = list[list[str]]  # one row a rank, one entry a slot: "F0", or "." where the rank is idle


def one_over_ranks(rows: Rows) -> float:
    return 1 / len(rows)


def idle_share(rows: Rows) -> float:
    return 1 - share_at_work_solution(rows)


def slots_with_anyone_at_work(rows: Rows) -> float:
    columns = list(zip(*rows, strict=True))
    return sum(set(column) != {"."} for column in columns) / len(columns)


def ranks_at_work_on_average(rows: Rows) -> float:
    return len(rows) * share_at_work_solution(rows)


def first_rank_alone(rows: Rows) -> float:
    return share_at_work_solution(rows[:1])


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


MUTANTS = {
    "02-share-at-work": {
        "1/P, the formula of one batch": one_over_ranks,
        "the idle share": idle_share,
        "slots in which anyone works": slots_with_anyone_at_work,
        "how many ranks work on average": ranks_at_work_on_average,
        "the first rank alone": first_rank_alone,
    },
    "02-naive": {
        "1F1B: right gradients, but ranks overlap": one_f_one_b,
        "gpipe: right gradients, but ranks overlap": gpipe,
        "only the first micro-batch": only_the_first_microbatch,
        "backward before forward": backward_first,
        "two micro-batches at a time": two_at_a_time,
    },
}
