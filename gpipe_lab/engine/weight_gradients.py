"""Gradients of weights apart from those of inputs: deferred to W, or accumulated within the product.

A product is what a linear layer or a convolution makes of an input and a weight. Its backward has two parts,
the gradient of the input (with the bias) and that of the weight. Here the second is a value: a split backward
(zero bubble, arXiv 2401.10241) keeps it for W, and a large matrix adds it to `.grad` in one addmm, which
needs neither a matrix for the part nor a second pass over the memory of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .ledger import Ledger, require_unchanged

LARGE = 2**18  # elements of a weight; with fewer, what a product costs in Python outweighs what it saves


class Linear:
    """F.linear: (..., in) times the transpose of (out, in)."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def input_part(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, needs: list[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of the input and of the bias, each if needed."""
        of_input = gradient @ weight.to(gradient.dtype) if needs[0] else None
        return of_input, _as_rows(gradient).sum(0) if needs[1] else None

    def weight_part(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        left, right = self.factors(gradient, x)
        return left @ right

    def factors(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices whose product is the gradient of the weight."""
        return _as_rows(gradient).t(), _as_rows(x)


@dataclass(frozen=True)
class Convolution:
    """F.conv1d, conv2d or conv3d, whichever `function` is."""

    function: Callable[..., torch.Tensor]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_part(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, needs: list[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        of_input, _, of_bias = self._backward(gradient, x, weight, [needs[0], False, needs[1]])
        return of_input, of_bias

    def weight_part(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._backward(gradient, x, weight, [False, True, False])[1]

    def _backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> tuple[Any, ...]:
        geometry = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        backward = torch.ops.aten.convolution_backward
        return backward(gradient, x, weight.to(x.dtype), [weight.shape[0]], *geometry, mask)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The weight's part of one product's backward, still to be computed."""

    product: Linear | Convolution
    gradient: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.product.weight_part(self.gradient, self.x, self.weight)

    def accumulate(self) -> None:
        """Add it to the weight's `.grad`: within the product, where that is one of matrices."""
        with torch.no_grad():
            total = self.weight.grad
            if total is None:
                self.weight.grad = self.compute().to(self.weight.dtype)
            elif isinstance(self.product, Linear) and total.dtype is self.gradient.dtype:
                torch.addmm(total, *self.product.factors(self.gradient, self.x), out=total)
            else:
                total.add_(self.compute())


@dataclass(eq=False)
class WeightGradients:
    """Takes the weights' parts of a stage's own backward, and of none that a layer may run within it.

    deferred: keeps those of one micro-batch until `flush`, in their order; otherwise it takes large matrices
    alone, and accumulates them as they come.
    """

    ledger: Ledger
    deferred: bool
    _parts: list[tuple[WeightPart, list[int]]] = field(default_factory=list)
    _task: int | None = None

    def takes(self, product: type, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether this is a product to take. A part that autocast has cast cannot be added within one."""
        is_large = product is Linear and weight.numel() >= LARGE
        return self.deferred or (is_large and _autocast_dtype(x) is None)

    @property
    def is_open(self) -> bool:
        return self._task is not None and torch._C._current_graph_task_id() == self._task

    def add(self, part: WeightPart) -> None:
        if self.deferred:
            self._parts.append((part, self.ledger.hold("deferred", (part.x, part.gradient))))
        else:
            part.accumulate()

    def weights(self) -> set[torch.Tensor]:
        """The weights whose gradients are deferred."""
        return {part.weight for part, _ in self._parts}

    def flush(self) -> None:
        """Compute what was deferred and add it to the weights' `.grad`."""
        while self._parts:
            part, keys = self._parts.pop(0)
            part.accumulate()
            self.ledger.release("deferred", keys)

    @contextmanager
    def collecting(self, roots: Sequence[Any]) -> Iterator[None]:
        """For the stage's backward, which starts from the nodes `roots`."""
        handles = [node.register_prehook(self._note_task) for node in roots]
        try:
            # What runs forward again in a backward has to save what it saved before.
            with SplitProducts(self, again=True):
                yield
        finally:
            self._task = None
            for handle in handles:
                handle.remove()

    def _note_task(self, gradients: Any) -> None:
        self._task = torch._C._current_graph_task_id()


def in_product(weights: Iterable[torch.Tensor], ledger: Ledger) -> WeightGradients | None:
    """For a stage with these weights; None where none is large, so that its layers run as they are."""
    return WeightGradients(ledger, False) if any(w.numel() >= LARGE for w in weights) else None


def weights_of_products(layers: nn.Module) -> list[nn.Parameter]:
    """The trained weights that enter products: no vectors, which take none, and no tables to look up in."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    owners = [module for module in layers.modules() if not isinstance(module, tables)]
    found = [p for module in owners for p in module.parameters(recurse=False)]
    return [p for p in found if p.requires_grad and p.dim() > 1]


class SplitProducts(TorchFunctionMode):
    """A context in which linear layers and convolutions leave their weights' part to `gradients`.

    again: they run within a backward, for somebody else's sake, and leave nothing.
    """

    def __init__(self, gradients: WeightGradients, *, again: bool = False) -> None:
        super().__init__()
        self.gradients = gradients
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
        if weight.dim() != 2 or not self._takes(Linear, input, weight):
            return func(input, weight, bias)
        return self._product(_LINEAR, input, weight, bias)

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
        is_batch = not isinstance(padding, str) and weight.dim() == input.dim() == dims + 2
        if not is_batch or not self._takes(Convolution, input, weight):
            return func(input, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = (_each(value, dims) for value in (stride, padding, dilation))
        product = Convolution(func, stride, padding, dilation, groups)
        return self._product(product, input, weight, bias)

    def _takes(self, product: type, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return self.gradients.takes(product, x, weight) and _is_plain(x, weight)

    def _product(
        self, product: Linear | Convolution, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Without `gradients` the product is autograd's as ever, but saves the same for the backward."""
        dtype = _autocast_dtype(x)
        if dtype is not None and _is_cast(x):
            x = x.to(dtype)  # by autograd: what is saved is the smaller copy
        return _Product.apply(product, None if self.again else self.gradients, dtype, x, weight, bias)


_LINEAR = Linear()
_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast, where it is on, casts a product's arguments to."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast casts this argument of a product: double precision it leaves alone."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product of these is as autograd has it: of tensors, and by a weight of the model.

    A computed weight's gradient has further to go, and a hook may change it (one on the node that accumulates
    it cannot be seen, and is called with None). Inside vmap, torch.func.grad, forward-mode differentiation
    and torch.compile autograd works in other ways.
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
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _is_hooked(weight: torch.Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Linear | Convolution,
        gradients: WeightGradients | None,
        dtype: torch.dtype | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.product, ctx.gradients = product, gradients
        ctx.weight, ctx.version = weight, weight._version  # the weight, not a copy of it
        ctx.save_for_backward(x)
        if dtype is not None:
            # Autocast would keep its cast of the weight for the next use, and here that has no gradient.
            with torch.autocast(x.device.type, enabled=False):
                given = [t.to(dtype) if t is not None and _is_cast(t) else t for t in (weight, bias)]
                return product.output(x, *given).data  # type: ignore[arg-type]
        return product.output(x, weight, bias).data  # no view, which the next layer might not modify

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, weight, (x,) = ctx.gradients, ctx.weight, ctx.saved_tensors
        *_, of_input, _, of_bias = ctx.needs_input_grad
        if of_input:
            require_unchanged(weight, ctx.version)
        part = WeightPart(ctx.product, gradient, x, weight)
        needs = [of_input, of_bias]
        with torch._C.DisableTorchFunction():  # no layer's products, and a mode would take time
            parts = ctx.product.input_part(gradient, x, weight, needs=needs) if any(needs) else (None, None)
            if gradients is None or not gradients.is_open or _is_hooked(weight):
                return None, None, None, parts[0], part.compute() if _is_wanted(weight) else None, parts[1]
            gradients.add(part)
            return None, None, None, parts[0], None, parts[1]


def _is_wanted(weight: torch.Tensor) -> bool:
    """Whether the backward that is running goes on to this leaf."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # how torch answers for a leaf that autograd.grad has been asked about
        return True
