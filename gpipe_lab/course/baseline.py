"""The step without a pipeline: plain PyTorch, one process, to hold the engine against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..lab.worker import RankContext


def plain_steps_ms(
    context: RankContext,
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_steps: int,
    num_threads: int = 1,
) -> list[float]:
    """Times in ms of forward and backward of `model` on one rank, after one step that warms up.

    For `Lab.launch`. No schedule, no stages, no messages; `num_threads` threads share each operation.
    """
    import torch

    torch.set_num_threads(num_threads)
    model = model.to(context.device)
    inputs, targets = inputs.to(context.device), targets.to(context.device)
    times = []
    for _ in range(num_steps + 1):
        model.zero_grad()
        _wait(context.device)
        start = time.perf_counter()
        loss_fn(model(inputs), targets).backward()
        _wait(context.device)
        times.append(1000 * (time.perf_counter() - start))
    return times[1:]


def _wait(device: str) -> None:
    """Until the device has done all it was given, so that the clock reads its time."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
