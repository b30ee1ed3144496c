"""The forward, backward and recompute of one stage, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..plan.errors import InputError, require
from .batch import Tree, flatten, map_tensors, tensors, unflatten
from .device import Device
from .layer_state import (
    LayerState,
    RunningStatistics,
    SharedState,
    apart_from_state,
    keepers,
    layer_seed,
)
from .ledger import Ledger
from .weight_gradients import SplitProducts, WeightGradients, in_product, weights_of_products


class _GraphInputs(torch.autograd.Function):
    """A stage's input as tensors of its graph, whose gradients are caught on the way out.

    The graph does not keep the input alive unless an operation saves it, and a first layer may modify it
    in place, which autograd forbids for leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, caught: list[torch.Tensor | None], inputs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(t.data for t in inputs)  # .data: an alias that autograd does not take for a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.caught[:] = gradients
        return None, None, None


def graph_inputs(
    inputs: Tree, flags: list[bool], anchor: torch.Tensor
) -> tuple[Tree, list[torch.Tensor | None]]:
    """A stage's inputs as the start of a graph, where `flags` says that they need a gradient.

    With them a list that the backward fills with the gradients of these, None where it comes to none.
    anchor: any tensor that requires a gradient; without one no graph would begin.
    """
    leaves, spec = flatten(inputs)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wanted = [i for i, needed in zip(positions, flags, strict=True) if needed]
    caught: list[torch.Tensor | None] = [None] * len(wanted)
    if not wanted:
        return inputs, caught
    entered = _GraphInputs.apply(anchor, caught, [leaves[i] for i in wanted])
    for i, tensor in zip(wanted, entered, strict=True):
        leaves[i] = tensor
    return unflatten(leaves, spec), caught


def note_changes(inputs: Tree, aliases: Tree, versions: list[int]) -> None:
    """Where a layer modified a stage's input in place, let those know who saved it on the way here.

    Within a graph autograd sees to that; a stage on the same rank that made the input has another graph.
    """
    for original, alias, version in zip(tensors(inputs), tensors(aliases), versions, strict=True):
        if alias is not original and alias._version != version:
            torch.autograd.graph.increment_version(original)


@dataclass(frozen=True)
class Graph:
    """What one segment's backward starts from and ends at.

    roots pairs gradient edges, not tensors, with the index of the output gradient each takes: an edge
    does not keep its tensor's memory. A loss stands in place of that index as its own dtype.
    """

    roots: tuple[tuple[Any, int | torch.dtype], ...]
    input_gradients: list[torch.Tensor | None]  # of the inputs that need one, once the backward has run


@dataclass(frozen=True)
class StepContext:
    """What a forward depends on besides its input."""

    seed: int = 0
    step: int = 0
    training: bool = True
    gradients: bool = True
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Objective:
    """The loss of one micro-batch: its target, and what its loss is multiplied by for the backward."""

    loss_fn: Callable[[Any, Any], torch.Tensor]
    target: Tree
    scale: float


@dataclass
class Held:
    """What a stage keeps of a micro-batch between its forward and its backward.

    segments has the positions of the layers of each segment: one segment unless checkpointing cuts more.
    boundaries are the kept inputs of segments, with what the ledger is to release; states what layers
    kept before the segment's forward, where that has changed it.
    """

    step: StepContext
    objective: Objective | None
    needs_gradient: list[bool]
    segments: Sequence[range]
    weights: WeightGradients | None
    graphs: dict[int, Graph] = field(default_factory=dict)
    boundaries: dict[int, tuple[Tree, list[int]]] = field(default_factory=dict)
    states: dict[int, LayerState] = field(default_factory=dict)
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # of the segment that ran last


@dataclass(frozen=True)
class StageOutput:
    """A stage's result: the tensors that go on, which of them need a gradient, and the loss at the end."""

    tree: Tree
    needs_gradient: list[bool]
    loss: torch.Tensor | None = None


