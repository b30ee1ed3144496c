"""What chapters measure beside the engine: workers that share cores, a plain step, and counted FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..lab.worker import RankContext

WINDOW_S = 0.15  # for one alone, and again for all at once
WIDTH = 256


@lru_cache
def measured_contention(num_ranks: int, device: str = "auto") -> float:
    """The time of a piece of work while all ranks work, over its time for one alone; about 1 with cores
    enough. Each rank multiplies matrices in one thread, unpaced, in workers that end afterwards.
    """
    import gpipe_lab as gl

    with gl.Lab(num_ranks, device) as lab:
        rates = lab.launch(_rates)
    alone = rates[0][0]
    return alone / fmean(together for _, together in rates)


def _rates(context: RankContext) -> tuple[float, float]:
    """Products a second while rank 0 works alone (0 on the others), and while all do."""
    import torch
    import torch.distributed as dist

    matrix = torch.ones(WIDTH, WIDTH, device=context.device)
    _rate(matrix, WINDOW_S / 10)  # what the first product costs is left out
    dist.barrier()
    alone = _rate(matrix, WINDOW_S) if context.rank == 0 else 0.0
    dist.barrier()
    return alone, _rate(matrix, WINDOW_S)


def _rate(matrix: torch.Tensor, seconds: float) -> float:
    import torch

    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(matrix, matrix)
        _wait(str(matrix.device))
        done += 1
    return done / (time.perf_counter() - start)


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


class Halves(NamedTuple):
    """Floating-point operations of F, of I (the gradient of the input) and of W (of the weights)."""

    forward: int
    backward_input: int
    backward_weight: int


def count_halves(layer: nn.Module, x: torch.Tensor) -> Halves:
    """Count them as torch runs `layer` on x: once as it is, once with its weights held fixed.

    Matrix products are counted, those of attention too, for which the plain kernel is taken: the counter
    does not see into the fused one, which does the same products.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fixed = torch.func.functional_call
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        forward, output = _counted(lambda: layer(x))
        both, _ = _counted(lambda: torch.autograd.grad(output.sum(), [x, *layer.parameters()]))
        output = fixed(layer, weights, (x,))
        inputs, _ = _counted(lambda: torch.autograd.grad(output.sum(), x))
    return Halves(forward, inputs, both - inputs)


def _counted(work: Callable[[], Any]) -> tuple[int, Any]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        result = work()
    return counter.get_total_flops(), result
