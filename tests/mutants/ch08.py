"""Wrong answers to the exercises of chapter 08, which each of them must refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from gpipe_lab.course.exercises.ch08 import exchanges, solution
from gpipe_lab.plan.lowering import as_written
from gpipe_lab.plan.ops import Kind, Op, peer
from gpipe_lab.plan.schedule import Schedule
from gpipe_lab.plan.schedules import gpipe, one_f_one_b


def only_odd_stages(num_stages: int, num_microbatches: int) -> Schedule:
    """Mended on every other rank: right for two stages, and for no more."""
    mended, given = solution(num_stages, num_microbatches), exchanges(num_stages, num_microbatches)
    rows = zip(mended.ops, given.ops, strict=True)
    return replace(given, ops=tuple(row[stage % 2 == 0] for stage, row in enumerate(rows)))


def gradient_first(num_stages: int, num_microbatches: int) -> Schedule:
    """The rank above takes the gradient before it sends, in the last exchange of the warmup too."""
    given = exchanges(num_stages, num_microbatches)
    rows = []
    for row in given.ops:
        ops = list(row)
        for place, (op, following) in enumerate(zip_longest(row, row[1:])):
            if following is not None and (op.kind, following.kind) == (Kind.SEND_F, Kind.RECV_B):
                ops[place : place + 2] = following, op
        rows.append(tuple(ops))
    return replace(given, ops=tuple(rows))


def all_receives_first(num_stages: int, num_microbatches: int) -> Schedule:
    """Every buffer posted ahead of everything else."""
    given = exchanges(num_stages, num_microbatches)
    receives = (Kind.RECV_F, Kind.RECV_B)
    return replace(
        given, ops=tuple(tuple(sorted(row, key=lambda op: op.kind not in receives)) for row in given.ops)
    )


def gpipe_instead(num_stages: int, num_microbatches: int) -> Schedule:
    """Safe, and another schedule."""
    return as_written(gpipe(num_stages, num_microbatches))


def without_messages(num_stages: int, num_microbatches: int) -> Schedule:
    """Nothing is exchanged, so nothing waits."""
    return one_f_one_b(num_stages, num_microbatches)


def one_message_lost(num_stages: int, num_microbatches: int) -> Schedule:
    """The last gradient is neither sent nor received."""
    right = solution(num_stages, num_microbatches)
    last = Op(Kind.SEND_B, num_stages - 1, num_microbatches - 1)
    lost = {last, peer(last)} if num_stages > 1 else set()
    return replace(right, ops=tuple(tuple(op for op in row if op not in lost) for row in right.ops))


MUTANTS = {
    "08-step-bytes": {
        "only the way down": lambda P, rows, size: (P - 1) * sum(rows) * size,
        "P boundaries": lambda P, rows, size: 2 * P * sum(rows) * size,
        "every micro-batch as large as the first": lambda P, rows, size: (
            2 * (P - 1) * len(rows) * rows[0] * size
        ),
        "messages, not bytes": lambda P, rows, size: 2 * (P - 1) * len(rows),
    },
    "08-exchanges": {
        "as one writes it down first": lambda P, M: as_written(one_f_one_b(P, M)),
        "mended on every other rank only": only_odd_stages,
        "gradient first, in the warmup too": gradient_first,
        "all receives posted first": all_receives_first,
        "GPipe instead": gpipe_instead,
        "no messages at all": without_messages,
        "one message lost": one_message_lost,
    },
}
