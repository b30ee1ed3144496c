"""How much slower a worker is while all the others work too."""

from __future__ import annotations

import time
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
        if matrix.is_cuda:
            torch.cuda.synchronize(matrix.device)
        done += 1
    return done / (time.perf_counter() - start)
