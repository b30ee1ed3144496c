"""The part of a pipeline that lives on one rank: its stages, their gradients and their optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plan.errors import InputError, require
from ..plan.ops import Kind, Op
from ..plan.trace import COMM_LANE, COMPUTE_LANE, Event
from .executor import RankResult, Step, StepJob
from .gradients import GradientAccumulator, Tie, TiedWeights, first_name
from .layer_state import LayerState, init_seed, named_generators
from .ledger import Ledger
from .loss import LossFn
from .mailbox import Agreements, Board
from .messages import BoundaryChanged, NothingCame
from .shared_objects import SharedObjects
from .stage import Stage
from .transport import Transport
from .updates import MakeOptimizer, MakeScheduler, Updates

Layer = nn.Module | Callable[[], nn.Module]  # a factory builds its layer where it is to live


@dataclass(frozen=True)
class StageSpec:
    """Consecutive layers of a model: `names` as in the whole model, `first_layer` counted over it."""

    index: int
    first_layer: int
    names: tuple[str, ...]
    layers: tuple[Layer, ...]
    shared: tuple[Any, ...] = ()  # what layers here share with other stages, weights apart


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a rank builds its part from."""

    stages: tuple[StageSpec, ...]
    loss_fn: LossFn | None = None
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    scheduler_per: str = "step"  # or "epoch": it moves when it is told to
    max_norm: float | None = None
    ties: tuple[Tie, ...] = ()
    replica: int = 0
    num_replicas: int = 1
    seed: int = 0
    limit_bytes: int | None = None


class StepRefused(Exception):
    """A step broke a rule on some rank: `error`, in operation `op`, where it was this one. Weights stay."""

    def __init__(self, error: InputError | None, op: Op | None) -> None:
        super().__init__(str(error) if error else "a rule was broken on another rank, which names it")
        self.error = error
        self.op = op


