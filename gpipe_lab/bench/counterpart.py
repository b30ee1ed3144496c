"""torch's own pipelining on the same layers: timed, and paced, as this engine is."""

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
from ..plan.schedules import SCHEDULES

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
        self.times: list[tuple[float, float]] = []  # start and end of each operation, in ms

    @contextmanager
    def _timed(self, kind: Kind) -> Iterator[None]:
        started_ms = now_ms()
        yield
        if self.pace is not None:
            op = Op(kind, self.stage_index, 0)
            duration_ms = self.pace.duration_ms(op, num_segments=1, rows=1, largest=1)
            time.sleep(max(0.0, started_ms + duration_ms - now_ms()) / 1000)
        self.times.append((started_ms, now_ms()))

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed(Kind.F):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._timed(Kind.B if full_backward else Kind.I):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._timed(Kind.W):
            super().backward_weight_one_chunk(*args, **kwargs)


def torch_step(
    context: RankContext,
    stages: list[nn.Module],
    schedule: str,
    num_microbatches: int,
    x: torch.Tensor,
    repeats: int,
    pace: Pace | None = None,
) -> list[tuple[float, float, int]]:
    """What each step of torch's own schedule took on this rank.

    (start of the first operation in ms, end of the last one in ms, peak of bytes saved for backward). Stages
    lie on the ranks as in this package's schedule of the same name. A first step warms up, unreported.
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
        times = [moment for stage in local for pair in stage.times for moment in pair]
        found.append((min(times), max(times), ledger.highest - weights))
    return found[1:]


def theirs(
    lab: Lab,
    stages: list[nn.Module],
    schedule: str,
    num_microbatches: int,
    x: torch.Tensor,
    repeats: int,
    *,
    pace: Pace | None = None,
) -> tuple[list[float], int]:
    """torch's makespans, from the first operation's start to the last one's end, and the highest peak."""
    by_rank = lab.launch(torch_step, stages, schedule, num_microbatches, x, repeats, pace)
    steps = list(zip(*by_rank, strict=True))
    makespans = [max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks) for ranks in steps]
    return makespans, max(peak for ranks in steps for _, _, peak in ranks)
