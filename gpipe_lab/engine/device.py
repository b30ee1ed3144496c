"""Which device a rank computes on, with its clock, streams and memory: the only place that knows CUDA."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from ..plan.errors import require
from .batch import Tree, map_tensors

DEVICES = ("auto", "cpu", "cuda")
EMULATE = "GPIPE_LAB_EMULATE"  # "shared": ranks treat the CPU as a GPU that they share, for tests


@dataclass(frozen=True)
class DevicePlan:
    """The devices of a lab. `kind` is "cpu", "cuda" (one GPU a rank) or "shared_cuda"."""

    kind: str
    backend: str  # what torch.distributed.init_process_group is given
    device_names: tuple[str, ...]  # by rank: "cpu" or "cuda:0"
    reason: str  # one sentence for the banner

    @property
    def is_shared(self) -> bool:
        """Whether ranks share GPUs, so that their tensors travel through host memory."""
        return self.kind == "shared_cuda"

    @property
    def matches_by_order(self) -> bool:
        """Whether both ends of a link match transfers by their order alone, so that the order counts."""
        return self.kind == "cuda"

    @property
    def is_emulated(self) -> bool:
        return self.is_shared and self.device_names[0] == "cpu"

    @property
    def label(self) -> str:
        """The device as a figure names it."""
        label = {"cpu": "CPU, gloo", "cuda": "GPU, NCCL", "shared_cuda": "shared GPU, gloo"}[self.kind]
        return f"emulated {label}" if self.is_emulated else label


def num_gpus() -> int:
    """GPUs that torch sees, asked through NVML so that CUDA stays uninitialised in this process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
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
    if os.environ.get(EMULATE) == "shared" and gpus == 0:
        reason = f"emulated: {num_ranks} ranks handle the CPU as a GPU that they share; no GPU is used"
        return DevicePlan("shared_cuda", "gloo", ("cpu",) * num_ranks, reason)
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
        "tensors travel through host memory over gloo"
    )
    return DevicePlan("shared_cuda", "gloo", names, reason)


def now_ms() -> float:
    """The host's monotonic clock, the same for all processes of a machine."""
    return time.perf_counter() * 1000.0


