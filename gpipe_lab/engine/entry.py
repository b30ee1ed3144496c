"""Where the graph of a stage begins: its inputs, and the gradients that come back to them."""

from __future__ import annotations

from typing import Any

import torch

from .tree import Tree, flatten, tensors, unflatten


class _Entry(torch.autograd.Function):
    """Where a stage's graph begins: its input as tensors of the graph, its gradient caught on the way out.

    The graph does not keep the input alive unless an operation saves it, and a first layer may modify it
    in place, which autograd forbids for leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, entry: Entry, inputs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(t.data for t in inputs)  # .data: an alias that autograd does not take for a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.entry.gradients = list(gradients)
        return None, None, None


class Entry:
    """The gradients of those input tensors that need one; None where the backward comes to none."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._like = [(t.shape, t.dtype, t.device) for t in inputs]
        self.gradients: list[torch.Tensor | None] = [None] * len(inputs)

    def filled(self) -> list[torch.Tensor | None]:
        """With zeros for None: a micro-batch whose loss does not count gives gradients, all of them zero."""
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(self.gradients, self._like, strict=True)
        ]


def enter(inputs: Tree, flags: list[bool], anchor: torch.Tensor) -> tuple[Tree, Entry | None]:
    """A stage's inputs as the start of a graph, where `flags` says that they need a gradient.

    anchor: any tensor that requires a gradient; without one no graph would begin.
    """
    leaves, spec = flatten(inputs)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wanted = [i for i, needed in zip(positions, flags, strict=True) if needed]
    if not wanted:
        return inputs, None
    entry = Entry([leaves[i] for i in wanted])
    entered = _Entry.apply(anchor, entry, [leaves[i] for i in wanted])
    for i, tensor in zip(wanted, entered, strict=True):
        leaves[i] = tensor
    return unflatten(leaves, spec), entry


def tell_of_changes(inputs: Tree, entered: Tree, versions: list[int]) -> None:
    """Where a layer modified a stage's input in place, let those know who saved it on the way here.

    Within a graph autograd sees to that; a stage on the same rank that made the input has another graph.
    """
    for original, alias, version in zip(tensors(inputs), tensors(entered), versions, strict=True):
        if alias is not original and alias._version != version:
            torch.autograd.graph.increment_version(original)
