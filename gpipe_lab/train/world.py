"""Where this process is among those that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..engine.device import DevicePlan, plan_devices
from ..plan.errors import require


@dataclass(frozen=True)
class World:
    """A process's rank among all, and what its host has."""

    rank: int
    num_ranks: int
    local_rank: int
    device_plan: DevicePlan  # of this host

    @property
    def device(self) -> str:
        return self.device_plan.device_names[self.local_rank]


@contextmanager
def join(device: str, timeout_s: float) -> Iterator[World]:
    """The default process group of the processes that torchrun has started, or of this one alone.

    A transfer or a collective call that takes longer than `timeout_s` raises. Several hosts find each other
    on the network interface that GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) names.
    """
    started_by_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started_by_torchrun else 1
    plan = plan_devices(num_local, device)
    timeout = timedelta(seconds=timeout_s)
    if started_by_torchrun:
        dist.init_process_group(plan.backend, timeout=timeout)
    else:
        dist.init_process_group(plan.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    require_same(
        plan.kind,
        "all hosts have the same kind of devices: both ends of a link speak the same way",
        where="device",
        remedy='device = "cpu", or as many GPUs as ranks on every host',
    )
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if started_by_torchrun else 0
    yield World(dist.get_rank(), dist.get_world_size(), local_rank, plan)
    dist.destroy_process_group()  # after a failure the process ends anyway, and destroying may wait


def require_same(value: Any, rule: str, *, where: str, remedy: str) -> None:
    """Raise `InputError` on every rank unless all give the same value. All ranks call this together."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, value)
    require(all(one == seen[0] for one in seen), rule, got=f"{seen}, by rank", where=where, remedy=remedy)
