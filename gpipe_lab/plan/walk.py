"""Walk through a schedule once without a clock; then any costs give its times in one pass over flat lists.

Which operation can run after which does not depend on how long any of them takes. So the walk is made once
a schedule, and leaves steps that are one maximum and one sum each:

    start = max(end[first], end[second] + message);  end = start + time

A computation's `first` is the one before it on its rank, its `second` the result it needs from another
rank. A transfer of a lowered schedule starts at the latest of four: what both ends have computed when they
post it, and the start of the transfer before it at both ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .ops import COMPUTE, RECEIVES, TRANSFERS, Kind, Op, peer

if TYPE_CHECKING:
    from .schedule import Schedule

START = 0  # the step that ends at time 0


@dataclass
class Steps:
    """The steps in an order in which they can run, as columns; entry 0 is the start.

    messages[i] is the operation whose message delays `second[i]`, works[i] the one whose time step i takes:
    a computation, or the send of a transfer; None where there is none.
    """

    first: list[int] = field(default_factory=lambda: [START])
    second: list[int] = field(default_factory=lambda: [START])
    messages: list[Op | None] = field(default_factory=lambda: [None])
    works: list[Op | None] = field(default_factory=lambda: [None])

    def add(self, first: int, second: int, message: Op | None = None, work: Op | None = None) -> int:
        self.first.append(first)
        self.second.append(second)
        self.messages.append(message)
        self.works.append(work)
        return len(self.works) - 1

    @cached_property
    def zeros(self) -> list[float]:
        """No time for any entry."""
        return [0.0] * len(self.works)

    def times(self, message_ms: list[float], work_ms: list[float]) -> tuple[list[float], list[float]]:
        """(starts, ends) of all steps, in ms, given a time for every entry of `messages` and `works`."""
        starts, ends = [0.0], [0.0]
        put_start, put_end = starts.append, ends.append
        rows = zip(self.first, self.second, message_ms, work_ms, strict=True)
        next(rows)
        for first, second, message, work in rows:
            start = ends[first]
            arrival = ends[second] + message
            if arrival > start:
                start = arrival
            put_start(start)
            put_end(start + work)
        return starts, ends


@dataclass(frozen=True)
class Walk:
    """The operations that could run, in an order in which they can; and where each stuck rank stands.

    ranks, ops and step_of are columns: entry i is an operation, its rank and its step. blocked maps a
    rank to (its computation that cannot start, what that waits for); heads maps a rank to the first of
    its posted transfers that has not started; posted holds all of those.
    """

    schedule: Schedule = field(repr=False)
    ranks: list[int]
    ops: list[Op]
    step_of: list[int]
    steps: Steps
    blocked: dict[int, tuple[Op, Op]]
    heads: dict[int, Op]
    posted: frozenset[Op]

    @property
    def is_stuck(self) -> bool:
        return bool(self.blocked or self.heads)

    @cached_property
    def circle(self) -> list[Op]:
        """The operations that wait for each other, each for the next and the last for the first; or none."""
        standing = [*(op for op, _ in self.blocked.values()), *self.heads.values()]
        if not standing:
            return []
        op = standing[0]
        path: list[Op] = []
        while op not in path:
            path.append(op)
            op = self._held_up_by(op)
        return path[path.index(op) :]

    def _held_up_by(self, op: Op) -> Op:
        """What a blocked operation waits for: where the rank stands that is to bring it."""
        rank_of = self.schedule.rank_of
        rank = rank_of[op]
        if self.heads.get(rank) == op:  # a transfer whose other end is not there, or not first
            other = peer(op)
            other_rank = rank_of[other]
            return self.heads[other_rank] if other in self.posted else self.blocked[other_rank][0]
        _, needed = self.blocked[rank]
        return self.heads[rank] if needed.kind in TRANSFERS else self.blocked[rank_of[needed]][0]

    @cached_property
    def is_lowered(self) -> bool:
        return any(op.kind in TRANSFERS for op in self.ops)

    @cached_property
    def computed(self) -> tuple[tuple[list[Kind], list[int]], ...]:
        """For every rank the kinds and the steps of its computations, in the order they run."""
        rows: list[tuple[list[Kind], list[int]]] = [([], []) for _ in self.schedule.ops]
        for rank, op, step in zip(self.ranks, self.ops, self.step_of, strict=True):
            if op.kind in COMPUTE:
                kinds, steps = rows[rank]
                kinds.append(op.kind)
                steps.append(step)
        return tuple(rows)

    @cached_property
    def groups(self) -> Groups:
        """The steps by what they cost: those of one kind, stage and number of segments cost the same."""
        return Groups(
            *_grouped(self.steps.messages, self.schedule), *_grouped(self.steps.works, self.schedule)
        )


class Groups(NamedTuple):
    """One example of each group (the first, None, costs nothing), and for every step its group's number."""

    message_examples: list[Op | None]
    messages: list[int]
    work_examples: list[Op | None]
    works: list[int]


