"""One clock for ranks on several hosts, by ping-pong with rank 0 (Cristian's algorithm, 1989).

Every host counts its time from a start of its own. A rank notes its time, asks rank 0 for its time, and
notes its own again when the answer is there. Rank 0 read its clock at some moment in between; taking the
middle is wrong by half the round trip at most, whichever way was the slower. Of several rounds the fastest
counts. Clocks drift by less than 0.1 ms in a second, so it is done right before the step that is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..engine.device import now_ms
from ..engine.executor import RankResult

NUM_ROUNDS = 32


@dataclass(frozen=True)
class ClockOffset:
    """What to add to a rank's times for rank 0's, and how far off that can be."""

    offset_ms: float = 0.0
    error_ms: float = 0.0

    def shift(self, result: RankResult) -> RankResult:
        """A rank's measurements on rank 0's clock."""
        by = self.offset_ms
        events = [e._replace(start_ms=e.start_ms + by, end_ms=e.end_ms + by) for e in result.events]
        memory = [row._replace(time_ms=row.time_ms + by) for row in result.memory]
        return replace(result, events=events, memory=memory)


def measure_offset(clock: Callable[[], float] = now_ms) -> ClockOffset:
    """This rank's offset to rank 0. All ranks call this together; rank 0 answers one after another."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        return min((_ask(clock) for _ in range(NUM_ROUNDS)), key=lambda found: found.error_ms)
    message = torch.zeros(1, dtype=torch.float64)
    for other in range(1, num_ranks):
        for _ in range(NUM_ROUNDS):
            dist.recv(message, other)
            message[0] = clock()
            dist.send(message, other)
    return ClockOffset()


def _ask(clock: Callable[[], float]) -> ClockOffset:
    message = torch.zeros(1, dtype=torch.float64)
    asked = clock()
    dist.send(message, 0)
    dist.recv(message, 0)
    answered = clock()
    return ClockOffset(message.item() - (asked + answered) / 2, (answered - asked) / 2)
