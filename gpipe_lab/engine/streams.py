"""Time and order on a device: the one place that knows that a GPU runs behind its host.

A *stamp* is a point in a device's work, read off as ms once the step is over. On a CPU it is the clock
itself; on a GPU it is an event in the compute or communication stream, put on the host's clock through
one anchor per step, so that nothing inside a step has to wait for the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from .tree import Tree, map_tensors


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
