"""The gradients of one rank's weights over a step, and over steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from ..plan.errors import InputError, require
from .ledger import Ledger
from .replicas import Replicas


class GradientBook:
    """Lets each step accumulate apart and adds it to `.grad` once.

    Two steps without zeroing so give exactly twice one, whatever the number of micro-batches. `borrowed`
    has the ids of parameters that another rank owns: they are neither reported nor counted in a norm here.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], ledger: Ledger, *, borrowed: Collection[int] = ()
    ) -> None:
        self.parameters = parameters
        self.ledger = ledger
        self._borrowed = borrowed
        self._before: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}  # in float32, of parameters with fewer bits
        self._keys: dict[str, list[int]] = {}
        self._keys_before: dict[str, list[int]] = {}
        self._awaited: dict[str, nn.Parameter] = {}  # those whose gradients a backward is to take in

    def begin(self) -> None:
        """Set aside what earlier steps have accumulated."""
        for name, parameter in self.parameters.items():
            require(
                parameter.dtype is not torch.float16 or not parameter.requires_grad,
                "weights are trained in bfloat16 or more: float16 would need its gradients scaled",
                got=f"{name} in float16",
                where="step",
                remedy="model.bfloat16()",
            )
            if parameter.grad is not None:
                self._before[name] = parameter.grad
                self._keys_before[name] = self._keys.pop(name, [])
                parameter.grad = None
        self._awaited = dict(self.parameters)

    def take_in(self) -> None:
        """After a backward: gradients of few bits go into float32 sums, and new ones into the ledger."""
        for name, parameter in list(self._awaited.items()):
            if parameter.grad is None:
                continue
            held = parameter.grad
            if held.layout is not torch.strided:
                raise InputError(
                    "gradients are dense tensors",
                    got=f"a gradient of layout {held.layout}",
                    where=name,
                    remedy="nn.Embedding(..., sparse=False)",
                )
            if parameter.dtype is torch.bfloat16:
                held = self._step_sum(name)
                held.add_(parameter.grad)
                parameter.grad = None
            else:
                del self._awaited[name]  # later micro-batches add to the same tensor
            if name not in self._keys:
                self._keys[name] = self.ledger.hold("gradients", [held])

    def sum_over(self, replicas: Replicas) -> int:
        """Add up this step's gradients over replicas, those of few bits in float32; the bytes summed.

        A parameter that has a gradient on one replica counts as zero on those where it has none.
        """
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        found = torch.tensor([name in self._sums or p.grad is not None for name, p in trained.items()])
        counts = found.to(torch.int32)
        replicas.sum([counts])
        wanted = [name for name, count in zip(trained, counts.tolist(), strict=True) if count]
        return replicas.sum([self._step_sum(name) for name in wanted])

    def _step_sum(self, name: str) -> torch.Tensor:
        """The sum over this step's micro-batches, to be changed in place; zeros where there is none yet."""
        parameter = self.parameters[name]
        if parameter.dtype is torch.bfloat16:
            return self._sums.setdefault(name, torch.zeros_like(parameter, dtype=torch.float32))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def finish_sums(self) -> None:
        """After the last backward: `.grad` is the sum over all micro-batches, rounded once."""
        for name, total in self._sums.items():
            self.ledger.release("gradients", self._keys.pop(name, []))
            self.parameters[name].grad = total.to(self.parameters[name].dtype)
        self._sums.clear()
        self._count()

    def _count(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name not in self._keys:
                self._keys[name] = self.ledger.hold("gradients", [parameter.grad])

    def end(self) -> None:
        """Add this step's gradients to the earlier ones."""
        for name, earlier in self._before.items():
            parameter = self.parameters[name]
            self.ledger.release("gradients", self._keys.pop(name, []) + self._keys_before.pop(name))
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._before.clear()
        self._count()

    def zero(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for keys in self._keys.values():
            self.ledger.release("gradients", keys)
        self._keys.clear()

    def restore(self, saved: Mapping[str, torch.Tensor | None]) -> None:
        """Start from gradients that an earlier process has accumulated."""
        self.zero()
        for name, gradient in saved.items():
            if gradient is not None:
                self.parameters[name].grad = gradient.to(self.parameters[name].device)
        self._count()

    def squared_norm(self) -> float:
        """The sum of squares of this rank's gradients, in float64."""
        return sum(_real(gradient).double().square().sum().item() for _, gradient in self._owned())

    def scale(self, factor: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def copies(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name, on the CPU; a parameter without one is left out."""
        return {name: gradient.detach().cpu().clone() for name, gradient in self._owned()}

    def _owned(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and id(parameter) not in self._borrowed:
                yield name, parameter.grad


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
