"""The bubble taken apart: how much of the ranks' idle time each cause is to blame for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import require
from .ops import COMPUTE, Kind, Op
from .simulate import OpTimes, simulate
from .trace import Trace

if TYPE_CHECKING:
    import pandas

PARTS = {
    "fill": "before a rank's first operation",
    "middle": "between a rank's first and last operation, though all else is ideal",
    "drain": "after a rank's last operation",
    "imbalance": "gone if every operation of a kind took equally long",
    "communication": "gone if messages took no time (measured: with what launching costs)",
    "recompute": "gone if nothing were recomputed; the recomputing itself is busy time",
}

NOISE = 1e-9  # of all time: sums of the same times in other orders differ by less


@dataclass(frozen=True)
class Bubble:
    """Idle time summed over ranks, in ms, and its parts, which add up to it. See `take_apart`."""

    parts_ms: dict[str, float]
    busy_ms: float
    makespan_ms: float
    num_ranks: int
    longest_span_ms: float  # of a rank, from its first operation's start to its last one's end
    source: str

    @property
    def idle_ms(self) -> float:
        return self.makespan_ms * self.num_ranks - self.busy_ms

    @property
    def share(self) -> float:
        """Idle over total time, `Trace.bubble_fraction`: (P-1)/(M+P-1) for GPipe (§2.3)."""
        total = self.makespan_ms * self.num_ranks
        return self.idle_ms / total if total else 0.0

    @property
    def overhead(self) -> float:
        """Idle over busy time, Megatron-LM's "bubble" (§2.2): (P-1)/M for GPipe."""
        return self.idle_ms / self.busy_ms if self.busy_ms else 0.0

    @property
    def within(self) -> float:
        """1 − busy/(longest span × ranks): the share of Zero Bubble (§5), blind to who starts later."""
        total = self.longest_span_ms * self.num_ranks
        return 1 - self.busy_ms / total if total else 0.0

    def __str__(self) -> str:
        total = self.makespan_ms * self.num_ranks
        parts = ", ".join(
            f"{name} {100 * ms / total:.1f} %" for name, ms in self.parts_ms.items() if total and ms > 0
        )
        return (
            f"bubble, {self.source}: {100 * self.share:.1f} % of all time"
            + (f" = {parts}" if parts else "")
            + f"; {100 * self.overhead:.1f} % over the ideal time"
        )

    def frame(self) -> pandas.DataFrame:
        """One row a part and their total: ms of all ranks, % of all time, % of busy time, what it means."""
        import pandas

        values = {**self.parts_ms, "total": self.idle_ms}
        total, busy = self.makespan_ms * self.num_ranks or 1.0, self.busy_ms or 1.0
        return pandas.DataFrame(
            {
                "ms": [round(ms, 2) for ms in values.values()],
                "% of all time": [round(100 * ms / total, 2) for ms in values.values()],
                "% of busy time": [round(100 * ms / busy, 2) for ms in values.values()],
                "what it is": [PARTS.get(name, "the bubble") for name in values],
            },
            index=list(values),
        )


def take_apart(trace: Trace) -> Bubble:
    """Idle time of all ranks (P × makespan − busy time) by cause, for a simulated or a measured trace.

    The trace's own operations are laid out again, each rank's in its order, with one cause after another
    taken away. The idle time that goes with a cause is its part:

    1. communication: every message arrives at once. In a measured trace launching goes too.
    2. imbalance: every operation takes the mean time of its kind, over stages and micro-batches.
    3. recompute: every recompute takes no time.

    What is left is the shape of the schedule: fill is before a rank's first operation, drain after its
    last, middle in between. No part is negative: a cause whose removal would leave more idle time (equal
    stages can suit an order that was made for unequal ones worse) counts as 0 and stays. Equal stages,
    free messages and no recompute therefore leave fill, middle and drain only.
    Raises `InputError` for a trace without its schedule.
    """
    require(
        trace.schedule is not None,
        "a bubble is taken apart by laying out a trace's schedule again",
        got="a trace without one",
        where="take_apart",
        remedy="Trace(events, source, schedule)",
    )
    assert trace.schedule is not None
    rows = tuple(tuple(op for op in row if op.kind in COMPUTE) for row in trace.schedule.ops)
    schedule = replace(trace.schedule, ops=rows)
    own = {e.op: e.duration_ms for e in trace.computations}
    parts = dict.fromkeys(PARTS, 0.0)
    total = trace.makespan_ms * trace.num_ranks
    left, times = trace, own
    for cause, change in (("communication", dict), ("imbalance", _evened), ("recompute", _spared)):
        changed = change(times)
        without = simulate(schedule, OpTimes(changed))
        gain = _idle(left) - _idle(without)
        if gain > NOISE * total:
            parts[cause], left, times = gain, without, changed
    parts |= _shape(left)
    spans = _spans(trace).values()
    return Bubble(
        parts,
        busy_ms=sum(own.values()),
        makespan_ms=trace.makespan_ms,
        num_ranks=trace.num_ranks,
        longest_span_ms=max((end - start for start, end in spans), default=0.0),
        source=trace.source,
    )


def _evened(times: dict[Op, float]) -> dict[Op, float]:
    """Every operation as long as the mean of its kind; the segments of one stage's operation share it."""
    whole: dict[tuple[Kind, int, int], float] = defaultdict(float)
    segments: dict[tuple[Kind, int, int], int] = defaultdict(int)
    for op, time in times.items():
        whole[op[:3]] += time
        segments[op[:3]] += 1
    sums: dict[Kind, list[float]] = defaultdict(list)
    for (kind, *_), time in whole.items():
        sums[kind].append(time)
    return {op: sum(sums[op.kind]) / len(sums[op.kind]) / segments[op[:3]] for op in times}


def _spared(times: dict[Op, float]) -> dict[Op, float]:
    return {op: 0.0 if op.kind is Kind.R else time for op, time in times.items()}


def _idle(trace: Trace) -> float:
    return trace.makespan_ms * trace.num_ranks - sum(e.duration_ms for e in trace.computations)


def _spans(trace: Trace) -> dict[int, tuple[float, float]]:
    """Each rank's first start and last end; a rank without work has no span."""
    spans: dict[int, tuple[float, float]] = {}
    for e in trace.computations:
        start, end = spans.get(e.rank, (e.start_ms, e.end_ms))
        spans[e.rank] = min(start, e.start_ms), max(end, e.end_ms)
    return spans


def _shape(trace: Trace) -> dict[str, float]:
    """Idle time before, within and after the ranks' own work. A rank without work only drains."""
    start, end = trace.start_ms, trace.start_ms + trace.makespan_ms
    spans = _spans(trace)
    busy: dict[int, float] = defaultdict(float)
    for e in trace.computations:
        busy[e.rank] += e.duration_ms
    spans = {rank: spans.get(rank, (start, start)) for rank in range(trace.num_ranks)}
    return {
        "fill": sum(first - start for first, _ in spans.values()),
        "middle": sum(max(0.0, last - first - busy[rank]) for rank, (first, last) in spans.items()),
        "drain": sum(end - last for _, last in spans.values()),
    }
