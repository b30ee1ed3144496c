"""Products of a model's weights whose backward keeps the weight's part apart.

For y = W·x that part is dL/dW = g·xᵀ. Two nodes take it out of autograd's hands: a `_Product`, whose
backward gives dL/dx and notes what dL/dW is made of, and ahead of it a `_Sink` that the weight comes
through. Only a backward that goes on to the weight reaches the sink, so a layer that differentiates by
itself with regard to its input leaves nothing behind.
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


@dataclass(slots=True)
class _Use:
    """One use of a weight; `part` is there from the product's backward until the sink's."""

    rule: Rule
    weight: torch.Tensor
    account: Account | None
    version: int
    part: WeightPart | None = None


def product(
    rule: Rule, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, account: Account | None
) -> torch.Tensor:
    """The product of what `is_plain`, the weight's part left to `account`.

    Without an account it is autograd's as ever, but what is saved for the backward is the same.
    """
    use = _Use(rule, weight, account, weight._version)
    return _Product.apply(use, x, weight if account is None else _Sink.apply(use, weight), bias)


def is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of these is as autograd has it: of tensors, and by a weight of the model.

    A computed weight's gradient has further to go, and a hook may change it. Inside vmap, torch.func.grad and
    torch.compile autograd works in other ways.
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


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: _Use, weight: torch.Tensor) -> torch.Tensor:
        ctx.use = use
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, blank: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        use: _Use = ctx.use
        part, use.part = use.part, None
        assert part is not None and use.account is not None, "the product's backward comes first"
        if not use.account.is_open or _is_hooked(use.weight):
            return None, part.compute()
        use.account.owe(part)
        return None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, use: _Use, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.use = use
        ctx.save_for_backward(x)
        return use.rule.output(x, weight, bias).data  # no view, which the next layer might not modify

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        use: _Use = ctx.use
        (x,), weight = ctx.saved_tensors, use.weight
        _, for_input, _, for_bias = ctx.needs_input_grad
        if for_input:
            require_unchanged(weight, use.version)
        part = WeightPart(use.rule, gradient, x, weight)
        if use.account is None:
            of_weight = part.compute()
        else:
            use.part, of_weight = part, _blank(weight)
        return (
            None,
            use.rule.for_input(gradient, x, weight) if for_input else None,
            of_weight,
            use.rule.for_bias(gradient) if for_bias else None,
        )


def _blank(weight: torch.Tensor) -> torch.Tensor:
    """What goes to the sink in place of a gradient: of its shape, and of no size."""
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
