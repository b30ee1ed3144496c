"""What a schedule holds: micro-batches in flight, and bytes by category over time.

A report has one type whether its bytes were measured by the ledger of a run or computed from a trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .errors import require
from .ops import BACKWARD, COMPUTE, B, F, I, Op, R, W
from .schedule import Schedule
from .trace import Trace

if TYPE_CHECKING:
    import pandas


class Category(NamedTuple):
    """What is counted, and when it is let go: "never" by a step, with its "step", or with its "graph"."""

    meaning: str
    released: str


# A storage held in several ways counts once, in the first of these.
CATEGORIES = {
    "parameters": Category("weights", "never"),
    "gradients": Category("of weights, and their sums in the making", "never"),
    "optimizer": Category("the optimizer's state", "never"),
    "buffers": Category("of modules, as running statistics", "never"),
    "communication": Category("messages that come or go", "step"),
    "boundary": Category("stage inputs that checkpointing keeps", "step"),
    "recomputed": Category("saved for backward by a recompute", "graph"),
    "saved": Category("saved for backward by a forward", "graph"),
    "outputs": Category("results that wait for another stage on the same rank", "step"),
    "deferred": Category("what a split backward keeps for W", "step"),
}


class MemoryRow(NamedTuple):
    """Bytes of one category on one rank, from `time_ms` on. `op` is the operation that was running."""

    rank: int
    op_index: int
    time_ms: float
    category: str
    bytes: int
    op: Op | None = None


class Moment(NamedTuple):
    """All categories of one rank at one time."""

    op_index: int
    time_ms: float
    op: Op | None
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by every rank over one step. `source` is "estimated", "simulated" or "measured"."""

    rows: tuple[MemoryRow, ...]
    source: str
    limit_bytes: int | None = None
    schedule: Schedule | None = field(default=None, repr=False)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({row.rank for row in self.rows}))

    @cached_property
    def _moments(self) -> dict[int, tuple[Moment, ...]]:
        moments: dict[int, list[Moment]] = defaultdict(list)
        held: dict[int, dict[str, int]] = defaultdict(dict)
        for row in self.rows:
            held[row.rank][row.category] = row.bytes
            seen = moments[row.rank]
            if seen and (seen[-1].op_index, seen[-1].time_ms) == (row.op_index, row.time_ms):
                seen.pop()
            seen.append(Moment(row.op_index, row.time_ms, row.op, dict(held[row.rank])))
        return {rank: tuple(seen) for rank, seen in moments.items()}

    def moments(self, rank: int) -> tuple[Moment, ...]:
        """What `rank` held, in order of time: the curve beneath a Gantt chart."""
        return self._moments.get(rank, ())

    def peak(self, rank: int, category: str | Sequence[str] | None = None) -> Moment:
        """The first moment at which `rank` held most: of one category, of several together, or of all."""
        return max(
            self.moments(rank), key=lambda moment: _held(moment, category), default=Moment(0, 0.0, None, {})
        )

    def peak_bytes(self, rank: int, category: str | Sequence[str] | None = None) -> int:
        """The most that `rank` held at any one time, in bytes: of one category, of several, or of all."""
        return _held(self.peak(rank, category), category)

    def frame(self) -> pandas.DataFrame:
        """One row a change: rank, op_index, time_ms, category, bytes, op."""
        import pandas

        rows = [row._asdict() | {"op": "" if row.op is None else str(row.op)} for row in self.rows]
        return pandas.DataFrame(rows, columns=list(MemoryRow._fields))


def _held(moment: Moment, category: str | Sequence[str] | None) -> int:
    if category is None:
        return moment.total
    names = (category,) if isinstance(category, str) else category
    return sum(moment.bytes.get(name, 0) for name in names)


