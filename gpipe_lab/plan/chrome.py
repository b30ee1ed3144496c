"""A trace in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process, a lane a thread. Slices of one thread must lie one after another or one within another;
messages that are under way at once are neither, so a lane has as many threads as it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace import Event, Trace

SHORTEST_US = 0.001  # a slice of no length could not hold an arrow's end
_THREADS_A_LANE = 1000


def document(trace: Trace, lanes: Sequence[str], arrows: Sequence[tuple[Event, Event]]) -> dict[str, Any]:
    """The JSON object: slices, an arrow from the first to the second event of each pair, and the origin."""
    start_ms = min((event.start_ms for event in trace.events), default=0.0)
    threads = {
        event: lane * _THREADS_A_LANE + row
        for rank in range(trace.num_ranks)
        for lane, name in enumerate(lanes)
        for event, row in _rows([e for e in trace.events if e.rank == rank and e.lane == name])
    }
    events = [
        *_names(trace, lanes, threads),
        *(_slice(event, threads[event], start_ms, trace.source) for event in trace.events),
        *(end for number, pair in enumerate(arrows) for end in _arrow(number, pair, threads, start_ms)),
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


def _names(trace: Trace, lanes: Sequence[str], threads: dict[Event, int]) -> Iterator[dict[str, Any]]:
    for rank in range(trace.num_ranks):
        yield _metadata("process_name", rank, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, {"sort_index": rank})
        for thread in sorted({thread for event, thread in threads.items() if event.rank == rank}):
            lane, row = divmod(thread, _THREADS_A_LANE)
            name = lanes[lane] if row == 0 else f"{lanes[lane]} {row + 1}"
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
