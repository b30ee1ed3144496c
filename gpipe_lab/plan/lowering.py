"""Add the sends and receives that a schedule implies, in one order that cannot hang."""

from __future__ import annotations

from dataclasses import replace

from .errors import is_count, require
from .ops import TRANSFERS, Kind, Op, peer
from .schedule import Schedule, dependencies, send_of, sent
from .simulate import Costs, OpCosts, Times
from .validate import validate


def lower(schedule: Schedule, *, hoist: int = 2, costs: OpCosts | None = None) -> Schedule:
    """The schedule with its transfers: every send right after what it sends, every receive ahead of need.

    All transfers get one order, that in which their results come to exist when the schedule is walked,
    and every rank issues its own in that order. NCCL matches by order and may hold a stream until both
    ends are there; with one total order that is never a circle. Within that order a receive is posted up
    to `hoist` computations before the one that needs it, so that a message can travel while its rank
    still computes; `hoist=0` posts as late as the order allows.

    `costs` are the times of that walk (default: forward 1 ms, backward 2 ms). Any costs give an order that
    cannot hang; the true ones give one in which no message waits for another that comes into being later.

    Raises `ScheduleError` for a schedule that cannot run, `InputError` for one already lowered.
    """
    validate(schedule)
    require(
        is_count(hoist, least=0),
        "hoist is a whole number of operations, at least 0",
        got=f"hoist={hoist!r}",
        where="lower",
        remedy="hoist=2",
    )
    require(
        schedule.graph.kinds.isdisjoint(TRANSFERS),
        "sends and receives are added by lowering, once",
        got=f"{schedule.name!r} already holds transfers",
        where="lower",
        remedy="lower the schedule that was authored",
    )
    graph, walked = schedule.graph, schedule.walked
    _, ends = Times(schedule, Costs() if costs is None else costs).columns
    transfers: list[list[Transfer]] = [[] for _ in schedule.ops]
    for number in sorted(walked.order, key=ends.__getitem__):  # ties: as in the walk
        if number in graph.takers:
            rank, taker = graph.ranks[number], graph.takers[number]
            other = graph.ranks[taker]
            send, after = sent(graph.ops[number]), number + 1 - graph.rows[rank].start
            needed_at = taker - graph.rows[other].start
            transfers[rank].append((send, after, after))
            transfers[other].append((peer(send), max(0, needed_at - hoist), needed_at))
    rows = zip(schedule.ops, transfers, strict=True)
    return replace(schedule, ops=tuple(_merge(row, own) for row, own in rows))


Transfer = tuple[Op, int, int]  # and the first and the last computation in front of which it may stand


def _merge(row: tuple[Op, ...], transfers: list[Transfer]) -> tuple[Op, ...]:
    """One rank's computations with its transfers between them: each as early as may be, in their order."""
    deadline = len(row)
    slots = []
    for _, first, last in reversed(transfers):
        deadline = min(last, deadline)
        slots.append(min(first, deadline))
    merged: list[Op] = []
    at = 0
    for (op, _, _), slot in zip(transfers, reversed(slots), strict=True):
        if slot > at:
            merged += row[at:slot]
            at = slot
        merged.append(op)
    return (*merged, *row[at:])


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
