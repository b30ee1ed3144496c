"""Split backwards: put off what only a weight's gradient needs (Zero Bubble, arXiv 2401.10241 §2).

For y = W·x the backward has two parts: dL/dx = Wᵀ·g, which the previous stage waits for, and dL/dW = g·xᵀ,
which nobody waits for. Inside `DeferWeights`, linear layers and convolutions compute the first part in the
backward and leave the second in a queue. All else (biases, norms, embeddings, a layer that does not go
through these functions) gets its gradients in the backward, so no work is ever done twice. Where
that leaves out matrix products (a function of the user's own, a computed weight, a compiled layer), the stage
notes the weight and the trace says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .ledger import Ledger
from .products import LINEAR, Convolution, WeightPart, is_plain, product


@dataclass
class Deferred:
    """What one micro-batch still owes to weights, in the order in which it came to be owed.

    It takes them while it is open, that is in the stage's own backward. What a layer differentiates by
    itself is the layer's.
    """

    ledger: Ledger
    owed: list[tuple[WeightPart, list[int]]] = field(default_factory=list)
    is_open: bool = False

    def recording(self) -> DeferWeights:
        """For the stage's forward: a context in which products are set up to owe."""
        return DeferWeights(self)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the stage's backward. What runs forward again in it has to save what it saved before."""
        self.is_open = True
        try:
            with DeferWeights(self, again=True):
                yield
        finally:
            self.is_open = False

    def owe(self, part: WeightPart) -> None:
        """Put off the weights' part of a product's backward."""
        self.owed.append((part, self.ledger.hold("deferred", (part.x, part.gradient))))

    def weights(self) -> set[torch.Tensor]:
        """The weights whose gradients are owed."""
        return {part.weight for part, _ in self.owed}

    def settle(self) -> None:
        """Compute what is owed and add it to the weights' `.grad`."""
        while self.owed:
            part, keys = self.owed.pop(0)
            part.add()
            self.ledger.release("deferred", keys)


def weights_of_products(layers: nn.Module) -> list[nn.Parameter]:
    """The trained weights that enter products: no vectors, which take none, and no tables to look up in."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    owners = [module for module in layers.modules() if not isinstance(module, tables)]
    found = [p for module in owners for p in module.parameters(recurse=False)]
    return [p for p in found if p.requires_grad and p.dim() > 1]


class DeferWeights(TorchFunctionMode):
    """A context in which the weight gradients of linear layers and convolutions are owed to `deferred`.

    again: they run within a backward, for somebody else's sake, and owe nothing.
    """

    def __init__(self, deferred: Deferred, *, again: bool = False) -> None:
        super().__init__()
        self.account = None if again else deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(func, *args, **kwargs)
        if func in _CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _linear(
        self, func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not is_plain(weight):
            return func(input, weight, bias)
        return product(LINEAR, input, weight, bias, self.account)

    def _convolution(
        self,
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
        if isinstance(padding, str) or input.dim() != dims + 2 or not is_plain(weight):
            return func(input, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = (_each(value, dims) for value in (stride, padding, dilation))
        return product(Convolution(stride, padding, dilation, groups), input, weight, bias, self.account)


_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)
