"""Bugs that shipped: five faults of real pipeline engines, in a small program and in torch's own pipeline.

torch is imported only by what runs, so that the list of exercises stays light.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NONE = "no bug"
TIMES_M = "gradients M times too large"
LOST_STEP = "accumulation that loses a step"
DRIFT = "tied weights that drift"
BROADCAST = "a last batch that broadcasts"
COUNTED = "statistics counted M + 1 times"
BUGS = (TIMES_M, LOST_STEP, DRIFT, BROADCAST, COUNTED)

WIDTH = 6


class Program:
    """A two-stage pipeline of four layers, trained by GPipe's rules in one process; it may have a bug.

    Layers: "0" Linear, "1" BatchNorm (where asked for), "2" Tanh, "3" Linear with the weight of layer 0.
    Every program starts from the same weights. The loss is the mean of squared differences.
    """

    def __init__(self, bug: str = NONE, *, batch_norm: bool = False) -> None:
        import torch
        from torch import nn

        assert bug == NONE or bug in BUGS, bug
        self._bug = bug
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first, last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        last.weight = nn.Parameter(first.weight.detach().clone())  # each stage has the shared weight
        self._norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64) if batch_norm else None
        self._first, self._last = first, last
        self._buffer: Any = None  # what arrived at stage 1 first, whose shape a bug takes for all
        self._has_probed = False

    def step(self, x: Any, y: Any, num_microbatches: int) -> float:
        """Forwards and backwards of one batch. Gradients add up until `zero_grad`. Returns the loss."""
        sizes = [len(part) for part in _split(x, num_microbatches)]
        before = {name: _copy(p.grad) for name, p in self._weights().items()}
        if self._bug == COUNTED and not self._has_probed:
            self._has_probed = True
            self._stage_0(_split(x, num_microbatches)[0])  # to learn the shape of what it sends
        total = 0.0
        seen: list[Any] = []
        for part, target in zip(_split(x, num_microbatches), _split(y, num_microbatches), strict=True):
            loss = self._microbatch(part, target, seen, scale=len(part) / sum(sizes))
            total += loss * len(part) / sum(sizes)
        self._commit_statistics(seen)
        self._finish_gradients(before, num_microbatches)
        return total

    def _microbatch(self, part: Any, target: Any, seen: list[Any], *, scale: float) -> float:
        """One forward and backward; returns the loss, not scaled."""
        sent = self._stage_0(part, seen)
        arrived = self._receive(sent).requires_grad_()
        loss = ((self._last(arrived) - target) ** 2).mean()
        unscaled = self._bug in (TIMES_M, LOST_STEP)
        (loss if unscaled else loss * scale).backward()
        sent.backward(arrived.grad[: len(sent)])
        return loss.item()

    def _stage_0(self, part: Any, seen: list[Any] | None = None) -> Any:
        x = self._first(part)
        if self._norm is not None:
            if seen is not None:
                seen.append(x.detach())
            counts = self._bug == COUNTED
            x = self._norm(x) if counts else _normalized(x, self._norm)
        return x.tanh()

    def _receive(self, sent: Any) -> Any:
        """The message as it arrives; the bug writes it into the first message's buffer, whatever its size."""
        if self._bug != BROADCAST:
            return sent.detach().clone()
        if self._buffer is None:
            self._buffer = sent.detach().clone()
        self._buffer[: len(sent)] = sent.detach()  # the rows behind are left from before
        return self._buffer.clone()

    def _commit_statistics(self, seen: list[Any]) -> None:
        """Once a step, from all rows."""
        import torch

        if self._norm is not None and self._bug != COUNTED:
            with torch.no_grad():
                self._norm(torch.cat(seen))

    def _finish_gradients(self, before: dict[str, Any], num_microbatches: int) -> None:
        if self._bug == LOST_STEP:  # the mean over micro-batches, taken of all that has added up
            for parameter in self._weights().values():
                parameter.grad /= num_microbatches
            before = {name: old if old is None else old / num_microbatches for name, old in before.items()}
        if self._bug != DRIFT:
            tied: list[Any] = [self._first.weight, self._last.weight]
            held = [before["0.weight"], before["3.weight"]]
            news = [p.grad if old is None else p.grad - old for p, old in zip(tied, held, strict=True)]
            for parameter, old in zip(tied, held, strict=True):
                parameter.grad = news[0] + news[1] if old is None else old + news[0] + news[1]

    def _weights(self) -> dict[str, Any]:
        return {
            f"{n}.{k}": p
            for n, layer in (("0", self._first), ("3", self._last))
            for k, p in layer.named_parameters()
        }

    def gradients(self) -> dict[str, Any]:
        """Whole-model names to what has added up."""
        return {name: _copy(p.grad) for name, p in self._weights().items()}

    def zero_grad(self) -> None:
        for parameter in self._weights().values():
            parameter.grad = None

    def update(self, rate: float = 0.1) -> None:
        """Plain gradient descent."""
        for parameter in self._weights().values():
            parameter.data -= rate * parameter.grad

    def state(self) -> dict[str, Any]:
        """Weights and buffers by whole-model names; "1.num_batches_tracked" counts updates of statistics."""
        buffers = self._norm.named_buffers() if self._norm is not None else ()
        return {name: p.detach().clone() for name, p in self._weights().items()} | {
            f"1.{name}": buffer.clone() for name, buffer in buffers
        }


