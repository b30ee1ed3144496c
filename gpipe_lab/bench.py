"""`python -m gpipe_lab.bench`: what the engine costs, beside torch's own pipelining in the same run.

Prints a table and, with `--out FILE.csv`, writes it with its origin. Absolute times depend on the machine;
ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas
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

from .engine.ledger import Ledger
from .engine.pace import Pace
from .engine.streams import now_ms
from .lab.lab import Lab
from .lab.worker import RankContext
from .plan.ops import Kind, Op
from .plan.schedule import Schedule
from .plan.schedules import SCHEDULES, gpipe, one_f_one_b
from .plan.simulate import Costs, replay, simulate

WIDTH = 16
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble_h1": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Figure:
    """One measured value: the median of `repeats`, with the smallest and the largest."""

    what: str
    engine: str
    value: float
    unit: str
    least: float
    most: float
    repeats: int


def figure(what: str, engine: str, values: list[float], unit: str) -> Figure:
    return Figure(what, engine, median(values), unit, min(values), max(values), len(values))


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


def paced(
    lab: Lab, num_ranks: int, num_microbatches: int, forward_ms: float, repeats: int
) -> Iterator[Figure]:
    """Makespan over the simulated one with paced stages: what messages, waiting and the executor add."""
    lab.resize(num_ranks)
    what = f"paced makespan / ideal, P={num_ranks} M={num_microbatches} {forward_ms:g} ms"
    x = torch.randn(2 * num_microbatches, WIDTH)
    for name, make in SCHEDULES.items():
        if name == "forward_only":
            continue
        schedule = make(num_ranks, num_microbatches)
        times = [
            share * forward_ms * num_ranks / schedule.num_stages for share in (1, 2)
        ]  # of the same model
        pace = Pace(forward_ms=times[0], backward_ms=times[1])
        ideal = simulate(schedule, pace.costs()).makespan_ms
        plain = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
        run = lab.run(schedule, plain, x, x, loss_fn=F.mse_loss, pace=pace, repeats=repeats)
        yield figure(f"{what}, {name}", "gpipe_lab, paced", [t / ideal for t in run.makespans_ms], "ratio")
        if name in TORCH_SCHEDULES:
            makespans, _ = theirs(lab, list(plain), name, num_microbatches, x, repeats, pace=pace)
            yield figure(f"{what}, {name}", "torch, paced", [t / ideal for t in makespans], "ratio")


def real(lab: Lab, repeats: int, *, width: int = 1024, num_microbatches: int = 8) -> Iterator[Figure]:
    """Real computation on two ranks: speed-up over one process with the same micro-batches, and memory."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    x = torch.randn(64 * num_microbatches, width)
    lab.resize(1)
    alone = lab.run(gpipe(1, num_microbatches), layers, x, x, loss_fn=F.mse_loss, repeats=repeats)
    one = median(alone.makespans_ms)
    lab.resize(2)
    for name in TORCH_SCHEDULES:
        schedule = SCHEDULES[name](2, num_microbatches)
        share = len(layers) // schedule.num_stages
        stages: list[nn.Module] = [
            nn.Sequential(*layers[share * index : share * (index + 1)])
            for index in range(schedule.num_stages)
        ]
        runs, makespans, peak = [], [], 0
        for _ in range(repeats):  # in turns, so that a machine that slows down does so for both
            runs.append(lab.run(schedule, layers, x, x, loss_fn=F.mse_loss))
            (makespan,), peak = theirs(lab, stages, name, num_microbatches, x, 1)
            makespans.append(makespan)
        what = f"real compute, P=2 M={num_microbatches}, {name}"
        mine = [one / run.trace.makespan_ms for run in runs]
        yield figure(f"{what}: speed-up over one process", "gpipe_lab", mine, "x")
        yield figure(f"{what}: speed-up over one process", "torch", [one / t for t in makespans], "x")
        ratios = [run.trace.makespan_ms / replay(run.trace).makespan_ms for run in runs]
        yield figure(f"{what}: makespan / simulated from its own op times", "gpipe_lab", ratios, "ratio")
        held = max(runs[0].memory.peak_bytes(rank, ("saved", "deferred")) for rank in range(2))
        yield figure(f"{what}: peak saved for backward", "gpipe_lab", [held / 2**20], "MiB")
        yield figure(f"{what}: peak saved for backward", "torch", [peak / 2**20], "MiB")


def hoisting(lab: Lab, repeats: int) -> Iterator[Figure]:
    """What posting receives ahead of need saves, with links that hold every message for 5 ms."""
    lab.resize(4)
    x = torch.randn(16, WIDTH)
    plain = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    pace = Pace(forward_ms=10, backward_ms=20, link_ms=5)
    for hoist in (0, 2):
        run = lab.run(
            one_f_one_b(4, 8), plain, x, x, loss_fn=F.mse_loss, pace=pace, repeats=repeats, hoist=hoist
        )
        what = f"paced with 5 ms links, P=4 M=8, one_f_one_b, receives {hoist} ahead"
        yield figure(what, "gpipe_lab, paced", list(run.makespans_ms), "ms")


