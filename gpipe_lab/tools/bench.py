"""python -m gpipe_lab.tools.bench: what the engine costs, beside torch's own pipelining in the same run.

Prints a table and, with `--out FILE.csv`, writes it with its origin. Absolute times depend on the machine;
ratios within one run are what counts. Each measurement yields its figures as soon as it has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.device import now_ms
from ..engine.pace import Pace
from ..lab.lab import Lab
from ..lab.run import Run
from ..lab.worker import RankContext
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES, gpipe, one_f_one_b
from ..plan.simulate import Costs, replay, simulate
from ..plan.trace import Trace
from .record import LONGER, OURS, PACED, TORCH, Figure, figure, markdown, origin, read, write
from .torch_pipeline import TORCH_SCHEDULES, TorchPipeline

WIDTH = 16


def in_turns(repeats: int, *steps: Callable[[], Any]) -> list[list[Any]]:
    """What each of `steps` gave, turn by turn, after a first turn that warms up.

    A machine that slows down so does it to all of them. Every other turn goes backwards.
    """
    found: list[list[Any]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        pairs = list(zip(found, steps, strict=True))
        for values, step in pairs if turn % 2 else reversed(pairs):
            values.append(step())
    return [values[1:] for values in found]


def beside(
    what: str, unit: str, mine: list[float], torchs: list[float], *, paced: str = ""
) -> Iterator[Figure]:
    """Both engines' figures, and how many times as long torch took, turn by turn."""
    yield figure(what, OURS + paced, mine, unit)
    yield figure(what, TORCH + paced, torchs, unit)
    is_speed = unit == "x"
    longer = [a / b if is_speed else b / a for a, b in zip(mine, torchs, strict=True)]
    yield figure(what, LONGER, longer, "ratio")


class Ours:
    """This engine's pipeline of `layers`, its steps to be taken in turns with torch's."""

    def __init__(
        self, lab: Lab, layers: list[nn.Module], schedule: Schedule, pace: Pace | None = None
    ) -> None:
        self.pipeline = lab.pipeline(layers, loss_fn=F.mse_loss, stage_to_rank=schedule)
        self.schedule, self.pace = schedule, pace

    def step(self, x: torch.Tensor) -> Run:
        self.pipeline.zero_grad()
        return self.pipeline.step(self.schedule, x, x, update=False, pace=self.pace)


def paced(
    lab: Lab, num_ranks: int, num_microbatches: int, forward_ms: float, repeats: int
) -> Iterator[Figure]:
    """Makespan over the simulated one with paced stages: what messages, waiting and the executor add."""
    lab.resize(num_ranks)
    for name, make in SCHEDULES.items():
        if name != "forward_only":
            yield from _paced(lab, name, make(num_ranks, num_microbatches), forward_ms, repeats)


def _paced(lab: Lab, name: str, schedule: Schedule, forward_ms: float, repeats: int) -> Iterator[Figure]:
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    what = f"paced makespan / ideal, P={num_ranks} M={num_microbatches} {forward_ms:g} ms, {name}"
    share = num_ranks / schedule.num_stages  # of the same model
    pace = Pace(forward_ms=share * forward_ms, backward_ms=2 * share * forward_ms)
    ideal = simulate(schedule, pace.costs()).makespan_ms
    plain: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
    x = torch.randn(2 * num_microbatches, WIDTH)
    ours = Ours(lab, plain, schedule, pace)

    def mine() -> float:
        return ours.step(x).trace.makespan_ms / ideal

    def theirs() -> float:
        return torchs.step(x)[0].makespan_ms / ideal

    if name in TORCH_SCHEDULES:
        torchs = TorchPipeline(lab, plain, name, num_microbatches, pace=pace)
        yield from beside(what, "ratio", *in_turns(4 * repeats, mine, theirs), paced=PACED)
    else:
        yield figure(what, OURS + PACED, in_turns(repeats, mine)[0], "ratio")