def training_losses(bug: str, updates: int, *, batch_norm: bool = False) -> list[float]:
    """The mean loss of each update of a `Program`: the gradients of two batches are added up, M = 4.

    The batches are the same in every update, so a program that learns has a falling loss. They have 8 and 4
    rows; with batch norm, which needs two rows in each micro-batch, 8 and 8.
    """
    batches = [batch(8), batch(8 if batch_norm else 4, seed=1)]
    program = Program(bug, batch_norm=batch_norm)
    losses = []
    for _ in range(updates):
        program.zero_grad()
        losses.append(sum(program.step(x, y, 4) for x, y in batches) / len(batches))
        program.update()
    return losses


def batch(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """(x, y) of so many rows for a `Program`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def _split(x: Any, num_microbatches: int) -> Any:
    from ..engine.batch import split

    return split(x, num_microbatches)


def _copy(gradient: Any) -> Any:
    return None if gradient is None else gradient.clone()


def _normalized(x: Any, norm: Any) -> Any:
    """By the micro-batch's own statistics; the running ones are left alone."""
    from torch.nn import functional as F

    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


@dataclass(frozen=True)
class Symptoms:
    """What torch.distributed.pipelining does on one rank, M = 4 micro-batches of two rows.

    times_m: gradient norm with `scale_grads=False` over that with it. two_steps: gradient norm after two
    equal steps without zeroing, over that after one. tied: the rank's copy of a weight that both stages
    started from and both updated. evaluated: mean loss of a batch of 4 rows after one of 8, and rows: how
    many came back for the 4; both on the last rank only. statistics: updates counted after one step.
    """

    times_m: float
    two_steps: float
    tied: Any
    evaluated: float
    rows: int
    statistics: int


def official_stage(index: int, *, batch_norm: bool = False) -> Any:
    """Stage `index`: Linear, BatchNorm where asked for, Tanh; the same weights in every process."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        linear = nn.Linear(WIDTH, WIDTH)
    norms = [nn.BatchNorm1d(WIDTH)] if batch_norm else []
    return nn.Sequential(linear, *norms, nn.Tanh()).double()


def official_model(*, batch_norm: bool = False, tied: bool = False) -> Any:
    """Both stages one after the other; `tied`: one weight in the two, as both start from it."""
    from torch import nn

    stages = [official_stage(0 if tied else index, batch_norm=batch_norm) for index in range(2)]
    if tied:
        stages[1][0].weight = stages[0][0].weight
    return nn.Sequential(*stages)


def official_symptoms(context: Any) -> Symptoms:
    """A program for `lab.launch` on two ranks: each bug provoked in torch.distributed.pipelining."""
    import warnings

    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.nn import functional as F

    warnings.filterwarnings("ignore", message="Using a target size")  # torch's only sign of the broadcast
    rank = context.rank
    x, y = batch(8)

    def make(module: Any, **options: Any) -> Any:
        stage = PipelineStage(module, rank, 2, torch.device(context.device))
        return ScheduleGPipe(stage, 4, loss_fn=F.mse_loss, **options)

    def run(step: Any, rows: int = 8) -> tuple[Any, list[Any]]:
        losses: list[Any] = []
        if rank == 0:
            step(x[:rows])
            return None, losses
        return step(target=y[:rows], losses=losses), losses

    def norm(module: Any) -> float:
        return module[0].weight.grad.norm().item()

    plain, unscaled, tied, normed = (
        official_stage(rank),
        official_stage(rank),
        official_stage(0),
        official_stage(rank, batch_norm=True),
    )
    run(make(unscaled, scale_grads=False).step)
    schedule = make(plain)
    run(schedule.step)
    once = norm(plain)
    run(schedule.step)
    run(make(tied).step)
    torch.optim.SGD(tied.parameters(), lr=1.0).step()
    evaluating = make(official_stage(rank))
    run(evaluating.eval)
    output, losses = run(evaluating.eval, rows=4)
    run(make(normed).step)
    return Symptoms(
        times_m=norm(unscaled) / once,
        two_steps=norm(plain) / once,
        tied=tied[0].weight.detach(),
        evaluated=sum(loss.item() for loss in losses) / len(losses) if losses else 0.0,
        rows=0 if output is None else len(output),
        statistics=int(normed[1].num_batches_tracked),
    )
