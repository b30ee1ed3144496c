"""A schedule is data: for every rank, which operations run in which order.

Everything else (validator, simulator, executor, memory estimate, plots) consumes this one value. Idle
time is not stored in it; idle time is what is left over when the operations are laid out on a clock,
which is what `walk` does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from .ops import BACKWARD, COMPUTE, Kind, Op, peer
from .walk import Walk, walk

# Python 3.11 finds a name of a module sooner than one of an enum, and these are asked for every operation.
F, B, I, W, R, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE, STEP = Kind  # noqa: E741


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
    def kinds(self) -> frozenset[Kind]:
        """The kinds of operation there are: what is not among them need not be looked for."""
        return frozenset({op.kind for op in self.rank_of})

    @cached_property
    def needs(self) -> dict[Op, tuple[Op, ...]]:
        """The `dependencies` of every operation, worked out once."""
        return {op: dependencies(op, self) for op in self.rank_of}

    @cached_property
    def walked(self) -> Walk:
        """The order in which the operations can run, worked out once."""
        return walk(self)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages that the results of an authored schedule are sent in, in the order of its walk."""
        found = []
        for op, step in zip(self.walked.ops, self.walked.step_of, strict=True):
            send = send_of(op, self)
            if send is not None:
                receive = peer(send)
                sender, receiver = (self.home(end.stage, end.microbatch) for end in (send, receive))
                found.append(Message(op, step, send, receive, sender, receiver))
        return tuple(found)

    @cached_property
    def last_segment(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) -> the highest segment its backward has, the one that runs first, unless 0."""
        highest: dict[tuple[int, int], int] = {}
        for kind, stage, microbatch, segment in self.rank_of:
            if segment and kind is B:
                highest[stage, microbatch] = max(segment, highest.get((stage, microbatch), 0))
        return highest

    @cached_property
    def trains(self) -> bool:
        """Whether there is any backward: a schedule without one is inference."""
        return not self.kinds.isdisjoint(BACKWARD)

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
        walked = self.walked
        if walked.is_stuck:
            return [[self.label(op) for op in ops] for ops in self.ops]
        one_slot = [float(work is not None and work.kind in COMPUTE) for work in walked.steps.works]
        starts, ends = walked.steps.times(walked.steps.zeros, one_slot)
        rows = [["."] * round(max(ends)) for _ in self.ops]
        for rank, op, step in zip(walked.ranks, walked.ops, walked.step_of, strict=True):
            if op.kind in COMPUTE:
                rows[rank][round(starts[step])] = self.label(op)
        return rows


class Message(NamedTuple):
    """The result of `op`, which is step number `step` of the walk, on its way from rank to rank."""

    op: Op
    step: int
    send: Op
    receive: Op
    sender: int
    receiver: int


def input_gradient(stage: int, microbatch: int, schedule: Schedule) -> Op:
    """The operation that yields the gradient of a stage's input: I where split, else the last B to run."""
    if I in schedule.kinds:
        split = Op(I, stage, microbatch)
        if split in schedule.rank_of:
            return split
    return Op(B, stage, microbatch)


def send_of(op: Op, schedule: Schedule) -> Op | None:
    """The send that takes the result of `op` to another rank, or None where no other rank needs it."""
    kind, stage, microbatch, segment = op
    if kind is F and stage + 1 < schedule.num_stages:
        send, to = Op(SEND_F, stage, microbatch), stage + 1
    elif (kind is B or kind is I) and stage > 0 and segment == 0:
        send, to = Op(SEND_B, stage, microbatch), stage - 1
    else:
        return None
    home = schedule.stage_to_rank
    return send if home[stage] != home[to] else None


def dependencies(op: Op, schedule: Schedule) -> tuple[Op, ...]:
    """What must have finished before `op` can start: the one place where this rule is written.

    In a lowered schedule a computation depends on the receive that brings its input instead of the
    computation on the other rank. A receive's own dependency is its peer, which `walk` treats as a
    rendezvous.
    """
    kind, stage, microbatch, segment = op
    if kind is F:
        return _input(stage, microbatch, schedule)
    if kind is B or kind is I:
        if _is_first(stage, microbatch, segment, schedule):
            before = _gradient(stage, microbatch, schedule)
        else:
            before = (Op(B, stage, microbatch, segment + 1),)
        recompute = Op(R, stage, microbatch, segment) if R in schedule.kinds else None
        if recompute in schedule.rank_of:
            before = (recompute, *before)
        return (Op(F, stage, microbatch), *before)
    if kind is W:
        return (Op(I, stage, microbatch),)
    if kind is R:
        waits = schedule.recompute_waits and _is_first(stage, microbatch, segment, schedule)
        gradient = _gradient(stage, microbatch, schedule) if waits else ()
        return (Op(F, stage, microbatch), *gradient)
    if kind is SEND_F:
        return (Op(F, stage, microbatch),)
    if kind is SEND_B:
        return (input_gradient(stage, microbatch, schedule),)
    if kind is RECV_F or kind is RECV_B:
        return (peer(op),)
    if kind is STEP:
        summed = Op(REDUCE, stage, microbatch)
        return (*_finished(op, schedule), *((summed,) if summed in schedule.rank_of else ()))
    return _finished(op, schedule)  # REDUCE


def _finished(op: Op, schedule: Schedule) -> tuple[Op, ...]:
    """What completes the gradients of a stage in a replica: the last part of each micro-batch's backward."""
    first, count = first_of_replica(op.microbatch, schedule), schedule.microbatches_per_replica
    weights = [Op(W, op.stage, m) for m in range(first, first + count)]
    return tuple(w if w in schedule.rank_of else w._replace(kind=B) for w in weights)


def first_of_replica(microbatch: int, schedule: Schedule) -> int:
    """The first micro-batch of a replica: what stands for all of them, as a step does, carries its number."""
    return microbatch - microbatch % schedule.microbatches_per_replica


def _is_first(stage: int, microbatch: int, segment: int, schedule: Schedule) -> bool:
    """Whether this is the segment whose backward runs first."""
    return segment == (schedule.last_segment.get((stage, microbatch), 0) if schedule.last_segment else 0)


def _input(stage: int, microbatch: int, schedule: Schedule) -> tuple[Op, ...]:
    """What brings the input of a stage's forward: a receive, or the forward before it."""
    if stage == 0:
        return ()
    if RECV_F in schedule.kinds:
        received = Op(RECV_F, stage, microbatch)
        if received in schedule.rank_of:
            return (received,)
    return (Op(F, stage - 1, microbatch),)


def _gradient(stage: int, microbatch: int, schedule: Schedule) -> tuple[Op, ...]:
    """What brings the gradient that a stage's backward starts from: nothing does on the last stage."""
    if stage + 1 >= schedule.num_stages:
        return ()
    if RECV_B in schedule.kinds:
        received = Op(RECV_B, stage, microbatch)
        if received in schedule.rank_of:
            return (received,)
    return (input_gradient(stage + 1, microbatch, schedule),)
