"""torch's own pipelining on the same layers: timed operation by operation, and paced, as this engine is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from ..engine.ledger import Ledger
from ..engine.pace import Pace
from ..engine.streams import now_ms
from ..lab.lab import Lab
from ..lab.worker import RankContext
from ..plan.ops import Kind, Op
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from ..plan.trace import COMPUTE_LANE, MEASURED, PACED, Event, Trace

Timed = tuple[Op, float, float]  # an operation, its start and its end, in ms

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble_h1": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


class TimedTorchStage(PipelineStage):
    """torch's stage, its operations timed and, with a pace, held as this engine holds its own."""

    def __init__(self, module: nn.Module, index: int, num_stages: int, pace: Pace | None) -> None:
        super().__init__(module, index, num_stages, torch.device("cpu"))
        self.pace = pace
        self.times: list[Timed] = []

    @contextmanager
    def _timed(self, kind: Kind, microbatch: int) -> Iterator[None]:
        op = Op(kind, self.stage_index, microbatch)
        started_ms = now_ms()
        yield
        if self.pace is not None:
            duration_ms = self.pace.duration_ms(op, num_segments=1, rows=1, largest=1)
            time.sleep(max(0.0, started_ms + duration_ms - now_ms()) / 1000)
        self.times.append((op, started_ms, now_ms()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(Kind.F, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._timed(Kind.B if full_backward else Kind.I, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._timed(Kind.W, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def torch_step(
    context: RankContext,
    stages: list[nn.Module],
    schedule: str,
    num_microbatches: int,
    x: torch.Tensor,
    repeats: int,
    pace: Pace | None = None,
) -> list[tuple[list[Timed], int]]:
    """What each step of torch's own schedule took on this rank.

    (the operations in the order in which they ran, peak of bytes saved for backward). Stages lie on the ranks
    as in this package's schedule of the same name. A first step warms up, unreported.
    """
    home = SCHEDULES[schedule](context.num_ranks, num_microbatches).stage_to_rank
    local = [
        TimedTorchStage(stage, index, len(stages), pace)
        for index, stage in enumerate(stages)
        if home[index] == context.rank
    ]
    make = TORCH_SCHEDULES[schedule]
    several = issubclass(make, PipelineScheduleMulti)
    step = make(local if several else local[0], num_microbatches, loss_fn=F.mse_loss)
    args = (x,) if context.rank == 0 else ()
    target = x if context.rank == home[-1] else None
    found = []
    for _ in range(repeats + 1):
        for stage in local:  # a training step starts without gradients, here as there
            stage.submod.zero_grad()
        dist.barrier()
        ledger = Ledger(context.rank)
        ledger.hold("parameters", [p for stage in local for p in stage.submod.parameters()])
        weights = ledger.total
        for stage in local:
            stage.times.clear()
        with ledger.saving("saved"):
            step.step(*args, target=target)
        times = sorted((timed for stage in local for timed in stage.times), key=lambda timed: timed[1])
        found.append((times, ledger.highest - weights))
    return found[1:]


def their_traces(
    lab: Lab,
    stages: list[nn.Module],
    schedule: str,
    num_microbatches: int,
    x: torch.Tensor,
    repeats: int,
    *,
    pace: Pace | None = None,
) -> tuple[list[Trace], int]:
    """torch's steps as traces, of computations only, and the highest peak of bytes saved for backward.

    A trace's schedule is the order in which torch ran its operations.
    """
    by_rank = lab.launch(torch_step, stages, schedule, num_microbatches, x, repeats, pace)
    home = SCHEDULES[schedule](lab.num_ranks, num_microbatches).stage_to_rank
    source = MEASURED if pace is None else PACED
    traces, peaks = [], []
    for ranks in zip(*by_rank, strict=True):
        rows = [times for times, _ in ranks]
        began_ms = min(start for row in rows for _, start, _ in row)
        events = tuple(
            Event(rank, COMPUTE_LANE, op, start - began_ms, end - began_ms)
            for rank, row in enumerate(rows)
            for op, start, end in row
        )
        ops = tuple(tuple(op for op, _, _ in row) for row in rows)
        order = Schedule(f"torch's {schedule}", num_microbatches, home, ops)
        traces.append(Trace(events, source, order, device=lab.device_plan.label))
        peaks.append(max(peak for _, peak in ranks))
    return traces, max(peaks)
