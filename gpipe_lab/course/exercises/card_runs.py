"""Models for the exercise on P, m and M: what a setting takes on paper, and one step of it on real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Setting = tuple[int, int, int]  # P, m, M
RECEIVES_AHEAD = 2  # messages that a card is ready to receive before it needs them


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model of equal layers, and the cards it is to run on. Times are of a made-up card, bytes are real."""

    num_layers: int
    width: int
    max_stages: int
    max_batch: int
    launch_ms: float
    sample_ms: float
    limit_bytes: int

    @property
    def weight_bytes(self) -> int:
        """A square matrix of 4-byte numbers, and its gradient."""
        return 2 * 4 * self.width**2

    @property
    def saved_bytes(self) -> int:
        """The inputs of the product and of the GELU."""
        return 2 * 4 * self.width

    @property
    def message_bytes(self) -> int:
        return 4 * self.width

    def peak_bytes(self, P: int, m: int, M: int) -> int:
        """Of the fullest card."""
        largest = -(-self.num_layers // P)
        messages = (M + RECEIVES_AHEAD) * m * self.message_bytes if P > 1 else 0
        return largest * (self.weight_bytes + M * m * self.saved_bytes) + messages

    def speed(self, P: int, m: int, M: int) -> float:
        """Samples a second and card: GPipe's makespan for equal stages, a backward twice a forward."""
        slot_ms = 3 * -(-self.num_layers // P) * (self.launch_ms + m * self.sample_ms)
        return 1000 * M * m / ((M + P - 1) * slot_ms * P)

    def account(self, P: int, m: int, M: int) -> str:
        """Why it is no faster, in one line."""
        used = m * self.sample_ms / (self.launch_ms + m * self.sample_ms)
        bubble = (P - 1) / (M + P - 1)
        even = self.num_layers / (P * -(-self.num_layers // P))
        return f"kernels used {used:.0%}, bubble {bubble:.0%}, stages balanced {even:.0%}"


# Small, so that a run takes a moment. What limits the speed differs: launches, the bubble, the batch.
TASKS = (
    Task(
        num_layers=8, width=64, max_stages=8, max_batch=48, launch_ms=4.0, sample_ms=1.0, limit_bytes=220_000
    ),
    Task(
        num_layers=12, width=48, max_stages=6, max_batch=64, launch_ms=0.5, sample_ms=1.0, limit_bytes=150_000
    ),
    Task(
        num_layers=6, width=96, max_stages=6, max_batch=24, launch_ms=9.0, sample_ms=0.5, limit_bytes=320_000
    ),
)


@lru_cache(maxsize=256)
def does_not_fit(task: Task, P: int, m: int, M: int) -> str:
    """One step on P workers with the limit: "" where it fits, else what the ledger says."""
    import torch

    import gpipe_lab as gl

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = torch.randn(m * M, task.width, dtype=torch.float32)
    with gl.Lab(P, device="cpu", memory_limit=task.limit_bytes) as lab:
        try:
            lab.run(
                gl.gpipe(P, M),
                layers_of(task),
                inputs,
                inputs[:, 0],
                loss_fn=mean_of_outputs,
                warmup=False,
                pace=gl.Pace(forward_ms=1.0, backward_ms=1.0),  # or a fast rank's messages would pile up
            )
        except gl.RankFailed as failure:
            return str(failure).splitlines()[0]
    return ""


def layers_of(task: Task) -> list[Any]:
    """Factories, so that a model too large for a card is on none before its stage is."""
    from functools import partial

    return [partial(_layer, task.width)] * task.num_layers


def _layer(width: int) -> Any:
    import torch
    from torch import nn

    return nn.Sequential(nn.Linear(width, width, bias=False, dtype=torch.float32), nn.GELU())


def mean_of_outputs(outputs: Any, _: Any) -> Any:
    return outputs.mean()