class Stage:
    """Consecutive layers of a model on one device.

    `first_layer` counts over the whole model; with it random numbers are keyed. A stage knows nothing of
    ranks, messages or schedules: it is given inputs and gradients and gives outputs and gradients.
    """

    def __init__(
        self, index: int, layers: Sequence[nn.Module], first_layer: int, device: Device, ledger: Ledger
    ) -> None:
        self.index = index
        self.layers = nn.ModuleList(layers).to(device.torch_device)
        self._in_order = list(self.layers)  # a ModuleList takes its time to find one
        self._keepers = [keepers(layer) for layer in layers]
        self.first_layer = first_layer
        self.device = device
        self.ledger = ledger
        self.statistics = RunningStatistics(self.layers)
        self.shared_state = SharedState(self.layers, self.statistics)
        self._trains = {module: module.training for module in self.layers.modules()}  # as they were given
        self.unsplit: set[torch.Tensor] = set()  # weights that a split backward did not leave to its W
        self._products = weights_of_products(self.layers)
        self._in_product = in_product(self._products, ledger)
        self._held: dict[int, Held] = {}
        self._has_trained = self._trains_any()
        self._anchor = torch.empty(0, requires_grad=True, device=device.torch_device)
        ledger.hold("parameters", self.layers.parameters())
        self._buffers: list[torch.Tensor] = []
        self._buffer_keys: list[int] = []
        self._count_buffers()

    def forward(
        self,
        microbatch: int,
        inputs: Tree,
        needs_gradient: list[bool],
        step: StepContext,
        *,
        objective: Objective | None = None,
        segments: Sequence[range] | None = None,
        defer_weights: bool = False,
    ) -> StageOutput:
        """Run a micro-batch forward.

        needs_gradient has one flag for each tensor of `inputs`. With `segments` only each segment's input
        is kept, to be recomputed from, and the loss comes with that; without, everything the backward needs.
        With `defer_weights` the backward leaves to `backward_weight` what only gradients of weights need.
        """
        self.statistics.begin_microbatch()
        if not step.gradients:
            with torch.no_grad():
                output = self._run(range(len(self.layers)), microbatch, inputs, step)
                return self._finish(output, [False] * len(tensors(output)), objective, step)
        weights = WeightGradients(self.ledger, deferred=True) if defer_weights else self._in_product
        whole = [range(len(self.layers))]
        held = Held(step, objective, needs_gradient, segments or whole, weights)
        self._held[microbatch] = held
        if segments is None:
            return self._with_graph(microbatch, 0, inputs, needs_gradient, "saved")
        with torch.no_grad():
            value = inputs
            for segment, layers in enumerate(segments):
                held.boundaries[segment] = value, self.ledger.hold("boundary", tensors(value))
                shielded = map_tensors(torch.clone, value)  # a layer that works in place must not reach it
                state = held.states[segment] = LayerState(self._stateful(layers))
                value = self._run(layers, microbatch, shielded, step)
                state.keep_changes()
        return StageOutput(value, self._flags(value, needs_gradient))

    def recompute(self, microbatch: int, segment: int) -> torch.Tensor | None:
        """Run one segment forward again from its kept input, this time saving what its backward needs.

        Returns the loss, at the end of the last stage.
        """
        held = self._held[microbatch]
        inputs, _ = held.boundaries[segment]
        flags = held.needs_gradient if segment == 0 else self._flags(inputs, held.needs_gradient)
        self.statistics.recomputing = True
        with held.states.pop(segment).in_place_of_now():
            output = self._with_graph(microbatch, segment, inputs, flags, "recomputed")
        self.statistics.recomputing = False
        return output.loss

    def backward(
        self, microbatch: int, segment: int = 0, gradients: list[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor | None]:
        """Run one segment's backward; gradients of weights accumulate in `.grad`.

        gradients has one entry per output tensor that needs one, for the segment that runs first; the
        others go on from there, and the last stage starts from its loss. Returns the gradients of the
        input tensors that need one. A gradient is None, there and here, where no differentiable way leads
        from the tensor to the loss, or the loss does not count: whatever depends on it alone then has none.
        """
        held = self._held[microbatch]
        graph = held.graphs.pop(segment)
        incoming = held.gradients if gradients is None else gradients
        edges, given = [], []
        for edge, takes in graph.roots:
            if isinstance(takes, torch.dtype):
                assert held.objective is not None
                edges.append(edge)
                given.append(torch.full((), held.objective.scale, dtype=takes, device=self._anchor.device))
            elif incoming and (gradient := incoming[takes]) is not None:  # [] from a loss that does not count
                edges.append(edge)
                given.append(gradient)
        weights = held.weights
        is_split = weights is not None and weights.deferred
        without = [w for w in self._products if w.grad is None] if is_split else []
        if edges:
            roots = [edge.node for edge in edges]
            with nullcontext() if weights is None else weights.collecting(roots):
                torch.autograd.backward(edges, given)
        if weights is not None and is_split:
            self.unsplit |= {w for w in without if w.grad is not None} - weights.weights()
        held.gradients = graph.input_gradients
        _, keys = held.boundaries.pop(segment, (None, []))
        self.ledger.release("boundary", keys)
        if segment == 0 and not is_split:
            del self._held[microbatch]
        return held.gradients

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of weights that `backward` left, and let the micro-batch go."""
        weights = self._held.pop(microbatch).weights
        assert weights is not None
        weights.flush()

    def begin(self, *, training: bool) -> None:
        """Start a step."""
        self._held.clear()
        self._has_trained = self._trains_any()
        self.unsplit.clear()
        self._count_buffers()
        self._keepers = [keepers(layer) for layer in self._in_order]
        self._before = LayerState(module for modules in self._keepers for module in modules)
        for module, trains in self._trains.items():
            module.training = training and trains
        if training:
            self.statistics.begin()

    def abandon(self) -> None:
        """Let go of a step that was given up; what layers keep is as it was before it."""
        self._held.clear()
        self._before.restore()
        self.statistics.abandon()

    def end(self) -> None:
        """Finish a step: batch norm's running statistics move once."""
        self.statistics.end()

    def _count_buffers(self) -> None:
        """Hold them in the ledger, and alive: one that a layer replaces leaves its address to no other."""
        self.ledger.release("buffers", self._buffer_keys)
        self._buffers = list(self.layers.buffers())
        self._buffer_keys = self.ledger.hold("buffers", self._buffers)

    def _trains_any(self) -> bool:
        """Whether a parameter here is trained: looked up once a step, since it takes a while."""
        return any(p.requires_grad for p in self.layers.parameters())

    def _with_graph(
        self, microbatch: int, segment: int, inputs: Tree, flags: list[bool], category: str
    ) -> StageOutput:
        held = self._held[microbatch]
        objective = held.objective if segment == len(held.segments) - 1 else None
        splitting = nullcontext() if held.weights is None else SplitProducts(held.weights)
        with torch.enable_grad(), self.ledger.saving(category), splitting:
            aliases, input_gradients = graph_inputs(inputs, flags, self._anchor)
            versions = [t._version for t in tensors(aliases)]
            output = self._run(held.segments[segment], microbatch, aliases, held.step)
            result = self._finish(output, self._flags(output, flags), objective, held.step)
        note_changes(inputs, aliases, versions)
        held.graphs[segment] = Graph(_roots(result), input_gradients)
        loss = None if result.loss is None else result.loss.detach()
        return StageOutput(map_tensors(torch.Tensor.detach, output), result.needs_gradient, loss)

    def _stateful(self, layers: range) -> Iterator[nn.Module]:
        """The modules of these layers whose state a forward may change; batch norm's is seen to apart."""
        for position in layers:
            yield from (m for m in self._in_order[position].modules() if not self.statistics.watches(m))

    def _run(self, layers: range, microbatch: int, value: Tree, step: StepContext) -> Tree:
        with self._numerics(step):
            for position in layers:
                self.device.seed(layer_seed(step.seed, step.step, self.first_layer + position, microbatch))
                value = self._layer_output(position, value)
        return value

    def _layer_output(self, position: int, value: Tree) -> Tree:
        try:
            output = self._in_order[position](value)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise InputError(
                "a layer that is trained differentiates by torch.autograd: torch.func's grad, vjp, jacrev "
                "and hessian do not work where saved tensors are counted",
                got=str(error),
                where=f"layer {self.first_layer + position}",
                remedy="torch.autograd.grad(y.sum(), x, create_graph=True), or torch.func.jvp or jacfwd",
            ) from error
        return apart_from_state(output, self._keepers[position]) if self._keepers[position] else output

    def _numerics(self, step: StepContext) -> Any:
        """Autocast, entered anew for every operation: it would hold its copies of weights until left."""
        if step.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.torch_device.type, dtype=step.autocast)

    def _finish(
        self, output: Tree, flags: list[bool], objective: Objective | None, step: StepContext
    ) -> StageOutput:
        if objective is None or objective.scale == 0.0:
            return StageOutput(output, flags)
        with self._numerics(step):
            loss = objective.loss_fn(output, objective.target)
        require(
            isinstance(loss, torch.Tensor) and loss.dim() == 0,
            "a loss is one number, a tensor of shape ()",
            got=tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__,
            where="loss_fn",
            remedy="return the mean over the rows",
        )
        require(
            loss.requires_grad or not (torch.is_grad_enabled() and any(flags)),
            "a loss is computed from the model's output, so that it has a gradient",
            got="a loss without one",
            where="loss_fn",
            remedy="leave out detach(), item() and torch.no_grad()",
        )
        return StageOutput(output, flags, loss)

    def _flags(self, tree: Tree, input_flags: list[bool]) -> list[bool]:
        """Which tensors of a result get a gradient: the same answer with and without checkpointing.

        A floating-point tensor does if anything before it in the pipeline trains.
        """
        trains = self._has_trained or any(input_flags)
        return [trains and (t.is_floating_point() or t.is_complex()) for t in tensors(tree)]


def _roots(result: StageOutput) -> tuple[tuple[Any, int | torch.dtype], ...]:
    edge = torch.autograd.graph.get_gradient_edge
    if result.loss is not None:
        return ((edge(result.loss), result.loss.dtype),) if result.loss.requires_grad else ()
    flagged = [t for t, needed in zip(tensors(result.tree), result.needs_gradient, strict=True) if needed]
    return tuple((edge(t), index) for index, t in enumerate(flagged) if t.requires_grad)
