"""A schedule as a graph of numbered operations, one walk through it, and its times on a clock.

Operations are numbered rank by rank in program order. Each comes after the one before it on its rank and,
beside that, waits for at most one result that its rank has not computed itself. So one number an operation
says what holds it up: enough to find an order in which all can run, or the circle in which they wait, and
then, for any costs, their times in one pass.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .ops import (
    COMPUTE,
    ONCE_A_STEP,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    SENDS,
    STEP,
    TRANSFERS,
    B,
    F,
    I,
    Kind,
    Op,
    R,
    W,
)

if TYPE_CHECKING:
    from .schedule import Schedule

NONE = -1  # the number of no operation

Row = dict[int, int]  # micro-batch -> number, of the operations of one kind, stage and segment


class Graph:
    """The operations of a schedule by number, and what each of them waits for.

    ops, ranks, peers and awaits are columns by number; rows[rank] are the numbers of a rank in program
    order, at[kind, stage, segment] those of a kind by micro-batch. The schedule may be any, also one that
    cannot run.

    peers: the other end of a transfer, or itself where that is missing; NONE for a computation. awaits: what
    holds an operation up beside the one before it, a result of another rank or a receive; NONE where nothing
    does. misplaced: (operation, what it needs) where the second comes later on the same rank; the first then
    awaits itself, so that it never starts.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.ops = [op for row in schedule.ops for op in row]
        self.ranks = [rank for rank, row in enumerate(schedule.ops) for _ in row]
        self.rows: list[range] = []
        for ops in schedule.ops:
            first = self.rows[-1].stop if self.rows else 0
            self.rows.append(range(first, first + len(ops)))
        at: defaultdict[tuple[Kind, int, int], Row] = defaultdict(dict)
        for number, (kind, stage, microbatch, segment) in enumerate(self.ops):
            at[kind, stage, segment][microbatch] = number
        self.at = dict(at)
        self.kinds = frozenset(kind for kind, _, _ in at)
        self.recompute_waits = schedule.recompute_waits
        self.per_replica = max(1, schedule.microbatches_per_replica)
        self._needs: dict[tuple[Kind, int, int], list[Row]] = {}
        self.peers = self._peers()
        self.awaits, self.misplaced = self._holds()

    def row(self, kind: Kind, stage: int, segment: int = 0) -> Row:
        return self.at.get((kind, stage, segment), {})

    def needs(self, kind: Kind, stage: int, segment: int) -> list[Row]:
        """What an operation needs of its micro-batch, a row each: the one place where this rule is written.

        Where rows are joined, the later one counts. In a lowered schedule a computation needs the receive
        that brings its input instead of the computation on the other rank.
        """
        key = kind, stage, segment
        if key not in self._needs:
            self._needs[key] = self._rule(*key)
        return self._needs[key]

    def _rule(self, kind: Kind, stage: int, segment: int) -> list[Row]:
        row = self.row
        if kind is F:
            return [row(F, stage - 1) | row(RECV_F, stage)]
        if kind is B or kind is I:
            gradient = self.input_gradient(stage + 1) | row(RECV_B, stage) | row(B, stage, segment + 1)
            return [row(F, stage), row(R, stage, segment), gradient]
        if kind is W:
            return [row(I, stage)]
        if kind is R:
            later = row(B, stage, segment + 1)  # the first segment alone waits for the stage's gradient
            gradient = self.input_gradient(stage + 1) | row(RECV_B, stage) if self.recompute_waits else {}
            return [row(F, stage), {m: number for m, number in gradient.items() if m not in later}]
        if kind is SEND_F:
            return [row(F, stage)]
        if kind is SEND_B:
            return [self.input_gradient(stage)]
        return [row(SEND_F, stage - 1) if kind is RECV_F else row(SEND_B, stage + 1)]

    def input_gradient(self, stage: int) -> Row:
        """What yields the gradient of a stage's input: I where split, else the last B to run."""
        return self.row(B, stage) | self.row(I, stage)

    def needed(self, op: Op) -> list[int]:
        """The numbers of what must have finished before `op` can start, as far as it is there.

        A stage's REDUCE and STEP need the last part of the backward of every micro-batch of their replica.
        """
        kind, stage, microbatch, segment = op
        if kind not in ONCE_A_STEP:
            return [row[microbatch] for row in self.needs(kind, stage, segment) if microbatch in row]
        finished = self.row(B, stage) | self.row(W, stage)
        first = microbatch - microbatch % self.per_replica
        found = [finished[m] for m in range(first, first + self.per_replica) if m in finished]
        summed = self.row(REDUCE, stage) if kind is STEP else {}
        return found + [summed[m] for m in (microbatch,) if m in summed]

    def _peers(self) -> list[int]:
        peers = [NONE] * len(self.ops)
        transfers = [(key, row) for key, row in self.at.items() if key[0] in TRANSFERS]
        for _, row in transfers:
            for number in row.values():
                peers[number] = number
        for key, row in transfers:
            for sends in self.needs(*key) if key[0] in RECEIVES else ():
                for microbatch in row.keys() & sends.keys():
                    receive, send = row[microbatch], sends[microbatch]
                    peers[receive], peers[send] = send, receive
        return peers

    def _holds(self) -> tuple[list[int], list[tuple[int, int]]]:
        ranks, peers = self.ranks, self.peers
        awaits = [NONE] * len(self.ops)
        misplaced: list[tuple[int, int]] = []
        for (kind, stage, segment), row in self.at.items():
            if kind in ONCE_A_STEP:
                for number in row.values():
                    misplaced += [(number, need) for need in self.needed(self.ops[number]) if need > number]
            elif kind not in RECEIVES:  # a receive and its send start together
                for needed in filter(None, self.needs(kind, stage, segment)):
                    for microbatch, number in row.items():
                        need = needed.get(microbatch, NONE)
                        if need == NONE:
                            continue
                        if ranks[need] != ranks[number] or (peers[need] != NONE and need < number):
                            awaits[number] = need
                        elif need > number:
                            misplaced.append((number, need))
        for number, _ in misplaced:
            awaits[number] = number
        return awaits, misplaced

    @cached_property
    def takers(self) -> dict[int, int]:
        """The results that leave their rank, each with the first operation that awaits it there."""
        held_up = [(needed, number) for number, needed in enumerate(self.awaits) if needed != NONE]
        return dict(reversed(held_up))

    @cached_property
    def computed(self) -> list[tuple[list[Kind], list[int]]]:
        """The computations of every rank: their kinds and their numbers."""
        numbers = [[number for number in row if self.ops[number].kind in COMPUTE] for row in self.rows]
        return [([self.ops[number].kind for number in row], row) for row in numbers]

    @cached_property
    def posted_after(self) -> list[int]:
        """For every transfer the last computation before it on its rank, NONE where there is none."""
        after = [NONE] * len(self.ops)
        for row in self.rows:
            last = NONE
            for number in row:
                if self.peers[number] == NONE:
                    last = number
                else:
                    after[number] = last
        return after