class Stream(Protocol):
    """A queue of work on a device: what is issued within `with stream:` runs there, in that order."""

    def record(self) -> Any:
        """An event: the point that the queue has come to once everything issued so far has run."""

    def wait(self, event: Any) -> None:
        """Let what is issued from now on run after `event`. The host goes on at once."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


class HostStream:
    """Of a CPU, which has done its work when the call returns: nothing is ever to be waited for."""

    record = staticmethod(now_ms)

    def wait(self, event: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Device:
    """What the engine asks of a device. As it stands here it is a CPU, where a stamp is the time.

    Rules for those who use it: within an unpaced step nothing waits for the device, which the host runs
    ahead of (`finish`, `wait_for`, `times`, and whatever reads a tensor's numbers wait). What one stream
    has written another reads after it has waited for an event recorded behind it. Memory belongs to the
    compute stream: another stream may use it after it has waited for what the compute stream had been
    given when the memory was allocated, and it is let go after the compute stream has waited for the other.
    """

    torch_device = torch.device("cpu")
    is_staged = False  # whether messages are copied to the host, to travel from there
    compute: Stream = HostStream()
    stamp = staticmethod(now_ms)  # an event of the compute stream, for `times`

    def begin_step(self) -> None:
        """Note what ties this device's clock to the host's; all work issued so far has run."""

    def times(self, stamps: Sequence[Any]) -> list[float]:
        """Stamps in ms on the host's clock, once they have all come to pass."""
        return list(stamps)

    def finish(self) -> None:
        """Wait until the compute stream has done all it was given."""

    def wait_for(self, event: Any) -> None:
        """Hold the calling thread until `event`."""

    def stream(self) -> Stream:
        """A new stream beside the compute stream."""
        return HostStream()

    def seed(self, seed: int) -> None:
        """Every generator that a layer may draw from without owning it."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the device's memory, which belong to the compute stream."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the host's memory, from and to which the device copies without holding the host up."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, tree: Tree) -> Tree:
        """Tensors of the host put where the device can fetch them without holding the host up."""
        return tree

    def place(self, tree: Tree) -> Tree:
        """On the device, which fetches pinned tensors while the host goes on; those that are there stay."""
        return tree

    def copy_in(self, tree: Tree) -> Tree:
        """A copy of tensors of the host, on the device."""
        return map_tensors(torch.clone, tree)

    def copy_out(self, tree: Tree) -> Tree:
        """Copies on the host, which are there once the current stream has come this far."""
        return tree

    def limit_memory(self, limit_bytes: int | None) -> None:
        """Have the allocator refuse what is far above a virtual card's limit (on GPUs)."""

    def peak_bytes(self) -> int | None:
        """The most that torch's allocator has held since the step began; None where it does not say."""
        return None


class CpuDevice(Device):
    """The host's own processor."""


class EmulatedSharedGpu(Device):
    """A CPU whose messages are staged as those of GPUs that ranks share."""

    is_staged = True

    def copy_in(self, tree: Tree) -> Tree:
        return map_tensors(torch.clone, tree)

    copy_out = copy_in


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._within: Any = None

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def __enter__(self) -> None:
        self._within = torch.cuda.stream(self._stream)
        self._within.__enter__()

    def __exit__(self, *error: object) -> None:
        self._within.__exit__(*error)


class CudaDevice(Device):
    """One GPU: computation on the current stream, each link on a stream of its own."""

    is_staged = True

    def __init__(self, name: str) -> None:
        self.torch_device = torch.device(name)
        torch.cuda.set_device(self.torch_device)
        self.compute = _CudaStream(torch.cuda.current_stream())
        self.stamp = self.compute.record  # type: ignore[assignment]
        self._anchor: torch.cuda.Event | None = None
        self._anchor_ms = 0.0

    def begin_step(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._anchor = self.compute.record()
        self._anchor.synchronize()
        self._anchor_ms = now_ms()

    def times(self, stamps: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize(self.torch_device)
        return [stamp if isinstance(stamp, float) else self._host_ms(stamp) for stamp in stamps]

    def _host_ms(self, event: torch.cuda.Event) -> float:
        assert self._anchor is not None
        return self._anchor_ms + self._anchor.elapsed_time(event)

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()

    def wait_for(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def stream(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.torch_device))

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.manual_seed(seed)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, tree: Tree) -> Tree:
        return map_tensors(lambda t: t if t.is_cuda else t.pin_memory(), tree)

    def place(self, tree: Tree) -> Tree:
        return map_tensors(lambda t: t.to(self.torch_device, non_blocking=True), tree)

    def copy_in(self, tree: Tree) -> Tree:
        return map_tensors(lambda t: t.to(self.torch_device, non_blocking=True, copy=True), tree)

    def copy_out(self, tree: Tree) -> Tree:
        return map_tensors(lambda t: t.to("cpu", non_blocking=True), tree)  # into pinned memory

    def limit_memory(self, limit_bytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        allowed = total if limit_bytes is None else min(total, limit_bytes + _UNCOUNTED_BYTES)
        torch.cuda.set_per_process_memory_fraction(allowed / total, self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


# What the ledger does not count: temporaries within an operation, libraries' workspaces, gaps.
_UNCOUNTED_BYTES = 1 << 30


def open_device(plan: DevicePlan, index: int) -> Device:
    """The device of the plan's rank `index`."""
    name = plan.device_names[index]
    if name == "cpu":
        return EmulatedSharedGpu() if plan.is_shared else CpuDevice()
    return CudaDevice(name)


def take_device(plan: DevicePlan, index: int) -> None:
    """A worker's first step: make its device the current one."""
    if plan.device_names[index] == "cpu":
        return
    # A process forked from one with CUDA running cannot use CUDA.
    assert not torch.cuda.is_initialized(), "CUDA was initialised before the worker took its device"
    assert not torch.cuda._is_in_bad_fork(), "CUDA was initialised in the forkserver"
    torch.cuda.set_device(plan.device_names[index])


def memory_bytes(device: str) -> int:
    """The memory of a GPU, or a core's share of the host's."""
    if device != "cpu":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1)


def profiler_activities() -> list[ProfilerActivity]:
    """What torch's profiler can watch here."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()


def surrounding_autocast() -> list[str]:
    """The kinds of device for which torch.autocast is on around the caller."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
