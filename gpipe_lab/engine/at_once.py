"""Gradients of large weights, added up within the product they come from.

Autograd writes dL/dW of every micro-batch to memory of its own and then adds it to the sum. For a weight that
no cache holds that takes about as long as the product; here the product starts from the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .products import LINEAR, WeightPart, is_plain, product

LARGE = 2**18  # elements of a weight; with fewer, what this costs in Python outweighs what it saves


class AtOnce:
    """Sees to the large linear layers among `layers`, for backwards that are not split."""

    def __init__(self, layers: nn.Module) -> None:
        self.is_open = False
        self._records = False
        for layer in layers.modules():
            if type(layer) is nn.Linear and layer.weight.numel() >= LARGE:
                layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For the stage's forward."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the stage's backward. What runs forward again in it has to save what it saved before."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def owe(self, part: WeightPart) -> None:
        part.add()

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        is_cast = torch.is_autocast_enabled(weight.device.type)  # then a smaller input is saved
        if is_cast or not (self._records or self.is_open) or not is_plain(weight):
            return F.linear(x, weight, bias)
        return product(LINEAR, x, weight, bias, self if self._records else None)
