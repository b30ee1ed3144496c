"""Batch norm's running statistics: once a step, of the whole batch, never again in a recompute.

A micro-batch is normalised by its own mean and variance. The running statistics, used in evaluation, are
those of the batch: sums are gathered over the micro-batches and committed when the step ends, so that they
equal one process's that saw the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Sums:
    """Of a layer's inputs in one of its uses, over a step, in float64."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.num_batches_tracked is not None
        device = layer.num_batches_tracked.device
        self.count = torch.zeros(1, dtype=torch.float64, device=device)
        self.total = torch.zeros(layer.num_features, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.total)

    def add(self, x: torch.Tensor) -> None:
        over = [dim for dim in range(x.dim()) if dim != 1]
        values = x.detach().double()
        self.count += x.numel() // x.shape[1]
        self.total += values.sum(over)
        self.squares += values.square().sum(over)


class _Gathered:
    """One layer's settings from before the step, and what each of its uses has seen in it.

    A layer that a model uses twice moves its statistics twice for a batch, so its uses are kept apart.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.num_batches_tracked is not None
        self.layer = layer
        self.momentum = layer.momentum
        self.num_batches = layer.num_batches_tracked.clone()
        self.uses: list[_Sums] = []
        self.microbatch_uses = 0  # so far, in the micro-batch that is running
        layer.momentum = 0.0  # its own forwards leave the statistics where they are

    def add(self, x: torch.Tensor) -> None:
        if self.microbatch_uses == len(self.uses):
            self.uses.append(_Sums(self.layer))
        self.uses[self.microbatch_uses].add(x)
        self.microbatch_uses += 1

    def commit(self) -> None:
        """Move the running statistics as torch does for one batch of all that was gathered."""
        layer = self.layer
        assert layer.num_batches_tracked is not None
        layer.momentum = self.momentum
        layer.num_batches_tracked.copy_(self.num_batches)
        for sums in self.uses:
            if sums.count.item():  # an input without rows moves nothing
                self._move(sums)

    def _move(self, sums: _Sums) -> None:
        layer = self.layer
        assert layer.running_mean is not None and layer.running_var is not None
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        share = 1.0 / layer.num_batches_tracked.item() if self.momentum is None else self.momentum
        count = sums.count.item()
        mean = sums.total / count
        variance = (sums.squares / count - mean.square()).clamp(min=0.0)
        unbiased = variance * count / max(count - 1, 1)
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)


class RunningStatistics:
    """Watches the batch-norm layers of a stage between `begin` and `end` of a training step."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        found = dict.fromkeys(m for layer in layers for m in layer.modules() if isinstance(m, _BatchNorm))
        self._layers = [m for m in found if m.track_running_stats and m.running_mean is not None]
        self._gathered: dict[nn.Module, _Gathered] = {}
        self.recomputing = False
        for layer in self._layers:
            layer.register_forward_pre_hook(self._watch)

    def watches(self, module: nn.Module) -> bool:
        """Whether the statistics of this layer are seen to here."""
        return module in self._layers

    def begin(self) -> None:
        """From now on statistics are gathered, not moved."""
        self._gathered = {layer: _Gathered(layer) for layer in self._layers}

    def begin_microbatch(self) -> None:
        """Of a forward that counts: what a layer sees next is its first use in it."""
        for gathered in self._gathered.values():
            gathered.microbatch_uses = 0

    def sums(self) -> list[torch.Tensor]:
        """What the step has gathered: other replicas' are to be added to it, in place."""
        uses = [use for gathered in self._gathered.values() for use in gathered.uses]
        return [t for use in uses for t in (use.count, use.total, use.squares)]

    def end(self) -> None:
        """Commit what the step has gathered."""
        for gathered in self._gathered.values():
            gathered.commit()
        self._gathered = {}

    def _watch(self, layer: nn.Module, inputs: Any) -> None:
        if layer in self._gathered and not self.recomputing:
            self._gathered[layer].add(inputs[0])
