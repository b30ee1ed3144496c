"""Which device each rank computes on, and why: the only place that asks what hardware there is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..plan.errors import require

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
