"""Orders of sends and receives that nobody has made safe: to be looked at, and to see them hang."""

from __future__ import annotations

from dataclasses import replace

from .ops import Kind, Op
from .schedule import Schedule, dependencies, peer, send_of


def as_written(schedule: Schedule) -> Schedule:
    """The schedule with its transfers where one first writes them down, in no common order.

    Every receive stands right before the computation that needs it, every send right after what it sends.
    The result may hang, which `hangs` tells and `validate` explains; `lower` never does.
    """
    sends = [send for op in schedule.rank_of if (send := send_of(op, schedule)) is not None]
    receives = {_needed_by(receive, schedule): receive for receive in map(peer, sends)}
    rows: list[tuple[Op, ...]] = []
    for row in schedule.ops:
        around = [(receives.get(op), op, send_of(op, schedule)) for op in row]
        rows.append(tuple(op for three in around for op in three if op is not None))
    return replace(schedule, ops=tuple(rows))


def _needed_by(receive: Op, schedule: Schedule) -> Op:
    """The first computation of the receiving rank that needs the message."""
    forward = receive.kind is Kind.RECV_F
    source = receive.stage + (-1 if forward else 1)
    row = schedule.ops[schedule.home(receive.stage, receive.microbatch)]
    return next(
        op
        for op in row
        if (op.stage, op.microbatch) == (receive.stage, receive.microbatch)
        and any(needed.stage == source for needed in dependencies(op, schedule))
    )


def hangs(schedule: Schedule) -> bool:
    """Whether ranks come to wait for each other in a circle, each with one queue of transfers.

    The rule is NCCL's strictest: a rank's transfers begin in its own order, each when both its ends have
    come to it.
    """
    return schedule.walked.is_stuck