@dataclass(frozen=True, eq=False)
class Walk:
    """The operations that could run, by number in an order in which they can; and where stuck ranks stand.

    standing maps a rank to its operation that cannot start, heads a rank to the first of its posted
    transfers that has not started; posted holds all of those.
    """

    graph: Graph
    order: list[int]
    standing: dict[int, int]
    heads: dict[int, int]
    posted: frozenset[int]

    @property
    def is_stuck(self) -> bool:
        return bool(self.standing or self.heads)

    @property
    def ops(self) -> list[Op]:
        return [self.graph.ops[number] for number in self.order]

    @cached_property
    def circle(self) -> list[Op]:
        """The operations that wait for each other, each for the next and the last for the first; or none."""
        path: list[int] = []
        number = next(iter([*self.standing.values(), *self.heads.values()]), NONE)
        while number != NONE and number not in path:
            path.append(number)
            number = self._held_up_by(number)
        circle = path[path.index(number) :] if path else []
        return [self.graph.ops[number] for number in circle]

    def _held_up_by(self, number: int) -> int:
        """What an operation waits for: where the rank stands that is to bring it."""
        graph = self.graph
        rank = graph.ranks[number]
        if self.heads.get(rank) == number:  # a transfer whose other end is not there, or not first
            other = graph.peers[number]
            return (self.heads if other in self.posted else self.standing)[graph.ranks[other]]
        needed = graph.awaits[number]
        return self.heads[rank] if graph.peers[needed] != NONE else self.standing[graph.ranks[needed]]

    def times(self, work_ms: Sequence[float], travel_ms: Sequence[float]) -> tuple[list[float], list[float]]:
        """(starts, ends) of all operations in ms, by number, given what each takes.

        work_ms is the time of a computation or, for a send, of its message; travel_ms how long a result
        that no send takes travels to the rank that waits for it. A computation starts when the one before
        it on its rank and what it awaits are there; a transfer when both its ends are posted, and those
        before it at both ends have started.
        """
        graph = self.graph
        ranks, awaits, peers = graph.ranks, graph.awaits, graph.peers
        starts = [0.0] * len(graph.ops)
        ends = [0.0] * (len(graph.ops) + 1)  # the last, which is also number NONE, is where time starts
        free = [0.0] * len(graph.rows)
        last_transfer = [0.0] * len(graph.rows)
        for number in self.order:
            rank = ranks[number]
            other = peers[number]
            if other == NONE:
                start = free[rank]
                needed = awaits[number]
                if needed != NONE:
                    arrival = ends[needed] + travel_ms[needed]
                    if arrival > start:
                        start = arrival
                starts[number] = start
                ends[number] = free[rank] = start + work_ms[number]
            elif graph.ops[number].kind in SENDS:  # which takes its receive along
                both = (number, other)
                start = max(last_transfer[rank], last_transfer[ranks[other]])
                start = max(start, *(ends[graph.posted_after[end]] for end in both))
                for end in both:
                    starts[end] = last_transfer[ranks[end]] = start
                    ends[end] = start + work_ms[number]
        return starts, ends