def overhead(lab: Lab, repeats: int) -> Iterator[Figure]:
    """What the engine adds to an operation of next to no work, on one rank."""
    lab.resize(1)
    x = torch.randn(64, WIDTH)
    layer = [nn.Linear(WIDTH, WIDTH)]
    run = lab.run(gpipe(1, 32), layer, x, x, loss_fn=F.mse_loss, repeats=repeats)
    pipelining, _ = theirs(lab, list(layer), "gpipe", 32, x, repeats)
    plain = lab.launch(_plain_steps, layer[0], x, 32, repeats)[0]
    for engine, makespans in (("gpipe_lab", run.makespans_ms), ("torch", pipelining), ("plain torch", plain)):
        per_op = [1000 * t / 64 for t in makespans]
        yield figure("one small layer, per operation", engine, per_op, "us")


def _plain_steps(
    context: RankContext, layer: nn.Module, x: torch.Tensor, num_microbatches: int, repeats: int
) -> list[float]:
    """ms of accumulating the gradients of micro-batches by hand."""
    times = []
    for _ in range(repeats + 1):
        start = now_ms()
        losses = [F.mse_loss(layer(part), part) / num_microbatches for part in x.chunk(num_microbatches)]
        for loss in reversed(losses):
            loss.backward()
        times.append(now_ms() - start)
    return times[1:]


def simulated(repeats: int) -> Iterator[Figure]:
    """Computations of a built schedule that are simulated in a second: with other costs each time, and first.

    A simulation ends with the makespan and the bubble known; the first also checks and walks the schedule.
    """

    def per_second(schedule: Schedule, forward: float) -> float:
        start = now_ms()
        trace = simulate(schedule, Costs(forward=forward, send=0.1))
        assert trace.makespan_ms > 0 and trace.bubble_fraction > 0
        return 1000 * sum(map(len, schedule.ops)) / (now_ms() - start)

    for p, m in ((8, 64), (16, 128), (64, 512)):
        schedules = [one_f_one_b(p, m) for _ in range(repeats)]
        first = [per_second(schedule, 1.0) for schedule in schedules]
        again = [per_second(schedule, 2.0) for schedule in schedules]
        what = f"simulated operations a second, one_f_one_b P={p} M={m}"
        yield figure(f"{what}, other costs", "gpipe_lab", again, "1/s")
        yield figure(f"{what}, first", "gpipe_lab", first, "1/s")


def start_up(repeats: int) -> Iterator[Figure]:
    """How long a learner waits for workers."""

    def timed(action: Callable[[], Any]) -> float:
        start = now_ms()
        action()
        return now_ms() - start

    first: list[Lab] = []
    yield figure("first lab of 8 workers ready", "gpipe_lab", [timed(lambda: first.append(Lab(8)))], "ms")
    first.pop().close()
    later = []
    for _ in range(repeats):
        later.append(timed(lambda: first.append(Lab(8))))
        first.pop().close()
    yield figure("later lab of 8 workers ready", "gpipe_lab", later, "ms")
    with Lab(4) as lab:
        trips = [timed(lambda: lab.call(_nothing, [()] * 4)) for _ in range(20 * repeats)]
        yield figure("empty job's round trip, 4 workers", "gpipe_lab", trips, "ms")
        x = torch.randn(12, WIDTH)

        def change() -> None:
            lab.resize(6)
            lab.run(gpipe(6, 6), [nn.Linear(WIDTH, WIDTH) for _ in range(6)], x, x, loss_fn=F.mse_loss)

        changes = []
        for _ in range(repeats):
            lab.resize(4)
            changes.append(timed(change))
        yield figure("P from 4 to 6 and the next run", "gpipe_lab", changes, "ms")


def _nothing(context: RankContext) -> None:
    """An empty job."""


def measure(repeats: int) -> Iterator[Figure]:
    yield from simulated(repeats)
    yield from start_up(repeats)
    with Lab(4) as lab:
        yield from paced(lab, 4, 8, 10.0, repeats)
        yield from paced(lab, 8, 32, 5.0, repeats)
        yield from real(lab, repeats)
        yield from hoisting(lab, repeats)
        yield from overhead(lab, repeats)


def picture() -> bytes:
    """A measured, paced run of GPipe at P=4, M=8, with what each rank held beneath it; a PNG."""
    from .course.workload import tiny_batch, tiny_gpt
    from .engine.layers import next_token_loss
    from .view.gantt import plot_trace

    inputs, targets = tiny_batch(32)
    pace = Pace(forward_ms=15, backward_ms=30)
    with Lab(4) as lab:
        run = lab.run(gpipe(4, 8), tiny_gpt(), inputs, targets, loss_fn=next_token_loss, pace=pace, repeats=5)
    return plot_trace(run.trace, run.memory).png()


def origin() -> str:
    """Where a record comes from, in one line."""
    return (
        f"{time.strftime('%Y-%m-%d')}; python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as CSV, its origin in the first line")
    parser.add_argument(
        "--picture", type=Path, help="draw one paced run of GPipe as PNG, and measure nothing"
    )
    args = parser.parse_args()
    if args.picture:
        args.picture.write_bytes(picture())
        return
    print(origin(), flush=True)
    figures = []
    for found in measure(args.repeats):
        figures.append(found)
        print(
            f"{found.what:<75} {found.engine:<23} {found.value:8.3f} {found.unit:<5} "
            f"[{found.least:.3f}, {found.most:.3f}]",
            flush=True,
        )
    if args.out:
        table = pandas.DataFrame([asdict(f) for f in figures])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"# {origin()}\n" + table.to_csv(index=False, float_format="%.4f"))


if __name__ == "__main__":
    main()
