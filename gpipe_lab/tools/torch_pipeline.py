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

from ..engine.device import now_ms, open_device
from ..engine.ledger import Ledger
from ..engine.pace import Pace
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

    def __init__(
        self, module: nn.Module, index: int, schedule: Schedule, device: torch.device, pace: Pace | None
    ) -> None:
        super().__init__(module.to(device), index, schedule.num_stages, device)
        self.like, self.pace = schedule, pace
        self.times: list[Timed] = []

    @contextmanager
    def _timed(self, kind: Kind, microbatch: int) -> Iterator[None]:
        op = Op(kind, self.stage_index, microbatch)
        started_ms = now_ms()
        yield
        if self.pace is not None:
            duration_ms = self.pace.duration_ms(op, self.like, rows=1, largest=1)
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


class _Rank:
    """One rank's part of torch's pipeline: its stages, and the schedule that runs them."""

    def __init__(
        self,
        context: RankContext,
        stages: list[nn.Module],
        name: str,
        like: Schedule,
        pace: Pace | None,
    ) -> None:
        self.rank = context.rank
        self.device = open_device(context.device_plan, context.rank)
        self.home = like.stage_to_rank
        self.stages = [
            TimedTorchStage(stage, index, like, self.device.torch_device, pace)
            for index, stage in enumerate(stages)
            if self.home[index] == self.rank
        ]
        make = TORCH_SCHEDULES[name]
        several = issubclass(make, PipelineScheduleMulti)
        self.schedule = make(
            self.stages if several else self.stages[0], like.num_microbatches, loss_fn=F.mse_loss
        )

    def step(self, x: torch.Tensor) -> tuple[list[Timed], int]:
        """The operations in the order in which they ran, and the peak of bytes saved for backward."""
        for stage in self.stages:  # a training step starts without gradients, here as there
            stage.submod.zero_grad()
            stage.times.clear()
        x = self.device.place(x)
        args = (x,) if self.rank == 0 else ()
        target = x if self.rank == self.home[-1] else None
        ledger = Ledger(self.rank)
        ledger.hold("parameters", [p for stage in self.stages for p in stage.submod.parameters()])
        weights = ledger.total
        dist.barrier()
        with ledger.saving("saved"):
            self.schedule.step(*args, target=target)
        self.device.finish()
        times = sorted((timed for stage in self.stages for timed in stage.times), key=lambda timed: timed[1])
        if self.device.torch_device.type != "cpu":  # operations were only launched: the last ends the step
            op, start_ms, _ = times.pop()
            times.append((op, start_ms, now_ms()))
        return times, ledger.highest - weights


def _set_up(context: RankContext, *args: Any) -> None:
    context.state["torch's pipeline"] = _Rank(context, *args)


def _step(context: RankContext, x: torch.Tensor) -> tuple[list[Timed], int]:
    return context.state["torch's pipeline"].step(x)


class TorchPipeline:
    """torch's schedule of that name on a lab's workers, where it stays until the next one is made."""

    def __init__(
        self,
        lab: Lab,
        stages: list[nn.Module],
        schedule: str,
        num_microbatches: int,
        *,
        pace: Pace | None = None,
    ) -> None:
        self.lab = lab
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        # Stages lie on the ranks as in this package's schedule of the same name.
        like = SCHEDULES[schedule](lab.num_ranks, num_microbatches)
        self.home = like.stage_to_rank
        self.source = MEASURED if pace is None else PACED
        lab.launch(_set_up, stages, schedule, like, pace)

    def step(self, x: torch.Tensor) -> tuple[Trace, int]:
        """A training step as a trace, of computations only, and the most that a rank saved for backward.

        The trace's schedule is the order in which torch ran its operations.
        """
        rows, peaks = zip(*self.lab.launch(_step, x), strict=True)
        began_ms = min(start for row in rows for _, start, _ in row)
        events = tuple(
            Event(rank, COMPUTE_LANE, op, start - began_ms, end - began_ms)
            for rank, row in enumerate(rows)
            for op, start, end in row
        )
        ops = tuple(tuple(op for op, _, _ in row) for row in rows)
        order = Schedule(f"torch's {self.schedule}", self.num_microbatches, self.home, ops)
        return Trace(events, self.source, order, device=self.lab.device_plan.label), max(peaks)


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
    """`repeats` steps of torch's schedule, after a first that warms up, and the highest of their peaks."""
    pipeline = TorchPipeline(lab, stages, schedule, num_microbatches, pace=pace)
    steps = [pipeline.step(x) for _ in range(repeats + 1)][1:]
    return [trace for trace, _ in steps], max(peak for _, peak in steps)