def walk(graph: Graph, rows: Sequence[Sequence[int]] | None = None) -> Walk:
    """Run every rank's operations as soon as what they await has run: `rows[rank]`, by number.

    The rows are the graph's own unless other orders of the same operations are given. Computations of a
    rank run one after another. Transfers of a lowered schedule are posted when their rank reaches them and
    do not hold the rank up, but each rank starts its own in order, and a transfer starts only when both
    ends have posted it (the strictest thing NCCL may do).
    """
    rows = graph.rows if rows is None else rows
    ranks, awaits, peers = graph.ranks, graph.awaits, graph.peers
    done = [False] * len(graph.ops)
    order: list[int] = []
    cursor = [0] * len(rows)
    posted: list[deque[int]] = [deque() for _ in rows]
    waiting: dict[int, int] = {}  # the rank that waits for a number: there is but one
    runnable = deque(range(len(rows)))

    def complete(number: int) -> None:
        done[number] = True
        order.append(number)
        if number in waiting:
            runnable.append(waiting.pop(number))

    def start_transfers(rank: int) -> None:
        pending = [rank]
        while pending:
            rank = pending.pop()
            if not posted[rank]:
                continue
            number = posted[rank][0]
            other = peers[number]
            other_rank = ranks[other]
            if other == number or not posted[other_rank] or posted[other_rank][0] != other:
                continue
            for end in (number, other):
                posted[ranks[end]].popleft()
                complete(end)
            pending += (rank, other_rank)

    while runnable:
        rank = runnable.popleft()
        row = rows[rank]
        at = cursor[rank]
        while at < len(row):
            number = row[at]
            needed = awaits[number]
            if needed != NONE and not done[needed]:
                waiting[needed] = rank
                break
            at += 1
            if peers[number] == NONE:
                done[number] = True
                order.append(number)
                if number in waiting:
                    runnable.append(waiting.pop(number))
            else:
                posted[rank].append(number)
                start_transfers(rank)
        cursor[rank] = at

    standing = {rank: row[cursor[rank]] for rank, row in enumerate(rows) if cursor[rank] < len(row)}
    heads = {rank: queue[0] for rank, queue in enumerate(posted) if queue}
    return Walk(graph, order, standing, heads, frozenset(number for queue in posted for number in queue))
