"""A schedule is data: for every rank, which operations run in which order.

Everything else (validator, simulator, executor, memory estimate, plots) consumes this one value. Idle
time is not stored in it; idle time is what is left over when the operations are laid out on a clock,
which is what `walk` does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from .ops import COMPUTE, RECEIVES, TRANSFERS, Kind, Op


@dataclass(frozen=True)
class Schedule:
    """Which operations every rank runs, in program order.

    ops[rank] lists the operations of that rank. stage_to_rank[stage] names the rank that holds a
    stage, so several stages may share a rank. With `recompute_waits`, a recompute starts only when the
    gradient for it is there; without, it starts as soon as its rank reaches it.

    With `num_replicas` there are that many copies of one pipeline, made by `replicate`: each has an equal
    share of the ranks and of the micro-batches, in order, and stage_to_rank counts within a copy.
    """

    name: str
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    ops: tuple[tuple[Op, ...], ...]
    recompute_waits: bool = False
    num_replicas: int = 1

    def __getstate__(self) -> dict[str, object]:
        """What pickle sends: the fields, not what has been worked out from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    @property
    def ranks_per_replica(self) -> int:
        return len(self.ops) // self.num_replicas

    @property
    def microbatches_per_replica(self) -> int:
        return self.num_microbatches // self.num_replicas

    @property
    def has_one_stage_a_rank(self) -> bool:
        return self.num_stages == self.ranks_per_replica

    @cached_property
    def rank_of(self) -> dict[Op, int]:
        """The rank that runs each operation."""
        return {op: rank for rank, ops in enumerate(self.ops) for op in ops}

    @cached_property
    def needs(self) -> dict[Op, tuple[Op, ...]]:
        """The `dependencies` of every operation, worked out once."""
        return {op: dependencies(op, self) for op in self.rank_of}

    @cached_property
    def last_segment(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) -> the highest segment its backward has: the one that runs first."""
        highest: dict[tuple[int, int], int] = {}
        for op in self.rank_of:
            if op.kind is Kind.B:
                key = (op.stage, op.microbatch)
                highest[key] = max(op.segment, highest.get(key, 0))
        return highest

    @cached_property
    def trains(self) -> bool:
        """Whether there is any backward: a schedule without one is inference."""
        return any(op.kind in (Kind.B, Kind.I, Kind.W) for op in self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.stage_to_rank) if r == rank % self.ranks_per_replica)

    def home(self, stage: int, microbatch: int) -> int:
        """The rank that runs a stage's operations on a micro-batch."""
        replica = microbatch // self.microbatches_per_replica
        return replica * self.ranks_per_replica + self.stage_to_rank[stage]

    def label(self, op: Op) -> str:
        """The operation as the grid prints it: without its stage where every rank has just one."""
        return op.short if self.has_one_stage_a_rank else str(op)

    def __str__(self) -> str:
        """The text grid, one row a rank, one column a slot of unit time: "F0 F1 . . B1 B0"."""
        return "\n".join(" ".join(row) for row in self.cells())

    def grid(self) -> str:
        """The text grid with its columns aligned, for reading."""
        rows = self.cells()
        width = max((len(cell) for row in rows for cell in row), default=1)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)

    def cells(self) -> list[list[str]]:
        """rows[rank][slot] when every computation takes one slot: an operation's label, or "." for idle.

        The operations of a schedule that cannot run to its end are listed in program order instead.
        """
        walked = walk(self, duration=lambda op: 1.0)
        if walked.is_stuck:
            return [[self.label(op) for op in ops] for ops in self.ops]
        placed = [(rank, round(start), op) for rank, op, start, _ in walked.events if op.kind in COMPUTE]
        num_slots = 1 + max((slot for _, slot, _ in placed), default=-1)
        rows = [["."] * num_slots for _ in self.ops]
        for rank, slot, op in placed:
            rows[rank][slot] = self.label(op)
        return rows


