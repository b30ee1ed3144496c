"""What this machine offers, in one line."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from . import strict


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
    paced: bool  # whether runs of this many ranks are held to a set pace
    strict: bool  # whether hidden failures reach their cell

    @property
    def line(self) -> str:
        pace = (
            f"{self.num_ranks} ranks are paced (order and gradients are real, times are set)"
            if self.paced
            else f"{self.num_ranks} ranks run unpaced"
        )
        return (
            f"Python {self.python} · torch {self.torch} · {_count(self.cores, 'core')} · "
            f"{_count(self.gpus, 'GPU')} · {self.backend} ({self.reason}) · {pace}"
        )

    def _ipython_display_(self) -> None:
        """Nothing more: the line has been printed."""


def doctor(num_ranks: int = 4, device: str = "auto") -> Doctor:
    """Print one line: versions, cores, GPUs, the backend and why it was chosen, paced or not.

    In a notebook it also makes every later cell fail when something the cell started fails: a thread, a
    task, a widget's callback, a shell command, a child process. Raises `InputError` for an unknown
    device.
    """
    from importlib.metadata import version

    from ..engine.devices import num_gpus, plan_devices

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
        paced=plan.kind == "shared_cuda" or (plan.kind == "cpu" and num_ranks > cores),
        strict=strict.enable(),
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
