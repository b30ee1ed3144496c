"""Add the sends and receives that a schedule implies, in one order that cannot hang."""

from __future__ import annotations

from dataclasses import replace

from .errors import is_count, require
from .ops import SENDS, TRANSFERS, Kind, Op, peer
from .schedule import Schedule, dependencies, send_of
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
        not any(op.kind in TRANSFERS for op in schedule.rank_of),
        "sends and receives are added by lowering, once",
        got=f"{schedule.name!r} already holds transfers",
        where="lower",
        remedy="lower the schedule that was authored",
    )
    transfers: list[list[Op]] = [[] for _ in schedule.ops]
    for send in _sends(schedule, Costs() if costs is None else costs):
        for op in (send, peer(send)):
            transfers[schedule.home(op.stage, op.microbatch)].append(op)
    rows = zip(schedule.ops, transfers, strict=True)
    return replace(schedule, ops=tuple(tuple(_merge(row, own, schedule, hoist)) for row, own in rows))


def _sends(schedule: Schedule, costs: OpCosts) -> list[Op]:
    """The sends between ranks, in the order in which their results come to exist."""
    _, ends = Times(schedule, costs).columns
    ordered = sorted(schedule.messages, key=lambda message: ends[message.step])  # ties: as in the walk
    return [message.send for message in ordered]


def _merge(row: tuple[Op, ...], transfers: list[Op], schedule: Schedule, hoist: int) -> list[Op]:
    """One rank's computations with its transfers placed between them, in the transfers' order.

    A slot s means "before row[s]". A send's slot is fixed; a receive's lies between its neighbours.
    """
    position = {op: index for index, op in enumerate(row)}
    consumer = {
        received: index
        for index, op in reversed(list(enumerate(row)))
        for received in _receives(op, schedule)
    }
    deadline = len(row)
    slots = []
    for transfer in reversed(transfers):
        if transfer.kind in SENDS:
            (producer,) = dependencies(transfer, schedule)
            slot = position[producer] + 1
            assert slot <= deadline, "the order of transfers follows the order of results"
            deadline = slot
        else:
            deadline = min(consumer[transfer], deadline)
            slot = max(0, min(consumer[transfer] - hoist, deadline))
        slots.append(slot)
    earliest = 0
    placed: list[list[Op]] = [[] for _ in range(len(row) + 1)]
    for transfer, wanted in zip(transfers, reversed(slots), strict=True):
        earliest = max(earliest, wanted)
        placed[earliest].append(transfer)
    merged = [op for index, here in enumerate(placed) for op in (*here, *row[index : index + 1])]
    assert len(merged) == len(row) + len(transfers)
    return merged


def _receives(op: Op, schedule: Schedule) -> list[Op]:
    """The receives whose messages `op` needs from another rank."""
    home = schedule.stage_to_rank
    brought = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B, Kind.R: Kind.RECV_B}
    return [
        Op(brought[op.kind], op.stage, op.microbatch)
        for source in dependencies(op, schedule)
        if source.stage != op.stage and home[source.stage] != home[op.stage]
    ]


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
