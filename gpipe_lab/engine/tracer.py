"""Measured events of one rank, stamped while it runs and read off afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..plan.ops import Op
from ..plan.trace import Event
from .streams import Device


@dataclass
class Tracer:
    """Collects (lane, operation, start stamp, end stamp) and turns them into events on the host's clock."""

    rank: int
    device: Device
    _records: list[tuple[str, Op, Any, Any]] = field(default_factory=list)

    @contextmanager
    def record(self, lane: str, op: Op) -> Iterator[None]:
        start = self.device.stamp()
        yield
        self.add(lane, op, start, self.device.stamp())

    def add(self, lane: str, op: Op, start: Any, end: Any) -> None:
        self._records.append((lane, op, start, end))

    def events(self) -> list[Event]:
        """Everything recorded, in ms of the host's monotonic clock."""
        starts = self.device.times([start for _, _, start, _ in self._records])
        ends = self.device.times([end for *_, end in self._records])
        return [
            Event(self.rank, lane, op, start, end)
            for (lane, op, _, _), start, end in zip(self._records, starts, ends, strict=True)
        ]
