"""Wrong answers to the exercises of chapter 11, which each of them must refuse."""

from __future__ import annotations

from functools import partial

from gpipe_lab.course.exercises.ch11 import hold_back, solution_own, solution_weights
from gpipe_lab.course.exercises.schedules import renamed, with_rows
from gpipe_lab.plan.ops import Kind, Op
from gpipe_lab.plan.schedule import Schedule
from gpipe_lab.plan.schedules import each, gpipe, naive, one_f_one_b, zero_bubble_h1, zero_bubble_h2


def with_warmup(num_stages: int, num_microbatches: int, *, extra: int = 0, flat: bool = False) -> Schedule:
    """A wrong answer: another number of forwards ahead."""

    def row(stage: int) -> list[Op]:
        forwards = each(Kind.F, stage, num_microbatches)
        backwards = each(Kind.B, stage, num_microbatches)
        num_warmup = (num_stages - 1 if flat else num_stages - 1 - stage) + extra
        pairs = zip(forwards[num_warmup:], backwards, strict=False)
        steady = [op for pair in pairs for op in pair]
        return forwards[:num_warmup] + steady + backwards[len(forwards[num_warmup:]) :]

    return with_rows("warmup", num_microbatches, [row(stage) for stage in range(num_stages)])


def always_warms_up_in_full(num_stages: int, num_microbatches: int) -> Schedule:
    """Right where M ≥ P; with fewer micro-batches it runs forwards that do not exist."""
    rows = []
    for stage in range(num_stages):
        num_warmup = num_stages - 1 - stage
        row = each(Kind.F, stage, num_warmup)
        for m in range(num_microbatches - num_warmup):
            row += [Op(Kind.F, stage, num_warmup + m), Op(Kind.B, stage, m)]
        row += each(Kind.B, stage, num_microbatches)[max(0, num_microbatches - num_warmup) :]
        rows.append(row)
    return with_rows("full warmup", num_microbatches, rows)


def weights_first(order: list[Op], stage: int, num_stages: int) -> list[Op]:
    return [new for op in order for new in ([op._replace(kind=Kind.W), op] if op.kind is Kind.I else [op])]


def forgets_those_left(order: list[Op], stage: int, num_stages: int) -> list[Op]:
    done = solution_weights(order, stage, num_stages)
    return done[: len(done) - min(stage, 1)]


def split_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    kinds = (Kind.F, Kind.I, Kind.W)
    rows = [
        [op for kind in kinds for op in each(kind, stage, num_microbatches)] for stage in range(num_ranks)
    ]
    return with_rows("split GPipe", num_microbatches, rows)


def waits_for_ever(num_ranks: int, num_microbatches: int) -> Schedule:
    """Every stage wants its first gradient before its second forward."""
    rows = [list(row) for row in solution_own(num_ranks, num_microbatches).ops]
    first = rows[0].index(Op(Kind.I, 0, 0))
    rows[0].insert(0, rows[0].pop(first))
    return with_rows("waits", num_microbatches, rows)


MUTANTS = {
    "11-1f1b": {
        "one forward too many in the warmup: as fast, and holds one more": partial(with_warmup, extra=1),
        "the same warmup on every stage: all hold P": partial(with_warmup, flat=True),
        "GPipe: holds M": gpipe,
        "naive: holds 1 and waits": naive,
        "warms up in full where M < P": always_warms_up_in_full,
    },
    "11-place-weights": {
        "each W right after its I": partial(hold_back, by="none"),
        "all W's at the end: holds M": partial(hold_back, by="all"),
        "P put off on every stage: holds more than P": partial(hold_back, by="P"),
        "most put off at the top, where there is no room": partial(hold_back, by="most at the top"),
        "W ahead of its I": weights_first,
        "one W left out": forgets_those_left,
    },
    "11-invent": {
        "1F1B under another name": partial(renamed, one_f_one_b),
        "ZB-H1 under another name": partial(renamed, zero_bubble_h1),
        "ZB-H2 under another name": partial(renamed, zero_bubble_h2),
        "GPipe with split backwards: holds M": split_gpipe,
        "a rank that waits for ever": waits_for_ever,
        "naive under another name": partial(renamed, naive),
    },
}
