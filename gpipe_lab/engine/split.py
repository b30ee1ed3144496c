"""Split backwards: put off what only a weight's gradient needs (Zero Bubble, arXiv 2401.10241 §2).

For y = W·x the backward has two parts: dL/dx = Wᵀ·g, which the previous stage waits for, and dL/dW = g·xᵀ,
which nobody waits for. Inside `DeferWeights`, linear layers and convolutions compute the first part in the
backward and leave the second in a queue. Whatever else has weights (norms, embeddings, a layer that does
not go through these functions) gets all its gradients in the backward, so no work is ever done twice. Where
that leaves out matrix products (a function of the user's own, a computed weight, a compiled layer), the stage
notes the weight and the trace says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .ledger import Ledger

Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class Deferred:
    """The weight gradients that one micro-batch still owes, in the order in which they came to be owed."""

    ledger: Ledger
    owed: list[tuple[Callable[[], Gradients], Sequence[torch.Tensor | None], list[int]]] = field(
        default_factory=list
    )

    def owe(
        self,
        compute: Callable[[], Gradients],
        weights: Sequence[torch.Tensor | None],
        keeps: Sequence[torch.Tensor],
    ) -> None:
        """Put off `compute`, which gives a gradient for each of `weights` and needs `keeps` until then."""
        self.owed.append((compute, weights, self.ledger.hold("deferred", keeps)))

    def weights(self) -> set[torch.Tensor]:
        """The weights whose gradients are owed."""
        return {weight for _, weights, _ in self.owed for weight in weights if weight is not None}

    def settle(self) -> None:
        """Compute what is owed and add it to the weights' `.grad`."""
        while self.owed:
            compute, weights, keys = self.owed.pop(0)
            with torch.no_grad():
                for weight, gradient in zip(weights, compute(), strict=True):
                    if weight is not None and gradient is not None:
                        gradient = gradient.to(weight.dtype)
                        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            self.ledger.release("deferred", keys)


def weights_of_products(layers: nn.Module) -> list[nn.Parameter]:
    """The trained weights that enter products: no vectors, which take none, and no tables to look up in."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    owners = [module for module in layers.modules() if not isinstance(module, tables)]
    found = [p for module in owners for p in module.parameters(recurse=False)]
    return [p for p in found if p.requires_grad and p.dim() > 1]


class DeferWeights(TorchFunctionMode):
    """A context in which the weight gradients of linear layers and convolutions are owed to `deferred`."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(self.deferred, func, *args, **kwargs)
        if func in _CONVOLUTIONS:
            return _convolution(self.deferred, func, *args, **kwargs)
        return func(*args, **kwargs)


_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _is_owed(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether both are weights of the model: a computed weight's gradient has further to go."""
    leaves = all(w is None or (w.is_leaf and (w.requires_grad or w is bias)) for w in (weight, bias))
    return torch.is_grad_enabled() and weight.requires_grad and leaves


def _linear(
    deferred: Deferred, func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if not _is_owed(weight, bias):
        return func(input, weight, bias)
    return _Linear.apply(deferred, input, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.deferred, ctx.weight, ctx.bias = deferred, weight, bias  # the weights, not copies of them
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        needs_bias = bias is not None and bias.requires_grad

        def compute() -> Gradients:
            rows = gradient.reshape(-1, gradient.shape[-1])
            for_weight = rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype)
            return for_weight, rows.sum(0) if needs_bias else None

        ctx.deferred.owe(compute, (weight, bias), (x, gradient))
        return None, gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[1] else None, None, None


def _convolution(
    deferred: Deferred,
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    dims = _CONVOLUTIONS[func]
    if isinstance(padding, str) or input.dim() != dims + 2 or not _is_owed(weight, bias):
        return func(input, weight, bias, stride, padding, dilation, groups)
    geometry = [_each(value, dims) for value in (stride, padding, dilation)]
    return _Convolution.apply(deferred, input, weight, bias, *geometry, groups)


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        deferred: Deferred,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> torch.Tensor:
        ctx.deferred, ctx.weight, ctx.bias = deferred, weight, bias  # the weights, not copies of them
        ctx.geometry = stride, padding, dilation, False, [0] * len(stride), groups
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *ctx.geometry)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, geometry = ctx.weight, ctx.bias, ctx.geometry
        needs_bias = bias is not None and bias.requires_grad
        sizes = None if bias is None else list(bias.shape)

        def part(mask: list[bool]) -> tuple[Any, ...]:
            weight_now, x_now = weight.to(gradient.dtype), x.to(gradient.dtype)
            return torch.ops.aten.convolution_backward(gradient, x_now, weight_now, sizes, *geometry, mask)

        ctx.deferred.owe(lambda: part([False, True, needs_bias])[1:], (weight, bias), (x, gradient))
        for_input = part([True, False, False])[0] if ctx.needs_input_grad[1] else None
        return None, for_input, *[None] * 6