def in_flight(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Micro-batches that `rank` holds after each of its operations, over all its stages.

    A micro-batch is held from its F until its B is done, or its W where the backward is split.
    """
    counts, held = [], 0
    for kind, _, _, segment in schedule.ops[rank]:
        if kind is F and schedule.trains:
            held += 1
        elif kind is W or (kind is B and segment == 0):
            held -= 1
        counts.append(held)
    return tuple(counts)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches each rank holds at once, from F until B (or W where split)."""
    return tuple(max(in_flight(schedule, rank), default=0) for rank in range(schedule.num_ranks))


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes of one stage: its weights, what one micro-batch saves for backward, and its input.

    `weights` maps categories that stay for the whole step (parameters, gradients, optimizer) to bytes.
    `saved` counts everything one micro-batch keeps for its backward, the stage's input included;
    `boundary` is that input, all that checkpointing keeps. Stage 0's input is token ids or samples.
    `deferred` is what a split backward keeps besides from I to W: the gradients that W multiplies by.
    `segments`: (input, saved) of each part of a stage that is recomputed part by part; equal parts unless
    given.
    """

    saved: int
    boundary: int
    weights: dict[str, int] = field(default_factory=dict)
    deferred: int = 0
    segments: tuple[tuple[int, int], ...] = ()

    def parts(self, num_segments: int) -> tuple[tuple[int, int], ...]:
        """(input, saved) of each of so many segments."""
        if len(self.segments) == num_segments:
            return self.segments
        return ((self.boundary, self.saved // num_segments),) * num_segments


def simulate_memory(
    trace: Trace, sizes: Sequence[StageBytes], *, limit_bytes: int | None = None
) -> MemoryReport:
    """The bytes each rank would hold along a simulated trace: one `StageBytes` per stage.

    F keeps what the backward needs, or the boundary where the schedule recomputes; R restores the rest;
    the backward (W where split) frees it. With segments, F keeps an input for each and R restores one
    segment's share at a time.
    """
    schedule = trace.schedule
    assert schedule is not None, "a trace carries its schedule"
    require(
        len(sizes) == schedule.num_stages,
        "sizes has one StageBytes per stage",
        got=f"{len(sizes)} for {schedule.num_stages} stages",
        where="simulate_memory",
        remedy=f"[StageBytes(saved=..., boundary=...)] * {schedule.num_stages}",
    )
    recomputed, split = ({op[1:3] for op in schedule.rank_of if op.kind is kind} for kind in (R, W))
    known: dict[tuple[object, ...], list[tuple[str, int]]] = {}  # by what the changes depend on
    rows = []
    for rank, timed in enumerate(trace.rows):
        held: dict[str, int] = defaultdict(int)
        for stage in schedule.stages_of(rank):
            for category, size in sizes[stage].weights.items():
                held[category] += size
        start = trace.start_ms
        rows += [MemoryRow(rank, 0, start, category, size) for category, size in held.items()]
        computed = (op for op in schedule.ops[rank] if op.kind in COMPUTE)
        for index, (op, end) in enumerate(zip(computed, timed.ends, strict=True)):
            of = op[1:3]
            num_segments = 1 + schedule.last_segment.get(of, 0)
            key = op.kind, op.stage, op.segment, num_segments, of in recomputed, of in split
            if key not in known:
                known[key] = _changes(op, sizes[op.stage], *key[3:]) if schedule.trains else []
            for category, change in known[key]:
                held[category] += change
                rows.append(MemoryRow(rank, index, end, category, held[category], op))
    return MemoryReport(tuple(rows), trace.source, limit_bytes, schedule)


def _changes(
    op: Op, size: StageBytes, num_segments: int, recomputes: bool, split: bool
) -> list[tuple[str, int]]:
    """(category, bytes more or fewer) when `op` is done."""
    parts = size.parts(num_segments)
    given, saved = parts[op.segment]
    restored = saved - given
    if op.kind is F:
        kept = sum(given for given, _ in parts)
        return [("boundary", kept)] if recomputes else [("saved", size.saved)]
    if op.kind is R:
        return [("recomputed", restored)]
    if split and op.kind is I:
        return [("deferred", size.deferred)] if size.deferred else []
    if op.kind not in BACKWARD or (split and op.kind is not W):
        return []
    waited = [("deferred", -size.deferred)] if split and size.deferred else []
    if recomputes:
        return [*waited, ("recomputed", -restored), ("boundary", -given)]
    return [*waited, ("saved", -size.saved)]
