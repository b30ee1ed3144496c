"""What happened when: the same type whether it was simulated or measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .ops import COMPUTE, RECEIVES, SENDS, Kind, Op, peer
from .schedule import Schedule, dependencies

if TYPE_CHECKING:
    import pandas


SIMULATED = "simulated"
MEASURED = "measured"
PACED = "measured, paced"

COMPUTE_LANE = "compute"
WAIT_LANE = "wait"
COMM_LANE = "comm"

USEFUL = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})


class Event(NamedTuple):
    """One operation on one rank. `lane` is "compute", "wait" (held up for a message) or "comm"."""

    rank: int
    lane: str
    op: Op
    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


class Row(NamedTuple):
    """The computations of one rank in columns: their kinds, when they start and when they end."""

    kinds: list[Kind]
    starts: list[float]
    ends: list[float]


class Layout(Protocol):
    """A schedule's operations on a clock, from which a trace can be read."""

    @property
    def events(self) -> tuple[Event, ...]: ...

    @property
    def rows(self) -> tuple[Row, ...]: ...


@dataclass(frozen=True)
class Trace:
    """Events of one step on one clock, in ms from the first computation's start.

    `source` says where they come from: "simulated", "measured" or "measured, paced". Every metric is
    computed from the events, never from a formula.
    """

    events: tuple[Event, ...]
    source: str
    schedule: Schedule | None = None
    device: str = ""
    overran: int = 0  # operations of a paced run that took longer than their pace
    unsplit: tuple[tuple[int, str], ...] = ()  # (stage, weight) whose gradient I computed, not W

    @property
    def notes(self) -> tuple[str, ...]:
        """What the events alone do not say, in words: at which stages, and why, a backward was not split."""
        names = {stage: ", ".join(n for s, n in self.unsplit if s == stage) for stage, _ in self.unsplit}
        return tuple(
            f"Stage {stage}: I did the full backward of {weights}, and W added nothing to it. No linear "
            "layer or convolution of torch's takes that weight as it is: it goes through a function of its "
            "own, a compiled layer, or a computation."
            for stage, weights in sorted(names.items())
        )

    @classmethod
    def laid_out(cls, layout: Layout, source: str, schedule: Schedule) -> Trace:
        """A trace that reads its events from `layout` when they are first asked for."""
        trace = cls((), source, schedule)
        del trace.__dict__["events"]
        trace.__dict__["_layout"] = layout
        return trace

    def __getattr__(self, name: str) -> Any:
        """The events that have not been asked for yet; no other name is found here."""
        if name != "events" or "_layout" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__["events"] = self.__dict__["_layout"].events
        return self.__dict__["events"]

    def __getstate__(self) -> dict[str, object]:
        """What pickle sends: the fields, not what has been worked out from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def computations(self) -> tuple[Event, ...]:
        """The forwards, backwards and recomputes: what a rank is busy with."""
        return tuple(e for e in self.events if e.lane == COMPUTE_LANE and e.op.kind in COMPUTE)

    @property
    def num_ranks(self) -> int:
        if self.schedule is not None:
            return self.schedule.num_ranks
        return 1 + max((e.rank for e in self.events), default=-1)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The computations of every rank, in the order of the events."""
        layout = self.__dict__.get("_layout")
        if layout is not None:
            return layout.rows
        rows = tuple(Row([], [], []) for _ in range(self.num_ranks))
        for rank, _, op, start, end in self.computations:
            rows[rank].kinds.append(op.kind)
            rows[rank].starts.append(start)
            rows[rank].ends.append(end)
        return rows

    @cached_property
    def start_ms(self) -> float:
        return min((min(row.starts) for row in self.rows if row.starts), default=0.0)

    @cached_property
    def makespan_ms(self) -> float:
        """From the first computation's start to the last one's end."""
        return max((max(row.ends) for row in self.rows if row.ends), default=0.0) - self.start_ms

    def busy_ms(self, rank: int, kinds: frozenset[Kind] = COMPUTE) -> float:
        row = self.rows[rank]
        if kinds is COMPUTE:
            return sum(map(sub, row.ends, row.starts))
        return sum([end - start for kind, start, end in zip(*row, strict=True) if kind in kinds])

    def busy_fraction(self, rank: int) -> float:
        """The share of the makespan in which `rank` computes."""
        return self.busy_ms(rank) / self.makespan_ms if self.makespan_ms else 0.0

    @cached_property
    def bubble_fraction(self) -> float:
        """The idle share: 1 - busy / (makespan x ranks). Recompute counts as busy."""
        return 1.0 - self._share(COMPUTE)

    @cached_property
    def useful_fraction(self) -> float:
        """The share of all ranks' time spent in F, B, I and W: recompute counts as lost."""
        return self._share(USEFUL)

    def _share(self, kinds: frozenset[Kind]) -> float:
        total = self.makespan_ms * self.num_ranks
        return sum(self.busy_ms(rank, kinds) for rank in range(self.num_ranks)) / total if total else 0.0

    def frame(self) -> pandas.DataFrame:
        """One row an event: its rank, lane, op (and the op's parts), start_ms, end_ms, duration_ms."""
        import pandas

        rows = [
            {
                "rank": e.rank,
                "lane": e.lane,
                "op": str(e.op),
                "kind": e.op.kind.value,
                "stage": e.op.stage,
                "microbatch": e.op.microbatch,
                "segment": e.op.segment,
                "start_ms": e.start_ms,
                "end_ms": e.end_ms,
                "duration_ms": e.duration_ms,
            }
            for e in self.events
        ]
        columns = ["rank", "lane", "op", *Op._fields, "start_ms", "end_ms", "duration_ms"]
        return pandas.DataFrame(rows, columns=columns)

    def to_chrome(self, path: str | Path) -> Path:
        """Write the trace for Perfetto (ui.perfetto.dev) or chrome://tracing, with arrows send → receive.

        Where messages take no time the arrows lead from computation to computation. Time starts at zero with
        the first event; `otherData` says what ran and whether it was simulated or measured.
        """
        path = Path(path)
        content = chrome_document(self)
        path.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        return path


