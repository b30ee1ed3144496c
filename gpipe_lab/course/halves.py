"""How much arithmetic the two halves of a backward are: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn


class Halves(NamedTuple):
    """Floating-point operations of F, of I (the gradient of the input) and of W (of the weights)."""

    forward: int
    backward_input: int
    backward_weight: int


def count_halves(layer: nn.Module, x: torch.Tensor) -> Halves:
    """Count them as torch runs `layer` on x: once as it is, once with its weights held fixed.

    Matrix products are counted, those of attention too, for which the plain kernel is taken: the counter
    does not see into the fused one, which does the same products.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fixed = torch.func.functional_call
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    x = x.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        forward, output = _counted(lambda: layer(x))
        both, _ = _counted(lambda: torch.autograd.grad(output.sum(), [x, *layer.parameters()]))
        output = fixed(layer, weights, (x,))
        inputs, _ = _counted(lambda: torch.autograd.grad(output.sum(), x))
    return Halves(forward, inputs, both - inputs)


def _counted(work: Callable[[], Any]) -> tuple[int, Any]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        result = work()
    return counter.get_total_flops(), result
