"""What becomes of a weight's part of the backward: put off until nobody waits, or added up at once.

For y = W·x the backward has two parts: dL/dx = Wᵀ·g, which the previous stage waits for, and dL/dW = g·xᵀ,
which nobody waits for. Inside `WeightsApart` linear layers and convolutions leave the second to an account:

- `Deferred` keeps it until a W asks for it: split backwards (Zero Bubble, arXiv 2401.10241 §2). All else
  (biases, norms, embeddings, a layer that does not go through these functions) gets its gradients in the
  backward, so no work is ever done twice. Where that leaves out matrix products (a function of the user's
  own, a computed weight, a compiled layer), the stage notes the weight and the trace says so.
- `AtOnce` adds a large weight's part to the sum within the product. Autograd writes it to memory of its own
  and then adds it: for a weight that no cache holds that takes about as long as the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .ledger import Ledger
from .products import LINEAR, Convolution, WeightPart, is_plain, product

LARGE = 2**18  # elements of a weight; with fewer, what `AtOnce` costs in Python outweighs what it saves


class Account:
    """Takes the weights' parts of the stage's own backward, and of none that a layer may run within it."""

    _task: int | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and torch._C._current_graph_task_id() == self._task

    def takes(self, func: Any, weight: torch.Tensor) -> bool:
        raise NotImplementedError

    def owe(self, part: WeightPart) -> None:
        raise NotImplementedError

    def recording(self) -> WeightsApart:
        """For the stage's forward."""
        return WeightsApart(self)

    @contextmanager
    def collecting(self, roots: Sequence[Any]) -> Iterator[None]:
        """For the stage's backward, which starts from the nodes `roots`."""
        handles = [node.register_prehook(self._note_task) for node in roots]
        try:
            # What runs forward again in a backward has to save what it saved before.
            with WeightsApart(self, again=True):
                yield
        finally:
            self._task = None
            for handle in handles:
                handle.remove()

    def _note_task(self, gradients: Any) -> None:
        self._task = torch._C._current_graph_task_id()


@dataclass(eq=False)
class Deferred(Account):
    """What one micro-batch still owes to weights, in the order in which it came to be owed."""

    ledger: Ledger
    owed: list[tuple[WeightPart, list[int]]] = field(default_factory=list)

    def takes(self, func: Any, weight: torch.Tensor) -> bool:
        return True

    def owe(self, part: WeightPart) -> None:
        """Put off the weight's part of a product's backward."""
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


class AtOnce(Account):
    """Large weights of linear layers. Autocast is left alone: it saves a smaller input."""

    def takes(self, func: Any, weight: torch.Tensor) -> bool:
        is_cast = torch.is_autocast_enabled(weight.device.type)
        return func is F.linear and weight.numel() >= LARGE and not is_cast

    def owe(self, part: WeightPart) -> None:
        part.add()


def at_once(weights: Sequence[torch.Tensor]) -> AtOnce | None:
    """For a stage with these weights; None where none is large, so that its layers run as they are."""
    return AtOnce() if any(weight.numel() >= LARGE for weight in weights) else None


def weights_of_products(layers: nn.Module) -> list[nn.Parameter]:
    """The trained weights that enter products: no vectors, which take none, and no tables to look up in."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    owners = [module for module in layers.modules() if not isinstance(module, tables)]
    found = [p for module in owners for p in module.parameters(recurse=False)]
    return [p for p in found if p.requires_grad and p.dim() > 1]


class WeightsApart(TorchFunctionMode):
    """A context in which linear layers and convolutions leave their weights' part to `account`.

    again: they run within a backward, for somebody else's sake, and leave nothing.
    """

    def __init__(self, account: Account, *, again: bool = False) -> None:
        super().__init__()
        self.account = account
        self.again = again

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
        if not self._takes(func, input, weight, dims=2):
            return func(input, weight, bias)
        return product(LINEAR, input, weight, bias, None if self.again else self.account)

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
        is_batch = not isinstance(padding, str) and input.dim() == dims + 2
        if not is_batch or not self._takes(func, input, weight, dims=dims + 2):
            return func(input, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = (_each(value, dims) for value in (stride, padding, dilation))
        rule = Convolution(stride, padding, dilation, groups)
        return product(rule, input, weight, bias, None if self.again else self.account)

    def _takes(self, func: Any, x: torch.Tensor, weight: torch.Tensor, *, dims: int) -> bool:
        return is_plain(x, weight) and weight.dim() == dims and self.account.takes(func, weight)


_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)
