"""Which device a rank computes on, with its clock and its streams: the only place that knows CUDA."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..plan.errors import require
from .batch import Tree, map_tensors

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class DevicePlan:
    """The devices of a lab. `kind` is "cpu", "cuda" (one GPU a rank) or "shared_cuda"."""

    kind: str
    backend: str  # what torch.distributed.init_process_group is given
    device_names: tuple[str, ...]  # by rank: "cpu" or "cuda:0"
    reason: str  # one sentence for the banner

    @property
    def label(self) -> str:
        """The device as a figure names it."""
        return {"cpu": "CPU, gloo", "cuda": "GPU, NCCL", "shared_cuda": "shared GPU, gloo"}[self.kind]


def num_gpus() -> int:
    """GPUs that torch sees, asked through NVML so that CUDA stays uninitialised in this process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def plan_devices(num_ranks: int, device: str = "auto") -> DevicePlan:
    """Choose a device for every rank: NCCL with a GPU each, one GPU shared, or gloo over CPU cores.

    Raises `InputError` for an unknown `device`, or "cuda" where there is no GPU.
    """
    require(
        device in DEVICES,
        f"device is one of {', '.join(DEVICES)}",
        got=f"device={device!r}",
        where="Lab",
        remedy='device="auto"',
    )
    gpus = 0 if device == "cpu" else num_gpus()
    require(
        device != "cuda" or gpus > 0,
        'device="cuda" needs a GPU that torch can see',
        got="0 GPUs",
        where="Lab",
        remedy='device="auto"',
    )
    if gpus == 0:
        cores = os.cpu_count() or 1
        why = "asked for" if device == "cpu" else "no GPU found"
        reason = f"{why}: {num_ranks} ranks over gloo on {cores} CPU cores, one thread each"
        return DevicePlan("cpu", "gloo", ("cpu",) * num_ranks, reason)
    if gpus >= num_ranks:
        names = tuple(f"cuda:{rank}" for rank in range(num_ranks))
        return DevicePlan(
            "cuda", "cpu:gloo,cuda:nccl", names, f"{gpus} GPUs: one for each of {num_ranks} ranks"
        )
    names = tuple(f"cuda:{rank % gpus}" for rank in range(num_ranks))
    reason = (
        f"{num_ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''} (NCCL refuses two ranks on one GPU): "
        "tensors travel through host memory over gloo, and runs are paced"
    )
    return DevicePlan("shared_cuda", "gloo", names, reason)


def now_ms() -> float:
    """The host's monotonic clock, the same for all processes of a machine."""
    return time.perf_counter() * 1000.0


class Device(Protocol):
    """What the engine asks of a device."""

    torch_device: torch.device

    def begin_step(self) -> None: ...

    def stamp(self) -> Any: ...

    def times(self, stamps: Sequence[Any]) -> list[float]: ...

    def finish(self) -> None: ...

    def seed(self, seed: int) -> None: ...

    def place(self, tree: Tree) -> Tree: ...


class CpuDevice:
    """Work is done when the call returns, so a stamp is the time."""

    torch_device = torch.device("cpu")

    def begin_step(self) -> None:
        """Nothing runs ahead on a CPU."""

    stamp = staticmethod(now_ms)

    def times(self, stamps: Sequence[float]) -> list[float]:
        return list(stamps)

    def finish(self) -> None:
        """Everything issued has run."""

    def seed(self, seed: int) -> None:
        _seed_host(seed)

    def place(self, tree: Tree) -> Tree:
        return tree


class CudaDevice:
    """One GPU: computation on the current stream, communication on a stream of its own."""

    def __init__(self, name: str) -> None:
        self.torch_device = torch.device(name)
        torch.cuda.set_device(self.torch_device)
        self.comm_stream = torch.cuda.Stream(self.torch_device)
        self._anchor: torch.cuda.Event | None = None
        self._anchor_ms = 0.0

    def begin_step(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._anchor = self.stamp()
        self._anchor.synchronize()
        self._anchor_ms = now_ms()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self, stamps: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize(self.torch_device)
        return [stamp if isinstance(stamp, float) else self._host_ms(stamp) for stamp in stamps]

    def _host_ms(self, event: torch.cuda.Event) -> float:
        assert self._anchor is not None
        return self._anchor_ms + self._anchor.elapsed_time(event)

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()

    def seed(self, seed: int) -> None:
        _seed_host(seed)
        torch.cuda.manual_seed(seed)

    def place(self, tree: Tree) -> Tree:
        return map_tensors(lambda t: t.to(self.torch_device, non_blocking=True), tree)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Work issued inside goes to the communication stream, after what the compute stream has so far."""
        self.comm_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.comm_stream):
            yield


def _seed_host(seed: int) -> None:
    """Every generator that a layer may draw from without owning it."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def open_device(name: str) -> Device:
    """The device called "cpu" or "cuda:0"."""
    return CpuDevice() if name == "cpu" else CudaDevice(name)
