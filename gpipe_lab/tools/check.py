"""python -m gpipe_lab check: whether the engine keeps its promises on this machine, in under five minutes.

For a machine with a new GPU, or several. Each part runs on every kind of device that is there (CPU cores;
ranks that share a GPU; a GPU for each rank), says what it measured, and says where something cannot be
checked here. A table, a verdict and a JSON record; no notebook and no test is needed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.device import num_gpus
from ..engine.executor import Step
from ..engine.pace import Pace
from ..lab.failures import RankFailed
from ..lab.lab import Lab
from ..plan.errors import InputError
from ..plan.memory import peak_in_flight
from ..plan.ops import Op
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES, gpipe, naive, one_f_one_b
from ..plan.simulate import replay, simulate
from ..plan.trace import Trace
from .bench import beside, in_turns
from .record import LONGER, TORCH, origin
from .torch_pipeline import TORCH_SCHEDULES, TorchPipeline

WIDTH, LAYERS, ROWS = 64, 8, 16
MODES = ("never", "always", "except_last", "every:1")
EXACT = 1e-12  # of the norm of all gradients, in float64
HOLDS, FAILS, NOT_HERE = "holds", "FAILS", "not here"
WATCHDOG_S = 5.0


class NotHere(Exception):
    """Why this machine cannot show something."""


@dataclass
class Finding:
    """One row of the record."""

    part: str
    where: str
    verdict: str
    said: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A kind of device, and how many ranks to use there."""

    title: str
    device: str
    num_ranks: int

    @contextmanager
    def lab(self, num_ranks: int | None = None, **options: Any) -> Iterator[Lab]:
        with Lab(num_ranks or self.num_ranks, device=self.device, **options) as lab:
            yield lab

    @property
    def has_own_gpus(self) -> bool:
        return self.device == "cuda" and self.num_ranks <= num_gpus()


def places() -> list[Place]:
    """What there is: CPU cores always, one GPU shared, a GPU a rank where there are two."""
    gpus = num_gpus()
    found = [Place("CPU", "cpu", 4)]
    if gpus:
        found.append(Place("shared GPU", "cuda", max(4, gpus + 1)))
        found.append(Place("NCCL" if gpus > 1 else "own GPU", "cuda", min(gpus, 4)))
    return found


def model(num_stages: int = LAYERS) -> nn.Sequential:
    """As many layers on every stage."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(max(LAYERS, num_stages))]
    return nn.Sequential(*blocks).double()


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def far(gradients: dict[str, torch.Tensor], alone: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The distance to the gradients that one process gets on the CPU, over their norm."""
    alone.zero_grad()
    F.mse_loss(alone(x), y).backward()
    expected = dict(alone.named_parameters())
    assert gradients.keys() == expected.keys(), "gradients of other weights"
    difference = [gradients[name] - p.grad for name, p in expected.items() if p.grad is not None]
    total = torch.stack([p.grad.square().sum() for p in expected.values() if p.grad is not None]).sum()
    return float((torch.stack([d.square().sum() for d in difference]).sum() / total).sqrt())


