"""Add the sends and receives that a schedule implies, in one order that cannot hang."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from .errors import is_count, require
from .ops import RECEIVES, TRANSFERS, Op, peer, sent
from .schedule import Schedule
from .simulate import Costs, OpCosts, Times
from .validate import validate
from .walk import Graph


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
    graph = schedule.graph
    _, ends = Times(schedule, Costs() if costs is None else costs).columns
    ranks, takers = graph.ranks, graph.takers
    transfers: list[list[Op]] = [[] for _ in graph.rows]
    followers: list[list[int]] = [
        [] for _ in graph.rows
    ]  # what comes after a send, or needs what is received
    for number in sorted(schedule.walked.order, key=ends.__getitem__):  # ties: as in the walk
        if number in takers:
            rank, taker = ranks[number], takers[number]
            send = sent(graph.ops[number])
            transfers[rank].append(send)
            followers[rank].append(number + 1)
            transfers[ranks[taker]].append(peer(send))
            followers[ranks[taker]].append(taker)
    rows = zip(graph.rows, transfers, followers, strict=True)
    return replace(schedule, ops=tuple(_merge(graph, *row, hoist) for row in rows))


def _merge(graph: Graph, row: range, transfers: list[Op], followers: list[int], hoist: int) -> tuple[Op, ...]:
    """One rank's computations with its transfers between them: each as early as may be, in their order.

    A transfer stands in front of its follower, a receive by up to `hoist` computations earlier.
    """
    latest = reversed(list(accumulate(reversed(followers), min)))
    merged: list[Op] = []
    at = row.start
    for transfer, follower, last in zip(transfers, followers, latest, strict=True):
        first = follower - hoist if transfer.kind in RECEIVES else follower
        slot = first if first < last else last
        if slot > at:
            merged += graph.ops[at:slot]
            at = slot
        merged.append(transfer)
    return (*merged, *graph.ops[at : row.stop])


def as_written(schedule: Schedule) -> Schedule:
    """The schedule with its transfers where one first writes them down, in no common order.

    Every receive stands right before the computation that needs it, every send right after what it sends.
    The result may hang, which `hangs` tells and `validate` explains; `lower` never does.
    """
    graph = schedule.graph
    sends = {number: sent(graph.ops[number]) for number in graph.takers}
    receives = {taker: peer(sends[number]) for number, taker in graph.takers.items()}
    rows = tuple(
        tuple(op for n in row for op in (receives.get(n), graph.ops[n], sends.get(n)) if op is not None)
        for row in graph.rows
    )
    return replace(schedule, ops=rows)


def hangs(schedule: Schedule) -> bool:
    """Whether ranks come to wait for each other in a circle, each with one queue of transfers.

    The rule is NCCL's strictest: a rank's transfers begin in its own order, each when both its ends have
    come to it.
    """
    return schedule.walked.is_stuck