def _grouped(ops: list[Op | None], schedule: Schedule) -> tuple[list[Op | None], list[int]]:
    last_segment = schedule.last_segment
    examples: list[Op | None] = [None]
    number: dict[tuple[Kind, int, int], int] = {}
    groups = []
    for op in ops:
        if op is None:
            groups.append(0)
            continue
        kind, stage, microbatch, _ = op
        key = (kind, stage, last_segment.get((stage, microbatch), 0) if last_segment else 0)
        group = number.get(key)
        if group is None:
            group = number[key] = len(examples)
            examples.append(op)
        groups.append(group)
    return examples, groups


def walk(schedule: Schedule) -> Walk:
    """Run every rank's operations as soon as what they need has run.

    Computations of a rank run one after another. Transfers of a lowered schedule are posted when their
    rank reaches them and do not hold the rank up, but each rank starts its own in order, and a transfer
    starts only when both ends have posted it (the strictest thing NCCL may do).
    """
    rank_of, needs = schedule.rank_of, schedule.needs
    steps = Steps()
    add = steps.add
    done: dict[Op, int] = {}
    ranks: list[int] = []
    ops: list[Op] = []
    step_of: list[int] = []
    last = [START] * schedule.num_ranks  # the step of each rank's last computation
    last_transfer = [START] * schedule.num_ranks
    cursor = [0] * schedule.num_ranks
    posted: list[deque[tuple[Op, int]]] = [deque() for _ in schedule.ops]
    waiting: dict[Op, list[int]] = defaultdict(list)
    blocked: dict[int, tuple[Op, Op]] = {}
    runnable = deque(range(schedule.num_ranks))

    def complete(rank: int, op: Op, step: int) -> None:
        done[op] = step
        ranks.append(rank)
        ops.append(op)
        step_of.append(step)
        if op in waiting:
            runnable.extend(waiting.pop(op))

    def start_transfers(rank: int) -> None:
        pending = [rank]
        while pending:
            rank = pending.pop()
            if not posted[rank]:
                continue
            op, posted_at = posted[rank][0]
            other = peer(op)
            other_rank = rank_of.get(other)
            if other_rank is None or not posted[other_rank] or posted[other_rank][0][0] != other:
                continue
            _, other_posted_at = posted[other_rank][0]
            both = add(posted_at, other_posted_at)
            own = add(both, last_transfer[rank])
            start = add(own, last_transfer[other_rank])
            end = add(start, start, work=other if op.kind in RECEIVES else op)
            for end_rank, end_op in ((rank, op), (other_rank, other)):
                posted[end_rank].popleft()
                last_transfer[end_rank] = start
                complete(end_rank, end_op, end)
            pending += (rank, other_rank)

    while runnable:
        rank = runnable.popleft()
        row = schedule.ops[rank]
        blocked.pop(rank, None)
        at = cursor[rank]
        while at < len(row):
            op = row[at]
            kind = op.kind
            first = second = last[rank]
            message: Op | None = None
            for needed in () if kind in RECEIVES else needs[op]:
                ready = done.get(needed)
                if ready is None:
                    blocked[rank] = (op, needed)
                    waiting[needed].append(rank)
                    break
                is_received = needed.kind in RECEIVES
                if not is_received and rank_of[needed] == rank:
                    continue  # it ran before on this rank
                if second != first:
                    first = add(first, second, message)
                second, message = ready, None if is_received else needed
            if rank in blocked:
                break
            at += 1
            if kind in TRANSFERS:
                posted[rank].append((op, first))
                start_transfers(rank)
            else:
                last[rank] = add(first, second, message, op if kind in COMPUTE else None)
                complete(rank, op, last[rank])
        cursor[rank] = at

    heads = {rank: queue[0][0] for rank, queue in enumerate(posted) if queue}
    not_started = frozenset(op for queue in posted for op, _ in queue)
    return Walk(schedule, ranks, ops, step_of, steps, blocked, heads, not_started)
