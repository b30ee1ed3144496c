"""What a trace says about the clock: who computes at once, what is done when, traces end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..plan.errors import require
from ..plan.trace import Trace


def time_at_once(trace: Trace) -> tuple[float, ...]:
    """times[n]: the ms of the makespan in which exactly n ranks compute, for n = 0 ... ranks."""
    changes = sorted(
        change for e in trace.computations for change in ((e.start_ms, 1), (e.end_ms, -1)) if e.duration_ms
    )
    times = [0.0] * (trace.num_ranks + 1)
    busy = 0
    for (moment, change), (following, _) in pairwise(changes):
        busy += change
        times[busy] += following - moment
    return tuple(times)


def done_ms(trace: Trace) -> tuple[float, ...]:
    """For every micro-batch, in order, the ms from the trace's start to the end of its last computation."""
    ends: dict[int, float] = {}
    for e in trace.computations:
        ends[e.op.microbatch] = max(ends.get(e.op.microbatch, 0.0), e.end_ms - trace.start_ms)
    return tuple(ends[m] for m in sorted(ends))


def end_to_end(traces: Sequence[Trace], name: str = "one by one") -> Trace:
    """Traces of the same pipeline laid one after another on one clock, their micro-batches numbered on.

    The time between two runs is left out. The schedule is for the picture: it holds what each rank did in
    order, and to simulate it would let the runs overlap.
    """
    require(
        bool(traces) and all(t.schedule is not None and t.computations for t in traces),
        "end_to_end takes at least one trace, each with its schedule",
        got=f"{len(traces)} traces",
        where="end_to_end",
    )
    events, ops = [], [[] for _ in range(traces[0].num_ranks)]  # type: ignore[var-annotated]
    clock, number = 0.0, 0
    for trace in traces:
        schedule = trace.schedule
        assert schedule is not None
        for e in trace.events:
            op = e.op._replace(microbatch=number + e.op.microbatch)
            shift = clock - trace.start_ms
            events.append(e._replace(op=op, start_ms=e.start_ms + shift, end_ms=e.end_ms + shift))
        for rank, row in enumerate(schedule.ops):
            ops[rank] += [op._replace(microbatch=number + op.microbatch) for op in row]
        clock += trace.makespan_ms
        number += schedule.num_microbatches
    first = traces[0]
    assert first.schedule is not None
    joined = replace(first.schedule, name=name, num_microbatches=number, ops=tuple(map(tuple, ops)))
    return replace(
        first, events=tuple(events), schedule=joined, overran=sum(trace.overran for trace in traces)
    )
