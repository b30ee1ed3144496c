"""Products of a model's weights whose backward keeps the weight's part apart.

For y = W·x that part is dL/dW = g·xᵀ. In the stage's own backward it is left to an account; in any other, as
when a layer differentiates by itself, it is given to whoever asks, and not computed where nobody does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .ledger import require_unchanged


class Rule(Protocol):
    """How a product is computed, and the parts of its backward."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def for_input(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def for_weight(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def for_bias(self, gradient: torch.Tensor) -> torch.Tensor: ...

    def factors(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The matrices whose product is the gradient of the weight, where it is one."""


class Linear:
    """F.linear: (..., in) times the transpose of (out, in)."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def for_input(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient @ weight.to(gradient.dtype)

    def for_weight(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        left, right = self.factors(gradient, x)
        return left @ right

    def for_bias(self, gradient: torch.Tensor) -> torch.Tensor:
        return _as_rows(gradient).sum(0)

    def factors(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _as_rows(gradient).t(), _as_rows(x).to(gradient.dtype)


LINEAR = Linear()


@dataclass(frozen=True)
class Convolution:
    """torch.convolution, not transposed."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.convolution(x, weight, bias, *self._geometry)

    def for_input(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._backward(gradient, x, weight, [True, False, False])[0]

    def for_weight(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._backward(gradient, x, weight, [False, True, False])[1]

    def for_bias(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.transpose(0, 1).flatten(1).sum(1)

    def factors(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        return None

    def _backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> tuple[Any, ...]:
        x, weight = x.to(gradient.dtype), weight.to(gradient.dtype)
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *self._geometry, mask)


class Account(Protocol):
    """Where the weights' parts are left while it is open: while the backward is one that adds them up."""

    @property
    def is_open(self) -> bool: ...

    def owe(self, part: WeightPart) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The weight's part of one product's backward, still to be computed."""

    rule: Rule
    gradient: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.rule.for_weight(self.gradient, self.x, self.weight)

    def add(self) -> None:
        """Add it to the weight's `.grad`: within the product, which then needs no room of its own."""
        with torch.no_grad():
            total, factors = self.weight.grad, self.rule.factors(self.gradient, self.x)
            if total is None:
                self.weight.grad = self.compute().to(self.weight.dtype)
            elif factors is None or total.dtype is not self.gradient.dtype:
                total.add_(self.compute())
            else:
                torch.addmm(total, *factors, out=total)


def product(
    rule: Rule, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, account: Account | None
) -> torch.Tensor:
    """The product of what `is_plain`, the weight's part left to `account`.

    Without an account it is autograd's as ever, but what is saved for the backward is the same.
    """
    return _Product.apply(rule, account, x, weight, bias)


def is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of these is as autograd has it: of tensors, and by a weight of the model.

    A computed weight's gradient has further to go, and a hook may change it (one on the node that accumulates
    it cannot be seen, and is called with None). Inside vmap, torch.func.grad and torch.compile autograd works
    in other ways.
    """
    return (
        weight.requires_grad
        and weight.is_leaf
        and weight.is_floating_point()
        and weight.numel() > 0
        and type(weight) in _PLAIN
        and type(x) in _PLAIN
        and not x.is_nested
        and not _is_hooked(weight)
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_hooked(weight: torch.Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: Rule,
        account: Account | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.rule, ctx.account = rule, account
        ctx.weight, ctx.version = weight, weight._version  # the weight, not a copy of it
        ctx.save_for_backward(x)
        return rule.output(x, weight, bias).data  # no view, which the next layer might not modify

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rule, account, weight, (x,) = ctx.rule, ctx.account, ctx.weight, ctx.saved_tensors
        _, _, for_input, _, for_bias = ctx.needs_input_grad
        if for_input:
            require_unchanged(weight, ctx.version)
        part = WeightPart(rule, gradient, x, weight)
        with (
            torch._C.DisableTorchFunction()
        ):  # these are no layer's, and to pass them through a mode takes time
            of_input = rule.for_input(gradient, x, weight) if for_input else None
            of_bias = rule.for_bias(gradient) if for_bias else None
            if account is None or not account.is_open or _is_hooked(weight):
                return None, None, of_input, part.compute() if _is_wanted(weight) else None, of_bias
            account.owe(part)
            return None, None, of_input, None, of_bias


def _is_wanted(weight: torch.Tensor) -> bool:
    """Whether the backward that is running goes on to this leaf."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # how torch answers for a leaf that autograd.grad has been asked about
        return True


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