class RankPipeline:
    """Stages with weights that stay from step to step.

    Replicas hold the same weights; the first alone reports them and counts in a norm.
    """

    def __init__(self, spec: PipelineSpec, board: Board, transport: Transport) -> None:
        self.rank = rank = transport.rank
        self.device = device = transport.device
        self.spec = spec
        self.board = board
        self.ledger = Ledger(rank, limit_bytes=spec.limit_bytes)
        device.limit_memory(spec.limit_bytes)
        self.shared_objects: list[SharedObjects] = []
        self.stages = {s.index: self._build(s) for s in spec.stages}
        self.layers: dict[str, nn.Module] = {}  # by whole-model name
        for stage in spec.stages:
            self.layers |= zip(stage.names, self.stages[stage.index].layers, strict=True)
        self.tied = TiedWeights(spec.ties, rank, self.layers)
        self.tied.broadcast(transport)
        names: dict[nn.Parameter, str] = {}  # each parameter's first
        for name, parameter in self._named(lambda layer: layer.named_parameters()):
            names.setdefault(parameter, name)
        self.parameters = {name: parameter for parameter, name in names.items()}
        copies = set(map(id, self.parameters.values())) if spec.replica > 0 else set()
        self.gradients = GradientAccumulator(
            self.parameters, self.ledger, borrowed=self.tied.borrowed | copies
        )
        self.agreements = Agreements()
        self.loss_fn = (
            spec.loss_fn.to(device.torch_device) if isinstance(spec.loss_fn, nn.Module) else spec.loss_fn
        )
        by_first_name = {self.first_name(name): p for name, p in self.parameters.items()}
        self.updates = Updates(
            by_first_name, spec.optimizer, spec.scheduler, per=spec.scheduler_per, ledger=self.ledger
        )
        self._gradients_are_used = False

    def _build(self, spec: StageSpec) -> Stage:
        layers = []
        for position, layer in enumerate(spec.layers):
            if not isinstance(layer, nn.Module):
                self.device.seed(init_seed(self.spec.seed, spec.first_layer + position))
                built = layer()
                require(
                    isinstance(built, nn.Module),
                    "a layer is an nn.Module, or a function without arguments that builds one",
                    got=type(built).__name__,
                    where=f"layer {spec.names[position]!r}",
                    remedy="lambda: nn.Linear(4, 4)",
                )
                layer = built
            layers.append(layer)
        self.shared_objects.append(SharedObjects(spec.shared, layers))
        return Stage(spec.index, layers, spec.first_layer, self.device, self.ledger)

    def first_name(self, name: str) -> str:
        """The name that stands for a weight: of tied ones the first."""
        return first_name(name, [tie.names for tie in self.spec.ties])

    def _named(self, of: Callable[[nn.Module], Iterable[tuple[str, Any]]]) -> Iterable[tuple[str, Any]]:
        """Everything `of` yields for the layers here, under whole-model names."""
        for prefix, layer in self.layers.items():
            yield from ((f"{prefix}.{name}", value) for name, value in of(layer))

    def step(self, job: StepJob, transport: Transport, *, update: bool) -> tuple[RankResult, float, float]:
        """One training step; the result, the loss of the whole batch and the norm of all gradients.

        With `update` the optimizer steps, and the next step starts from zeroed gradients; without, gradients
        add up over steps. All ranks start together and all know the loss.
        """
        if self._gradients_are_used:
            self.zero_grad()
        result, loss = self.run(job, transport)
        for index, stage in self.stages.items():
            result.unsplit[index] = tuple(n for n, p in self.parameters.items() if p in stage.unsplit)
        self._reduce(transport, result)
        for stage in self.stages.values():
            stage.end()
        self.gradients.end()
        (squared_norm,) = transport.sum([self.gradients.squared_norm()])
        if update:
            result.events.append(self._update(squared_norm**0.5))
        return result, loss, squared_norm**0.5

    def run(self, job: StepJob, transport: Transport) -> tuple[RankResult, float]:
        """A step's operations, begun by all ranks together; the result, and the loss or 0.

        Without gradients that is all of a step. One in which a message turned out unlike the others is taken
        again. Raises `StepRefused`, on all ranks, where one broke a rule: nothing of it is left.
        """
        try:
            for announces_all in (False, True):
                self.agreements.announces_all = announces_all
                step = Step(
                    job,
                    transport,
                    stages=self.stages,
                    loss_fn=self.loss_fn,
                    gradients=self.gradients,
                    agreements=self.agreements,
                    ledger=self.ledger,
                    board=self.board,
                )
                for shared in self.shared_objects:
                    shared.begin()
                with step.refusing():
                    if job.step.gradients:
                        self.gradients.begin()
                transport.barrier()
                result = step.run()
                with step.refusing():
                    for shared in self.shared_objects:
                        shared.check()
                scales = job.scales or (0.0,) * len(job.sizes)
                loss = sum(scales[m] * loss for m, loss in result.losses.items())
                is_unlike = isinstance(step.refusal, BoundaryChanged)
                is_refused = not (step.refusal is None or is_unlike or isinstance(step.refusal, NothingCame))
                loss, num_unlike, num_refused = transport.sum([loss, is_unlike, is_refused])
                if not num_unlike and not num_refused:
                    return result, loss
                step.abandon()
                self.agreements.doubt()
                if num_refused:
                    raise StepRefused(step.refusal if is_refused else None, step.refused_at)
            raise AssertionError("announced messages are as announced")
        finally:
            self.agreements.announces_all = False

    def _reduce(self, transport: Transport, result: RankResult) -> None:
        """Finish this step's gradients: summed over replicas, then over the uses of tied weights.

        In that order every replica sums ties from the same bits, so that copies stay equal for good.
        """
        op = Op(Kind.REDUCE, min(self.stages), 0)
        self.board.mark(op, waits=True)
        start = self.device.stamp()
        if self.spec.num_replicas > 1:
            ranks = range(transport.num_ranks)
            per_replica = transport.num_ranks // self.spec.num_replicas
            groups = [tuple(ranks[first::per_replica]) for first in range(per_replica)]  # of the same stages
            for group in groups:
                transport.open_group(group)
            replicas = groups[self.rank % per_replica]
            trained = [name for name, p in self.parameters.items() if p.requires_grad]
            result.bytes_reduced[replicas] = self.gradients.all_reduce(trained, replicas, transport)
            for stage in self.stages.values():
                stage.shared_state.agree(transport, replicas)
        result.bytes_reduced |= self.tied.all_reduce(self.gradients, transport)
        if result.bytes_reduced:
            started, ended = self.device.times([start, self.device.stamp()])
            result.events.append(Event(self.rank, COMM_LANE, op, started, ended))
        self.board.clear()

    def _update(self, norm: float) -> Event:
        op = Op(Kind.STEP, min(self.stages), 0)
        self.board.mark(op)
        self.ledger.doing = op
        start = self.device.stamp()
        if self.spec.max_norm is not None:
            self.gradients.scale(min(1.0, self.spec.max_norm / (norm + 1e-6)))  # as clip_grad_norm_
        self.updates.step()
        self._gradients_are_used = True
        started, ended = self.device.times([start, self.device.stamp()])
        self.board.clear()
        return Event(self.rank, COMPUTE_LANE, op, started, ended)

    def scheduler_step(self, *metrics: float) -> None:
        """Move the scheduler on by one."""
        self.updates.scheduler_step(*metrics)

    def set_lr(self, lr: float) -> None:
        """Give every group of the optimizer this learning rate."""
        self.updates.set_lr(lr)

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each trained parameter here, by its first name; none from a copy."""
        return self.updates.learning_rates() if self.spec.replica == 0 else {}

    def snapshot(self) -> LayerState:
        """What all layers here have beside their parameters, as it is now."""
        return LayerState(module for layer in self.layers.values() for module in layer.modules())

    def zero_grad(self) -> None:
        self.gradients.zero()
        self._gradients_are_used = False

    def state_dict(self) -> dict[str, Any]:
        """Weights and buffers of the stages here, under whole-model names, on the CPU; none from a copy."""
        if self.spec.replica > 0:
            return {}
        return {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in self.weights().items()
        }

    def weights(self) -> dict[str, Any]:
        """Weights and buffers of the stages here, under whole-model names: the live tensors.

        What a layer's `get_extra_state` gives is among them, and is seldom a tensor.
        """
        return dict(self._named(lambda layer: layer.state_dict().items()))

    def generators(self) -> dict[str, Any]:
        """The random generators that the layers here own, under whole-model names."""
        return dict(self._named(named_generators))

    def pending_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that no update has used yet: live tensors, to which the next step adds."""
        if self._gradients_are_used:
            return {}
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """What `load_state_dict` here has to be given: the shapes of weights and buffers, by name."""
        return {name: shape_of(value) for name, value in self.weights().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the entries that belong to the stages here; raises `RuntimeError` where one is missing."""
        for prefix, layer in self.layers.items():
            start = f"{prefix}."
            layer.load_state_dict({k[len(start) :]: v for k, v in state.items() if k.startswith(start)})


def shape_of(value: Any) -> tuple[int, ...] | None:
    """A tensor's shape; None for what is not a tensor."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