def real(lab: Lab, repeats: int, *, width: int = 2048, num_microbatches: int = 8) -> Iterator[Figure]:
    """Real computation on two ranks: speed-up over one process with the same micro-batches, and memory.

    The weights are more than a cache holds, as those of a model that is worth cutting are.
    """
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    x = torch.randn(32 * num_microbatches, width)
    lab.resize(2)
    with Lab(1) as single:
        alone = Ours(single, layers, gpipe(1, num_microbatches))
        for name in TORCH_SCHEDULES:
            yield from _real(lab, alone, name, layers, x, num_microbatches, repeats)


def _real(
    lab: Lab,
    alone: Ours,
    name: str,
    layers: list[nn.Module],
    x: torch.Tensor,
    num_microbatches: int,
    repeats: int,
) -> Iterator[Figure]:
    schedule = SCHEDULES[name](2, num_microbatches)
    share = len(layers) // schedule.num_stages
    stages: list[nn.Module] = [
        nn.Sequential(*layers[share * index : share * (index + 1)]) for index in range(schedule.num_stages)
    ]
    ours, torchs = Ours(lab, layers, schedule), TorchPipeline(lab, stages, name, num_microbatches)
    turns = in_turns(repeats, lambda: alone.step(x), lambda: ours.step(x), lambda: torchs.step(x))
    single_ms = [run.trace.makespan_ms for run in turns[0]]
    traces = [run.trace for run in turns[1]], [trace for trace, _ in turns[2]]

    def speed_ups(traces: list[Trace]) -> list[float]:
        return [ms / trace.makespan_ms for ms, trace in zip(single_ms, traces, strict=True)]

    def over_simulated(traces: list[Trace]) -> list[float]:
        return [trace.makespan_ms / replay(trace).makespan_ms for trace in traces]

    what = f"real compute, P=2 M={num_microbatches}, {name}"
    yield from beside(f"{what}: speed-up over one process", "x", *map(speed_ups, traces))
    own = f"{what}: makespan / simulated from its own op times"
    yield from beside(own, "ratio", *map(over_simulated, traces))
    held = max(turns[1][0].memory.peak_bytes(rank, ("saved", "deferred")) for rank in range(2))
    yield figure(f"{what}: peak saved for backward", OURS, [held / 2**20], "MiB")
    yield figure(f"{what}: peak saved for backward", TORCH, [turns[2][0][1] / 2**20], "MiB")


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
    ours, torchs = Ours(lab, layer, gpipe(1, 32)), TorchPipeline(lab, layer, "gpipe", 32)
    mine, theirs, plain = in_turns(
        10 * repeats,
        lambda: 1000 * ours.step(x).trace.makespan_ms / 64,
        lambda: 1000 * torchs.step(x)[0].makespan_ms / 64,
        lambda: 1000 * lab.launch(_plain_step, layer[0], x, 32)[0] / 64,
    )
    what = "one small layer, per operation"
    yield from beside(what, "us", mine, theirs)
    yield figure(what, "plain torch", plain, "us")


def _plain_step(context: RankContext, layer: nn.Module, x: torch.Tensor, num_microbatches: int) -> float:
    """ms of accumulating the gradients of micro-batches by hand."""
    start = now_ms()
    losses = [F.mse_loss(layer(part), part) / num_microbatches for part in x.chunk(num_microbatches)]
    for loss in reversed(losses):
        loss.backward()
    return now_ms() - start


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


def picture() -> bytes:
    """A measured, paced run of GPipe at P=4, M=8, with what each rank held beneath it; a PNG."""
    import gpipe_lab as gl

    inputs, targets = gl.tiny_batch(32)
    pace = Pace(forward_ms=15, backward_ms=30)
    with Lab(4) as lab:
        run = lab.run(
            gpipe(4, 8), gl.tiny_gpt(), inputs, targets, loss_fn=gl.next_token_loss, pace=pace, repeats=5
        )
    return gl.plot_trace(run.trace, run.memory).png()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab.tools.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as CSV, its origin in the first line")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--table", type=Path, help="print such a CSV for a page, and measure nothing")
    only.add_argument("--picture", type=Path, help="draw one paced run of GPipe as PNG, and measure nothing")
    args = parser.parse_args()
    if args.picture:
        args.picture.write_bytes(picture())
        return
    if args.table:
        print(markdown(read(args.table)))
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
        write(figures, args.out)


if __name__ == "__main__":
    main()
