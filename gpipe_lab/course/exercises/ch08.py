"""Chapter 08, moving tensors: the bytes of a step, and an order of 1F1B's exchanges that cannot hang."""

from __future__ import annotations

from dataclasses import replace

from ...plan.errors import ScheduleError
from ...plan.lowering import lower
from ...plan.ops import COMPUTE, SENDS, TRANSFERS, Kind, Op, peer
from ...plan.schedules import gpipe, one_f_one_b
from ...plan.validate import validate
from ..exercise import Answer, Case, Exercise, Mismatch, over, over_cases


def step_bytes(num_stages, microbatch_rows, row_bytes):
    """Bytes that all ranks together send in one training step.

    microbatch_rows: the rows of every micro-batch, such as (3, 3, 2, 2).
    row_bytes: what one row's activation takes at a boundary, the same at each.
    """
    return ...


def step_bytes_solution(num_stages, microbatch_rows, row_bytes):
    # Each boundary is crossed twice by every row: down as an activation, up as its gradient.
    return 2 * (num_stages - 1) * sum(microbatch_rows) * row_bytes


ROWS = ((1,), (4, 4), (3, 3, 2, 2), (5, 4, 4, 4, 4, 4, 4, 4))
_SIZES: tuple[Case, ...] = tuple(
    {"num_stages": P, "microbatch_rows": rows, "row_bytes": size}
    for P in (1, 2, 4)
    for rows in ROWS
    for size in (1, 4096)
)


@over_cases(*_SIZES)
def every_message_counted(
    answer: Answer, num_stages: int, microbatch_rows: tuple[int, ...], row_bytes: int
) -> Mismatch | None:
    """it is what one gets by going through the sends one by one, for GPipe and for 1F1B"""
    got = answer(num_stages, microbatch_rows, row_bytes)
    for make in (gpipe, one_f_one_b):
        lowered = lower(make(num_stages, len(microbatch_rows)))
        expected = sum(
            microbatch_rows[op.microbatch] * row_bytes for op in lowered.rank_of if op.kind in SENDS
        )
        if got != expected:
            return Mismatch(f"{expected} B", f"{got} B", f"in the order of {lowered.name}")
    return None


STEP_BYTES = Exercise(
    name="08-step-bytes",
    statement="Fill in one line: the bytes that all ranks together send in one training step.",
    starter=step_bytes,
    solution=step_bytes_solution,
    properties=(every_message_counted,),
    hints=(
        "Count boundaries first: how many are there between P stages?",
        "Every row crosses every boundary, and something comes back for it.",
        "2 × (P − 1) × all rows × the bytes of a row, however the rows are cut into micro-batches.",
    ),
)


IMPORTS = "from dataclasses import replace\n\nfrom gpipe_lab import Kind, Op, one_f_one_b"


def exchanges(num_stages, num_microbatches):
    """1F1B with its sends and receives: what each rank begins, in this order."""
    schedule = one_f_one_b(num_stages, num_microbatches)
    rows = []
    for stage, row in enumerate(schedule.ops):
        ops = []
        for op in row:
            m = op.microbatch
            if op.kind is Kind.F and stage > 0:
                ops.append(Op(Kind.RECV_F, stage, m))
            if op.kind is Kind.B and stage < num_stages - 1:
                ops.append(Op(Kind.RECV_B, stage, m))
            ops.append(op)
            if op.kind is Kind.F and stage < num_stages - 1:
                ops.append(Op(Kind.SEND_F, stage, m))
            if op.kind is Kind.B and stage > 0:
                ops.append(Op(Kind.SEND_B, stage, m))
        rows.append(tuple(ops))
    return replace(schedule, name="my 1F1B", ops=tuple(rows))


