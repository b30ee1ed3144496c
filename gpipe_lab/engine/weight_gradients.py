"""Gradients of weights: added up within their products, or left for W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .ledger import Ledger, require_unchanged


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