def training(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    return [make(num_ranks, num_microbatches) for name, make in SCHEDULES.items() if name != "forward_only"]


def parity(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """Gradients equal one process's, for every schedule, each with a mode of checkpointing, all in turn."""
    x, y = batch()
    worst: dict[str, float] = {}
    with place.lab() as lab:
        for number, schedule in enumerate(training(place.num_ranks, 8)):
            for mode in [MODES[number % 4]] if short or place.device == "cpu" else MODES:
                alone = model(schedule.num_stages)
                run = lab.run(schedule, alone, x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
                worst[f"{schedule.name} {mode}"] = found = far(run.gradients(), alone, x, y)
                assert found <= EXACT, f"{schedule.name}, checkpoint={mode!r}: {found:.1e} off"
    return f"{len(worst)} runs, at most {max(worst.values()):.0e} off", worst


def order(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """No schedule hangs where every transfer waits for its other end, one after the other on each rank.

    On GPUs of their own NCCL is what it is; elsewhere one queue a rank is the strictest that NCCL may be.
    """
    x, y = batch()
    steps: dict[str, float] = {}
    with place.lab() as lab:
        lab.watchdog_s = 10 * WATCHDOG_S
        for schedule in training(place.num_ranks, 8):
            for hoist in (2,) if short else (0, 2, 8):
                alone = model(schedule.num_stages)
                options: dict[str, Any] = {"hoist": hoist, "strict": not place.has_own_gpus, "warmup": True}
                run = lab.run(schedule, alone, x, y, loss_fn=F.mse_loss, **options)
                assert far(run.gradients(), alone, x, y) <= EXACT, schedule.name
                steps[f"{schedule.name}, receives {hoist} ahead"] = run.trace.makespan_ms
        if place.has_own_gpus and place.num_ranks > 1:
            held = Pace(forward_ms=1, backward_ms=2, link_ms=1)
            try:
                lab.run(gpipe(place.num_ranks, 8), model(), x, y, loss_fn=F.mse_loss, pace=held)
            except (InputError, RankFailed) as error:
                assert "a link is held only where" in str(error), error
            else:
                raise AssertionError("a pace that holds links was taken, though GPUs hand over by themselves")
    return f"{len(steps)} runs came to their end", steps


def memory(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """What the ledger counts is what schedules promise, and on a GPU within what the allocator held."""
    figures: dict[str, Any] = {}
    with place.lab() as lab:
        for schedule in (gpipe(place.num_ranks, 8), one_f_one_b(place.num_ranks, 8)):
            run = lab.run(schedule, model(), *batch(), loss_fn=F.mse_loss)
            saved = [run.memory.peak_bytes(rank, "saved") for rank in range(place.num_ranks)]
            flights = peak_in_flight(schedule)
            each = [size / count for size, count in zip(saved, flights, strict=True)]
            each = each[:-1] or each  # the last stage saves something for its loss
            assert max(each) == min(each), f"{schedule.name}: saved {saved}, in flight {flights}"
            figures[schedule.name] = saved
            for rank, allocated in run.allocator_peaks.items():
                if place.has_own_gpus:
                    counted = run.memory.peak_bytes(rank)
                    figures[f"{schedule.name}, rank {rank}: ledger, allocator"] = counted, allocated
                    assert counted <= allocated, f"the ledger counts {counted}, the allocator {allocated}"
        few, many = (
            lab.run(one_f_one_b(place.num_ranks, m), model(), *batch(2 * m), loss_fn=F.mse_loss)
            for m in (8, 32)
        )
        category = None if place.has_own_gpus else "saved"  # elsewhere a message's time under way varies
        peaks = [run.memory.peak_bytes(0, category) for run in (few, many)]
        figures["one_f_one_b, 8 and 32 micro-batches"] = peaks
        assert peaks[0] == peaks[1], f"memory grows with the number of micro-batches: {peaks}"
    with place.lab(memory_limit="100KiB") as lab:
        try:
            lab.run(gpipe(place.num_ranks, 8), model(), *batch(64), loss_fn=F.mse_loss)
        except RankFailed as error:
            assert "out of memory on rank" in str(error), error
            figures["refused"] = str(error).splitlines()[0]
        else:
            raise AssertionError("a memory limit of 100 KiB refused nothing")
    seen = (
        "" if place.has_own_gpus else "; the allocator's peak is compared where a rank has a GPU of its own"
    )
    return f"saved bytes as in flight, to the byte; a limit is kept{seen}", figures


def _watch(context: Any) -> None:
    """A job: from now on whatever waits for the GPU within an operation of a step is an error there."""
    compute = Step._compute

    def watched(self: Step, op: Op, index: int) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            compute(self, op, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Step._compute = watched  # type: ignore[method-assign]


class ReadsANumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + 0.0 * x.sum().item())


def no_waiting(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """The host never waits for the GPU inside an unpaced step; a layer that does is noticed."""
    if not place.has_own_gpus:
        raise NotHere("needs a rank with a GPU of its own")
    x, y = batch()
    schedule, alone = gpipe(place.num_ranks, 8), model()
    with place.lab() as lab:
        lab.call(_watch, [()] * place.num_ranks)
        run = lab.run(schedule, alone, x, y, loss_fn=F.mse_loss)
        assert far(run.gradients(), alone, x, y) <= EXACT
        try:
            lab.run(schedule, [ReadsANumber(), *alone], x, y, loss_fn=F.mse_loss)
        except RankFailed as error:
            assert "synchroniz" in str(error), error
        else:
            raise AssertionError("a layer that waits for the GPU went unnoticed")
    return "no wait inside an operation", {}


def overlap(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """Ranks compute at once, and messages travel meanwhile: the trace against its own simulation."""
    if place.num_ranks < 2:
        raise NotHere("needs two ranks")
    pace = None if place.has_own_gpus else Pace(forward_ms=10, backward_ms=20)
    rows, width = (4096, 2048) if place.has_own_gpus else (ROWS, WIDTH)
    heavy = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    x = torch.randn(rows, width)
    figures: dict[str, Any] = {}
    with place.lab() as lab:
        for schedule in (
            naive(place.num_ranks, 8),
            gpipe(place.num_ranks, 8),
            one_f_one_b(place.num_ranks, 8),
        ):
            run = lab.run(schedule, heavy, x, x, loss_fn=F.mse_loss, pace=pace, repeats=3)
            trace = run.trace
            figures[schedule.name] = {
                "ranks at work, on average": _busy(trace),
                "ranks at work, simulated": _busy(
                    simulate(schedule, pace.costs()) if pace else replay(trace)
                ),
                "makespan over simulated": trace.makespan_ms / replay(trace).makespan_ms,
            }
    serial, together = (figures[name]["ranks at work, on average"] for name in ("naive", "gpipe"))
    assert together > 1.2 * serial, f"{together:.2f} ranks at work with GPipe, {serial:.2f} with naive"
    over = figures["gpipe"]["makespan over simulated"]
    return f"{together:.2f} ranks at work at once (naive {serial:.2f}); {over:.2f} of simulated", figures


def _busy(trace: Trace) -> float:
    return sum(event.duration_ms for event in trace.computations) / trace.makespan_ms


class Fault(nn.Module):
    """Kills its process or never returns, in the forward of the third micro-batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == 3 and self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.seen == 3 and self.kind == "hangs":
            time.sleep(3600)
        return x


def faults(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """A rank that is killed and one that hangs are named with their operation; the next run works."""
    schedule, last = gpipe(place.num_ranks, 4), place.num_ranks - 1
    figures: dict[str, Any] = {}
    x, y = batch()
    for kind, told in (("killed", "killed by SIGKILL"), ("hangs", "it hangs")):
        with place.lab() as lab:
            lab.watchdog_s = WATCHDOG_S
            start = time.monotonic()
            try:
                lab.run(schedule, [*model(), Fault(kind)], x, y, loss_fn=F.mse_loss, warmup=False)
            except RankFailed as error:
                took = time.monotonic() - start
                assert (error.rank, str(error.op)) == (last, f"{last}F2"), error
                assert told in error.reason, error
                figures[kind] = {"told": str(error).splitlines()[0], "after s": took}
            else:
                raise AssertionError(f"a rank that is {kind} went unnoticed")
            alone = model()
            run = lab.run(schedule, alone, x, y, loss_fn=F.mse_loss)
            assert far(run.gradients(), alone, x, y) <= EXACT, "the run after a failure is wrong"
    return f"a killed rank named, a hang named within {figures['hangs']['after s']:.1f} s", figures


def benchmark(place: Place, *, short: bool) -> tuple[str, dict[str, Any]]:
    """A step beside torch.distributed.pipelining's, in turns: no promise, so a figure and not a verdict."""
    if place.device == "cuda" and not (place.has_own_gpus and place.num_ranks > 1):
        raise NotHere("torch's pipelining needs a GPU for each of two ranks")
    names = ("gpipe", "one_f_one_b") if short else tuple(TORCH_SCHEDULES)
    size = 2048 if place.has_own_gpus else 512
    x = torch.randn(8 * 32, size)
    figures: dict[str, Any] = {}
    with place.lab(2) as lab:
        for name in names:
            schedule = SCHEDULES[name](2, 8)
            stages: list[nn.Module] = [
                nn.Sequential(*[nn.Linear(size, size) for _ in range(LAYERS // schedule.num_stages)])
                for _ in range(schedule.num_stages)
            ]
            ours = lab.pipeline(stages, loss_fn=F.mse_loss, stage_to_rank=schedule)
            torchs = TorchPipeline(lab, stages, name, 8)

            def step(pipe: Any = ours, schedule: Schedule = schedule) -> float:
                pipe.zero_grad()
                return pipe.step(schedule, x, x, update=False).trace.makespan_ms

            def theirs(pipe: TorchPipeline = torchs) -> float:
                return pipe.step(x)[0].makespan_ms

            for found in beside(name, "ms", *in_turns(2 if short else 5, step, theirs)):
                figures[f"{name}, {found.engine}"] = found.value
    ratios = ", ".join(f"{name} {figures[f'{name}, {LONGER}']:.2f}" for name in names)
    assert all(figures[f"{name}, {TORCH}"] > 0 for name in names)
    return f"torch's time over this engine's: {ratios}", figures


PARTS: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    "parity": parity,
    "order of transfers": order,
    "memory": memory,
    "no waiting": no_waiting,
    "overlap": overlap,
    "faults": faults,
    "benchmark": benchmark,
}
UNDER_SANITIZER = ("parity", "order of transfers", "memory")


def findings(*, short: bool = False, sanitize: bool = False) -> Iterator[Finding]:
    """Every part on every kind of device, as it is found."""
    for missing, number in (("shared GPU", 1), ("NCCL", 2)):
        if num_gpus() < number:
            yield Finding("everything", missing, NOT_HERE, f"{num_gpus()} GPUs, {number} needed", 0.0)
    for part, run in PARTS.items():
        for place in places():
            if sanitize and (part not in UNDER_SANITIZER or place.device == "cpu"):
                continue
            start = time.monotonic()
            figures: dict[str, Any] = {}
            try:
                (said, figures), verdict = run(place, short=short), HOLDS
            except NotHere as reason:
                said, verdict = str(reason), NOT_HERE
            except (
                AssertionError,
                InputError,
                RuntimeError,
                TimeoutError,
            ):  # the other parts are worth their time
                said, verdict = traceback.format_exc().strip(), FAILS
            yield Finding(part, place.title, verdict, said, time.monotonic() - start, figures)


def machine() -> dict[str, Any]:
    """What the record is of."""
    gpus = num_gpus()
    return {
        "origin": origin(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
    }


def check(out: Path, *, short: bool = False, sanitize: bool = False) -> int:
    """Print the table and the verdict, write the record; 0 where all that was checked holds, else 1.

    sanitize: under torch's CUDA sanitizer, which finds unsynchronised use of one tensor by two streams. It is
    read where torch is imported, so this must come before the first worker starts.
    """
    if sanitize and not num_gpus():
        print("the CUDA sanitizer watches GPUs, and there is none here")
        return 1
    if sanitize:
        os.environ["TORCH_CUDA_SANITIZER"] = "1"
    start = time.monotonic()
    found = []
    print(origin(), flush=True)
    for finding in findings(short=short, sanitize=sanitize):
        found.append(finding)
        head = finding.said.splitlines()[-1]  # of a traceback what was raised
        print(
            f"{finding.part:<20}{finding.where:<12}{finding.verdict:<10}{finding.seconds:6.1f} s  {head}",
            flush=True,
        )
    failed = [f"{finding.part} ({finding.where})" for finding in found if finding.verdict == FAILS]
    absent = sorted(
        {finding.where for finding in found if finding.verdict == NOT_HERE and not finding.seconds}
    )
    verdict = f"{len(failed)} parts fail: {', '.join(failed)}" if failed else "all that was checked holds"
    if absent and not failed:
        verdict += f"; not checked for want of GPUs: {', '.join(absent)}"
    record = {
        "machine": machine(),
        "sanitizer": sanitize,
        "seconds": time.monotonic() - start,
        "verdict": verdict,
        "findings": [asdict(finding) for finding in found],
    }
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"verdict: {verdict}\nrecord: {out}")
    return int(bool(failed))