def solution(num_stages, num_microbatches):
    from itertools import zip_longest

    schedule = one_f_one_b(num_stages, num_microbatches)
    rows = []
    for stage, row in enumerate(schedule.ops):
        ops = []
        for op, following in zip_longest(row, row[1:]):
            m = op.microbatch
            if op.kind is Kind.F and stage > 0 and Op(Kind.RECV_F, stage, m) not in ops:
                ops.append(Op(Kind.RECV_F, stage, m))
            if op.kind is Kind.B and stage < num_stages - 1:
                ops.append(Op(Kind.RECV_B, stage, m))
            ops.append(op)
            if op.kind is Kind.F and stage < num_stages - 1:
                ops.append(Op(Kind.SEND_F, stage, m))
            if op.kind is Kind.B and stage > 0:
                if following is not None and following.kind is Kind.F:
                    # The rank above sends this activation before it takes the gradient: take it first.
                    ops.append(Op(Kind.RECV_F, stage, following.microbatch))
                ops.append(Op(Kind.SEND_B, stage, m))
        rows.append(tuple(ops))
    return replace(schedule, name="my 1F1B", ops=tuple(rows))


GRID = {"P": range(1, 6), "M": range(1, 9)}


@over(**GRID)
def still_1f1b(answer: Answer, P: int, M: int) -> Mismatch | None:
    """without its messages it is 1F1B, every computation in its order"""
    schedule = answer(P, M)
    rows = tuple(tuple(op for op in row if op.kind in COMPUTE) for row in schedule.ops)
    if rows == one_f_one_b(P, M).ops:
        return None
    shown = replace(schedule, ops=rows)
    return Mismatch(one_f_one_b(P, M).grid(), "another order", shown.grid())


@over(**GRID)
def every_message(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every activation and every gradient is sent once and received once, and nothing else is"""
    found = [op for row in answer(P, M).ops for op in row if op.kind in TRANSFERS]
    wanted = [op for op in lower(one_f_one_b(P, M)).rank_of if op.kind in TRANSFERS]
    if sorted(map(str, found)) == sorted(map(str, wanted)):
        return None
    wrong = set(map(str, found)) ^ set(map(str, wanted))
    return Mismatch(f"{len(wanted)} sends and receives", f"{len(found)}", " ".join(sorted(wrong)))


@over(**GRID)
def it_ends(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every rank comes to its end when each transfer waits for its other end before the next begins"""
    try:
        validate(answer(P, M))
    except ScheduleError as error:
        return Mismatch("an end on every rank", error.got, error.grid)
    return None


@over_cases({"P": 3, "M": 5})
def it_really_ends(answer: Answer, P: int, M: int) -> Mismatch | None:
    """real processes send the messages in this order, and each arrives where it belongs"""
    from ...lab.failures import RankFailed
    from ...lab.lab import Lab
    from ..exchanges import play

    schedule = answer(P, M)
    with Lab(P, device="cpu") as lab:
        try:
            received = play(lab, schedule)
        except RankFailed as error:
            return Mismatch("an end on every rank", f"rank {error.rank} in {error.op}: {error.reason}")
    for rank, row in enumerate(received):
        for receive, sent in row:
            if sent != peer(receive):
                return Mismatch(f"{peer(receive)} in {receive} on rank {rank}", f"{sent}")
    return None


EXCHANGES = Exercise(
    name="08-exchanges",
    statement=(
        "Mend exchanges: put 1F1B's sends and receives in an order in which every rank ends, although a "
        "rank's transfers begin one by one and each waits for its other end. As given it hangs from two "
        "stages and two micro-batches on."
    ),
    starter=exchanges,
    solution=solution,
    properties=(still_1f1b, every_message, it_ends, it_really_ends),
    hints=(
        "Look at the circle for P = 2, M = 2: the rank above sends an activation, the rank below a gradient. "
        "Neither receives. One of the two has to receive first.",
        "Let it be the same rule at every boundary, or the ranks in the middle disagree with one of their "
        "neighbours. Above, each rank sends the activation and then takes the gradient.",
        "So below: after a backward that is followed by a forward, receive that forward's activation first, "
        "and then send the gradient. Receive it only once.",
    ),
    imports=IMPORTS,
    on_ranks=True,
)

EXERCISES = (STEP_BYTES, EXCHANGES)
