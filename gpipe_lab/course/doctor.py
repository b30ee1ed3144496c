"""What this machine offers, in one line."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from . import strict
from .measure import measured_contention


@dataclass(frozen=True)
class Doctor:
    """The machine as a lab of `num_ranks` ranks would use it. Printed by `doctor`."""

    python: str
    torch: str
    cores: int
    gpus: int
    num_ranks: int
    kind: str  # "cpu", "cuda" or "shared_cuda"
    backend: str
    reason: str  # why this backend
    paced: bool  # whether runs of this many ranks are best held to a set pace
    strict: bool  # whether hidden failures reach their cell
    contention: float | None = None  # how many times as long work takes while every rank works

    @property
    def line(self) -> str:
        pace = (
            f"runs of {_count(self.num_ranks, 'rank')} are best paced "
            "(order and gradients are real, times are set)"
            if self.paced
            else f"runs of {_count(self.num_ranks, 'rank')} can go unpaced"
        )
        if self.contention is not None:
            pace += f" · all at once, work takes {self.contention:.2f} times as long as for one alone"
        return (
            f"Python {self.python} · torch {self.torch} · {_count(self.cores, 'core')} · "
            f"{_count(self.gpus, 'GPU')} · {self.backend} ({self.reason}) · {pace}"
        )

    def _ipython_display_(self) -> None:
        """Nothing more: the line has been printed."""


def doctor(num_ranks: int = 4, device: str = "auto", *, contention: bool = False) -> Doctor:
    """Print one line: versions, cores, GPUs, the backend and why it was chosen, best paced or not.

    contention: also time one worker alone against all at once, unpaced (0.3 s, and the start of the
    workers); measured once a kernel for each number of ranks. `explain_error` takes the result.

    In a notebook it also makes every later cell fail when something the cell started fails: a thread, a
    task, a widget's callback, a shell command, a child process. Raises `InputError` for an unknown
    device, and `RuntimeError` where ranks cannot meet on this machine.
    """
    from importlib.metadata import version

    from ..engine.device import num_gpus, plan_devices
    from ..lab.forkserver import require_loopback

    require_loopback()
    plan = plan_devices(num_ranks, device)
    cores = available_cores()
    report = Doctor(
        python=platform.python_version(),
        torch=version("torch"),
        cores=cores,
        gpus=num_gpus(),
        num_ranks=num_ranks,
        kind=plan.kind,
        backend="NCCL" if "nccl" in plan.backend else plan.backend,
        reason=plan.reason,
        paced=plan.is_shared or (plan.kind == "cpu" and num_ranks > cores),
        strict=strict.enable(),
        contention=measured_contention(num_ranks, device) if contention else None,
    )
    print(report.line)
    return report


def available_cores() -> int:
    """The cores this process may use, which a container may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