def input_gradient(stage: int, microbatch: int, schedule: Schedule) -> Op:
    """The operation that yields the gradient of a stage's input: I where split, else the last B to run."""
    split = Op(Kind.I, stage, microbatch)
    return split if split in schedule.rank_of else Op(Kind.B, stage, microbatch)


def peer(op: Op) -> Op:
    """The other end of a transfer."""
    match op.kind:
        case Kind.SEND_F:
            return Op(Kind.RECV_F, op.stage + 1, op.microbatch)
        case Kind.RECV_F:
            return Op(Kind.SEND_F, op.stage - 1, op.microbatch)
        case Kind.SEND_B:
            return Op(Kind.RECV_B, op.stage - 1, op.microbatch)
        case Kind.RECV_B:
            return Op(Kind.SEND_B, op.stage + 1, op.microbatch)
    raise ValueError(f"{op} is not a transfer")


def send_of(op: Op, schedule: Schedule) -> Op | None:
    """The send that takes the result of `op` to another rank, or None where no other rank needs it."""
    match op.kind:
        case Kind.F if op.stage + 1 < schedule.num_stages:
            send, to = Op(Kind.SEND_F, op.stage, op.microbatch), op.stage + 1
        case Kind.B | Kind.I if op.stage > 0 and op.segment == 0:
            send, to = Op(Kind.SEND_B, op.stage, op.microbatch), op.stage - 1
        case _:
            return None
    home = schedule.stage_to_rank
    return send if home[op.stage] != home[to] else None


def dependencies(op: Op, schedule: Schedule) -> tuple[Op, ...]:
    """What must have finished before `op` can start: the one place where this rule is written.

    In a lowered schedule a computation depends on the receive that brings its input instead of the
    computation on the other rank. A receive's own dependency is its peer, which `walk` treats as a
    rendezvous.
    """
    kind, stage, microbatch, segment = op
    present = schedule.rank_of
    match kind:
        case Kind.F:
            return _input(stage, microbatch, schedule)
        case Kind.R:
            waits = schedule.recompute_waits and _is_first(op, schedule)
            gradient = _gradient(stage, microbatch, schedule) if waits else ()
            return (Op(Kind.F, stage, microbatch), *gradient)
        case Kind.B | Kind.I:
            recompute = Op(Kind.R, stage, microbatch, segment)
            if _is_first(op, schedule):
                before = _gradient(stage, microbatch, schedule)
            else:
                before = (Op(Kind.B, stage, microbatch, segment + 1),)
            recomputed = (recompute,) if recompute in present else ()
            return (Op(Kind.F, stage, microbatch), *recomputed, *before)
        case Kind.W:
            return (Op(Kind.I, stage, microbatch),)
        case Kind.SEND_F:
            return (Op(Kind.F, stage, microbatch),)
        case Kind.SEND_B:
            return (input_gradient(stage, microbatch, schedule),)
        case Kind.RECV_F | Kind.RECV_B:
            return (peer(op),)
    return ()


def _is_first(op: Op, schedule: Schedule) -> bool:
    """Whether `op` belongs to the segment whose backward runs first."""
    return op.segment == schedule.last_segment.get((op.stage, op.microbatch), 0)


def _input(stage: int, microbatch: int, schedule: Schedule) -> tuple[Op, ...]:
    """What brings the input of a stage's forward: a receive, or the forward before it."""
    if stage == 0:
        return ()
    received = Op(Kind.RECV_F, stage, microbatch)
    return (received if received in schedule.rank_of else Op(Kind.F, stage - 1, microbatch),)


def _gradient(stage: int, microbatch: int, schedule: Schedule) -> tuple[Op, ...]:
    """What brings the gradient that a stage's backward starts from: nothing does on the last stage."""
    if stage + 1 >= schedule.num_stages:
        return ()
    received = Op(Kind.RECV_B, stage, microbatch)
    if received in schedule.rank_of:
        return (received,)
    return (input_gradient(stage + 1, microbatch, schedule),)


