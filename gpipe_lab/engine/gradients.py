"""The gradients of one rank's weights over a step, and over steps."""

from __future__ import annotations

import torch
from torch import nn

from .ledger import Ledger


class GradientBook:
    """Lets each step accumulate apart and adds it to `.grad` once.

    Two steps without zeroing so give exactly twice one, whatever the number of micro-batches.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], ledger: Ledger) -> None:
        self.parameters = parameters
        self.ledger = ledger
        self._before: dict[str, torch.Tensor] = {}
        self._keys: dict[str, list[int]] = {}

    def begin(self) -> None:
        """Set aside what earlier steps have accumulated."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._before[name] = parameter.grad
                parameter.grad = None

    def count(self) -> None:
        """Tell the ledger of gradients that a backward has created."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name not in self._keys:
                self._keys[name] = self.ledger.hold("gradients", [parameter.grad])

    def end(self) -> None:
        """Add this step's gradients to the earlier ones."""
        for name, earlier in self._before.items():
            parameter = self.parameters[name]
            self.ledger.release("gradients", self._keys.pop(name, []))
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._before.clear()
        self.count()

    def zero(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for keys in self._keys.values():
            self.ledger.release("gradients", keys)
        self._keys.clear()

    def squared_norm(self) -> float:
        """The sum of squares of this rank's gradients, in float64."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return sum(g.double().square().sum().item() for g in gradients)

    def scale(self, factor: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def copies(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name, on the CPU; a parameter without one is left out."""
        return {
            name: parameter.grad.detach().cpu().clone()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
