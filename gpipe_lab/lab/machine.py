"""This machine as a `Device`: how fast a rank multiplies and how fast two ranks exchange, measured."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ..engine.device import memory_bytes
from ..planner.models import Device
from .lab import Lab

if TYPE_CHECKING:
    from .worker import RankContext

SIZE = 768  # rows and columns of the matrices that are multiplied, in fp32
MESSAGE_BYTES = 8 << 20
TRIES = 5


def this_machine(device: str = "auto") -> Device:
    """A rank of a lab on this machine, for `gl.estimate` and `gl.propose`: measured in about a second.

    peak_tflops: fp32 matrix products of one rank while the other waits, so `efficiency` is near 1 where a
    model's products are as large. Bandwidth: a message between two ranks. Memory: of a GPU, or a core's
    share of the host's.
    """
    with Lab(2, device=device) as lab:
        (tflops, gb_s, memory_bytes), _ = lab.launch(_measure)
        plan = lab.device_plan
    cores = os.cpu_count() or 1
    return Device(
        name="this-machine",
        title=f"a rank on this machine ({plan.label})",
        memory_bytes=memory_bytes,
        peak_tflops=tflops,
        node_gb_s=gb_s,
        link_gb_s=gb_s,
        per_node=cores if plan.kind == "cpu" else len(set(plan.device_names)),
        format="fp32",
        source=f"measured: the best of {TRIES} products of {SIZE}×{SIZE}, and of as many messages of "
        f"{MESSAGE_BYTES >> 20} MiB",
    )


def _measure(context: RankContext) -> tuple[float, float, int]:
    """(TFLOPS, GB/s, bytes of memory); the second rank only answers messages."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(MESSAGE_BYTES // 4, device=context.device)
    matrix = torch.ones(SIZE, SIZE, device=context.device)
    product_s, message_s = [], []
    for _ in range(TRIES + 1):
        if context.rank == 0:
            start = time.perf_counter()
            float((matrix @ matrix)[0, 0])  # asks for a number, so that the device has finished
            product_s.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        if context.rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        float(message[0])
        message_s.append((time.perf_counter() - start) / 2)
    tflops = 2 * SIZE**3 / min(product_s[1:]) / 1e12 if context.rank == 0 else 0.0
    return tflops, MESSAGE_BYTES / min(message_s[1:]) / 1e9, memory_bytes(context.device)
