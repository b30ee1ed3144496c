"""Where this process is among those that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..engine.device import open_device, plan_devices
from ..engine.distributed import Meeting, open_transport
from ..engine.transport import Transport
from ..plan.errors import require


@contextmanager
def join(device: str, timeout_s: float) -> Iterator[tuple[str, Transport]]:
    """Those that torchrun has started, or this process alone: what their devices are, and the way to them.

    A transfer or a collective call that takes longer than `timeout_s` raises. Several hosts find each other
    on the network interface that GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) names.
    """
    started_by_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started_by_torchrun else 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if started_by_torchrun else 0
    plan = plan_devices(num_local, device)
    alone: dict[str, Any] = (
        {} if started_by_torchrun else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(plan.backend, timeout=timeout, **alone)
    meeting = Meeting.of_default_group(timeout=timeout)
    require_same_devices(meeting, plan.kind)
    transport = open_transport(plan, open_device(plan, local_rank), meeting)
    yield plan.label, transport
    transport.close()  # after a failure the process ends anyway, and closing may wait
    dist.destroy_process_group()


def require_same_devices(meeting: Meeting, kind: str) -> None:
    """Raise `InputError` on every rank, before a link opens, unless all hosts have one kind of devices."""
    meeting.store.set(f"devices of rank {meeting.rank}", kind)
    kinds = [meeting.store.get(f"devices of rank {rank}").decode() for rank in range(meeting.num_ranks)]
    require(
        len(set(kinds)) == 1,
        "all hosts have one kind of devices: both ends of a link speak the same way",
        got=", ".join(f"{each} on rank {rank}" for rank, each in enumerate(kinds)),
        where="[pipeline] device",
        remedy='device = "cpu", or a GPU for each rank on every host',
    )


def require_same(transport: Transport, value: Any, rule: str, *, where: str, remedy: str) -> None:
    """Raise `InputError` on every rank unless all give the same value. All ranks call this together."""
    seen = transport.gather(value)
    require(all(one == seen[0] for one in seen), rule, got=f"{seen}, by rank", where=where, remedy=remedy)
