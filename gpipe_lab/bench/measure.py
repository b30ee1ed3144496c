"""The measurements: each yields its figures as soon as it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.pace import Pace
from ..engine.streams import now_ms
from ..lab.lab import Lab
from ..lab.worker import RankContext
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES, gpipe, one_f_one_b
from ..plan.simulate import Costs, replay, simulate
from .counterpart import TORCH_SCHEDULES, their_traces
from .record import OURS, PACED, TORCH, Figure, figure

WIDTH = 16


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
        plain: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
        mine, torchs = [], []
        for _ in range(repeats):  # in turns, so that a machine that slows down does so for both
            run = lab.run(schedule, plain, x, x, loss_fn=F.mse_loss, pace=pace)
            mine.append(run.trace.makespan_ms / ideal)
            if name in TORCH_SCHEDULES:
                (trace,), _ = their_traces(lab, plain, name, num_microbatches, x, 1, pace=pace)
                torchs.append(trace.makespan_ms / ideal)
        yield figure(f"{what}, {name}", OURS + PACED, mine, "ratio")
        if torchs:
            yield figure(f"{what}, {name}", TORCH + PACED, torchs, "ratio")


def real(lab: Lab, repeats: int, *, width: int = 1024, num_microbatches: int = 8) -> Iterator[Figure]:
    """Real computation on two ranks: speed-up over one process with the same micro-batches, and memory."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    x = torch.randn(64 * num_microbatches, width)
    lab.resize(1)
    alone = lab.run(gpipe(1, num_microbatches), layers, x, x, loss_fn=F.mse_loss, repeats=repeats)
    one = min(alone.makespans_ms)
    lab.resize(2)
    for name in TORCH_SCHEDULES:
        schedule = SCHEDULES[name](2, num_microbatches)
        share = len(layers) // schedule.num_stages
        stages: list[nn.Module] = [
            nn.Sequential(*layers[share * index : share * (index + 1)])
            for index in range(schedule.num_stages)
        ]
        runs, mine, torchs, peak = [], [], [], 0
        for _ in range(repeats):  # in turns; of three steps the quickest, as below
            run = lab.run(schedule, layers, x, x, loss_fn=F.mse_loss, repeats=3)
            runs.append(run)
            mine.append(one / min(run.makespans_ms))
            traces, peak = their_traces(lab, stages, name, num_microbatches, x, 3)
            torchs.append(one / min(trace.makespan_ms for trace in traces))
        what = f"real compute, P=2 M={num_microbatches}, {name}"
        yield figure(f"{what}: speed-up over one process", OURS, mine, "x")
        yield figure(f"{what}: speed-up over one process", TORCH, torchs, "x")
        ratios = [run.trace.makespan_ms / replay(run.trace).makespan_ms for run in runs]
        yield figure(f"{what}: makespan / simulated from its own op times", OURS, ratios, "ratio")
        held = max(runs[0].memory.peak_bytes(rank, ("saved", "deferred")) for rank in range(2))
        yield figure(f"{what}: peak saved for backward", OURS, [held / 2**20], "MiB")
        yield figure(f"{what}: peak saved for backward", TORCH, [peak / 2**20], "MiB")


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
        yield figure(what, OURS + PACED, list(run.makespans_ms), "ms")


def overhead(lab: Lab, repeats: int) -> Iterator[Figure]:
    """What the engine adds to an operation of next to no work, on one rank."""
    lab.resize(1)
    x = torch.randn(64, WIDTH)
    layer: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    found: dict[str, list[float]] = {OURS: [], TORCH: [], "plain torch": []}
    for _ in range(repeats):  # in turns; of three steps the quickest, for on most something else gets in
        run = lab.run(gpipe(1, 32), layer, x, x, loss_fn=F.mse_loss, repeats=3)
        traces, _ = their_traces(lab, layer, "gpipe", 32, x, 3)
        pipelining = [trace.makespan_ms for trace in traces]
        plain = lab.launch(_plain_steps, layer[0], x, 32, 3)[0]
        for engine, makespans in zip(found, (run.makespans_ms, pipelining, plain), strict=True):
            found[engine].append(1000 * min(makespans) / 64)
    for engine, per_op in found.items():
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
        yield figure(f"{what}, other costs", OURS, again, "1/s")
        yield figure(f"{what}, first", OURS, first, "1/s")


def start_up(repeats: int) -> Iterator[Figure]:
    """How long a learner waits for workers."""

    def timed(action: Callable[[], Any]) -> float:
        start = now_ms()
        action()
        return now_ms() - start

    first: list[Lab] = []
    yield figure("first lab of 8 workers ready", OURS, [timed(lambda: first.append(Lab(8)))], "ms")
    first.pop().close()
    later = []
    for _ in range(repeats):
        later.append(timed(lambda: first.append(Lab(8))))
        first.pop().close()
    yield figure("later lab of 8 workers ready", OURS, later, "ms")
    with Lab(4) as lab:
        trips = [timed(lambda: lab.call(_nothing, [()] * 4)) for _ in range(20 * repeats)]
        yield figure("empty job's round trip, 4 workers", OURS, trips, "ms")
        x = torch.randn(12, WIDTH)

        def change() -> None:
            lab.resize(6)
            lab.run(gpipe(6, 6), [nn.Linear(WIDTH, WIDTH) for _ in range(6)], x, x, loss_fn=F.mse_loss)

        changes = []
        for _ in range(repeats):
            lab.resize(4)
            changes.append(timed(change))
        yield figure("P from 4 to 6 and the next run", OURS, changes, "ms")


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