LANES = (COMPUTE_LANE, WAIT_LANE, COMM_LANE)


def messages(trace: Trace) -> tuple[tuple[Event, Event], ...]:
    """The (send, receive) pairs of the comm lane, in order of their sends."""
    comm = {e.op: e for e in trace.events if e.lane == COMM_LANE}
    sends = sorted((e for e in comm.values() if e.op.kind in SENDS), key=lambda e: e.start_ms)
    pairs = [(send, comm[peer(send.op)]) for send in sends if peer(send.op) in comm]
    assert all(receive.op.kind in RECEIVES for _, receive in pairs)
    return tuple(pairs)


def handovers(trace: Trace) -> tuple[tuple[Event, Event], ...]:
    """(computation, the computation on another rank that needs its result), in order of the second."""
    if trace.schedule is None:
        return ()
    done = {e.op: e for e in trace.computations}
    return tuple(
        (done[needed], e)
        for e in trace.computations
        for needed in dependencies(e.op, trace.schedule)
        if needed in done and done[needed].rank != e.rank
    )


SHORTEST_US = 0.001  # a slice of no length could not hold an arrow's end
_THREADS_A_LANE = 1000


def chrome_document(trace: Trace) -> dict[str, Any]:
    """The JSON object: slices, an arrow for every message or else handover, and what ran."""
    start_ms = min((event.start_ms for event in trace.events), default=0.0)
    threads = {
        event: lane * _THREADS_A_LANE + row
        for rank in range(trace.num_ranks)
        for lane, name in enumerate(LANES)
        for event, row in _rows([e for e in trace.events if e.rank == rank and e.lane == name])
    }
    arrows = enumerate(messages(trace) or handovers(trace))
    events = [
        *_names(trace, threads),
        *(_slice(event, threads[event], start_ms, trace.source) for event in trace.events),
        *(end for number, pair in arrows for end in _arrow(number, pair, threads, start_ms)),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _provenance(trace)}


def _rows(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Each event with the first row that is free when it starts."""
    free_at: list[float] = []
    for event in sorted(events, key=lambda event: event.start_ms):
        row = next((row for row, end in enumerate(free_at) if end <= event.start_ms), len(free_at))
        if row == len(free_at):
            free_at.append(0.0)
        free_at[row] = max(event.end_ms, event.start_ms + SHORTEST_US / 1000)
        yield event, row


def _names(trace: Trace, threads: dict[Event, int]) -> Iterator[dict[str, Any]]:
    for rank in range(trace.num_ranks):
        yield _metadata("process_name", rank, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, {"sort_index": rank})
        for thread in sorted({thread for event, thread in threads.items() if event.rank == rank}):
            lane, row = divmod(thread, _THREADS_A_LANE)
            name = LANES[lane] if row == 0 else f"{LANES[lane]} {row + 1}"
            yield _metadata("thread_name", rank, {"name": name}, thread)
            yield _metadata("thread_sort_index", rank, {"sort_index": thread}, thread)


def _metadata(name: str, rank: int, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _slice(event: Event, thread: int, start_ms: float, source: str) -> dict[str, Any]:
    op = event.op
    return {
        "ph": "X",
        "name": str(op),
        "cat": f"{event.lane},{op.kind.value}",
        "pid": event.rank,
        "tid": thread,
        "ts": (event.start_ms - start_ms) * 1000,
        "dur": max(event.duration_ms * 1000, SHORTEST_US),
        "args": {"stage": op.stage, "microbatch": op.microbatch, "segment": op.segment, "source": source},
    }


def _arrow(
    number: int, pair: tuple[Event, Event], threads: dict[Event, int], start_ms: float
) -> Iterator[dict[str, Any]]:
    """Both ends, each at a time within its slice, which is what binds it there."""
    origin, target = pair
    shared = {"cat": "message", "name": "message", "id": number}
    times_ms = origin.start_ms, max(origin.start_ms, target.start_ms)
    for phase, event, time_ms in zip("sf", pair, times_ms, strict=True):
        end = {"ph": phase, "pid": event.rank, "tid": threads[event], "ts": (time_ms - start_ms) * 1000}
        yield end | shared | ({"bp": "e"} if event is target else {})


def _provenance(trace: Trace) -> dict[str, Any]:
    schedule = trace.schedule
    return {
        "source": trace.source,
        "device": trace.device,
        "schedule": schedule.name if schedule else "",
        "num_stages": schedule.num_stages if schedule else None,
        "num_microbatches": schedule.num_microbatches if schedule else None,
        "makespan_ms": trace.makespan_ms,
        "bubble_fraction": trace.bubble_fraction,
        "overran": trace.overran,
    }