class Placed(NamedTuple):
    """One operation laid out on a clock."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Walk:
    """The operations that could run, in an order in which they can; and where each stuck rank stands.

    blocked maps a rank to (its computation that cannot start, what that waits for); heads maps a rank
    to the first of its posted transfers that has not started; posted holds all of those.
    """

    events: tuple[Placed, ...]
    blocked: dict[int, tuple[Op, Op]]
    heads: dict[int, Op]
    posted: frozenset[Op]

    @property
    def is_stuck(self) -> bool:
        return bool(self.blocked or self.heads)


def walk(
    schedule: Schedule,
    *,
    duration: Callable[[Op], float],
    delay: Callable[[Op], float] = lambda source: 0.0,
) -> Walk:
    """Lay a schedule out on a clock: each operation starts when its rank and its inputs are free.

    `duration` gives a computation's time; `delay(op)` how long a message travels, where `op` is the
    send of a lowered schedule or else the computation whose result travels. Computations of a rank
    run one after another. Transfers of a lowered schedule are posted when their rank reaches them and
    do not hold the rank up, but each rank starts its own in order, and a transfer starts only when
    both ends have posted it (the strictest thing NCCL may do).
    """
    needs = schedule.needs
    finish: dict[Op, float] = {}
    events: list[Placed] = []
    free = [0.0] * schedule.num_ranks
    cursor = [0] * schedule.num_ranks
    posted: list[deque[tuple[Op, float]]] = [deque() for _ in schedule.ops]
    last_transfer = [0.0] * schedule.num_ranks
    waiting: dict[Op, list[int]] = defaultdict(list)
    blocked: dict[int, tuple[Op, Op]] = {}
    runnable = deque(range(schedule.num_ranks))

    def complete(rank: int, op: Op, start: float, end: float) -> None:
        finish[op] = end
        events.append(Placed(rank, op, start, end))
        runnable.extend(waiting.pop(op, ()))

    def start_transfers(rank: int) -> None:
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            if not posted[rank]:
                continue
            op, posted_at = posted[rank][0]
            other = peer(op)
            other_rank = schedule.rank_of.get(other)
            if other_rank is None or not posted[other_rank] or posted[other_rank][0][0] != other:
                continue
            _, other_posted_at = posted[other_rank][0]
            start = max(posted_at, other_posted_at, last_transfer[rank], last_transfer[other_rank])
            send = other if op.kind in RECEIVES else op
            end = start + delay(send)
            for end_rank, end_op in ((rank, op), (other_rank, other)):
                posted[end_rank].popleft()
                last_transfer[end_rank] = start
                complete(end_rank, end_op, start, end)
            ranks += (rank, other_rank)

    def arrival(dependency: Op, rank: int) -> float:
        crosses = dependency.kind in COMPUTE and schedule.rank_of[dependency] != rank
        return finish[dependency] + (delay(dependency) if crosses else 0.0)

    while runnable:
        rank = runnable.popleft()
        ops = schedule.ops[rank]
        blocked.pop(rank, None)
        while cursor[rank] < len(ops):
            op = ops[cursor[rank]]
            start = free[rank]
            for needed in () if op.kind in RECEIVES else needs[op]:
                if needed not in finish:
                    blocked[rank] = (op, needed)
                    waiting[needed].append(rank)
                    break
                start = max(start, arrival(needed, rank))
            if rank in blocked:
                break
            cursor[rank] += 1
            if op.kind in TRANSFERS:
                posted[rank].append((op, start))
                start_transfers(rank)
            else:
                free[rank] = start + (duration(op) if op.kind in COMPUTE else 0.0)
                complete(rank, op, start, free[rank])

    heads = {rank: queue[0][0] for rank, queue in enumerate(posted) if queue}
    not_started = frozenset(op for queue in posted for op, _ in queue)
    return Walk(tuple(events), blocked, heads, not_started)
