"""A schedule is data: for every rank, which operations run in which order.

Everything else (validator, simulator, executor, memory estimate, plots) consumes this one value. Idle
time is not stored in it; idle time is what is left over when the operations are laid out on a clock,
which is what `walk` does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise

from .ops import BACKWARD, COMPUTE, B, F, I, Kind, Op, sent
from .walk import Graph, Walk, walk


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
    def graph(self) -> Graph:
        """The operations by number, and what each of them waits for."""
        return Graph(self)

    @cached_property
    def walked(self) -> Walk:
        """The order in which the operations can run, worked out once."""
        return walk(self.graph)

    @cached_property
    def rank_of(self) -> dict[Op, int]:
        """The rank that runs each operation."""
        return dict(zip(self.graph.ops, self.graph.ranks, strict=True))

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of operation there are: what is not among them need not be looked for."""
        return self.graph.kinds

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks that hold neighbouring stages, in order, the lower rank of each first."""
        home = self.stage_to_rank
        pairs = {(min(pair), max(pair)) for pair in pairwise(home) if pair[0] != pair[1]}
        starts = range(0, self.num_ranks, self.ranks_per_replica)
        return tuple(sorted((start + low, start + high) for start in starts for low, high in pairs))

    @cached_property
    def last_segment(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) -> the highest segment its backward has, the one that runs first, unless 0."""
        graph = self.graph
        found = sorted((segment, stage) for kind, stage, segment in graph.at if kind is B and segment)
        return {(stage, m): segment for segment, stage in found for m in graph.row(B, stage, segment)}

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
        if self.walked.is_stuck:
            return [[self.label(op) for op in ops] for ops in self.ops]
        graph = self.graph
        one_slot = [float(op.kind in COMPUTE) for op in graph.ops]
        starts, ends = self.walked.times(one_slot, [0.0] * len(one_slot))
        rows = [["."] * round(max(ends)) for _ in self.ops]
        for rank, op, start in zip(graph.ranks, graph.ops, starts, strict=True):
            if op.kind in COMPUTE:
                rows[rank][round(start)] = self.label(op)
        return rows


def dependencies(op: Op, schedule: Schedule) -> tuple[Op, ...]:
    """What must have finished before `op` can start, as far as the schedule has it: see `Graph.needs`.

    In a lowered schedule a computation depends on the receive that brings its input instead of the
    computation on the other rank. A receive's own dependency is its peer, with which it starts.
    """
    return tuple(schedule.graph.ops[number] for number in schedule.graph.needed(op))


def send_of(op: Op, schedule: Schedule) -> Op | None:
    """The send that takes the result of `op` to another rank, or None where no other rank needs it."""
    kind, stage, _, segment = op
    if kind is F:
        to = stage + 1
    elif kind in (B, I) and segment == 0:
        to = stage - 1
    else:
        return None
    home = schedule.stage_to_rank
    return sent(op) if 0 <= to < len(home) and home[stage] != home[to] else None


def first_of_replica(microbatch: int, schedule: Schedule) -> int:
    """The first micro-batch of a replica: what stands for all of them, as a step does, carries its number."""
    return microbatch - microbatch % schedule.microbatches_per_replica
