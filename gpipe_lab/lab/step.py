"""What a step needs, worked out by the driver before any rank is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from ..engine.batch import Tree, batch_size, microbatch_sizes, signature, split
from ..engine.device import surrounding_autocast
from ..engine.executor import StepJob
from ..engine.gradients import Tie
from ..engine.loss import LossFn, LossRule, read_loss
from ..engine.pace import Pace
from ..engine.rank_pipeline import Layer, PipelineSpec, StageSpec
from ..engine.shared_objects import shared_between
from ..engine.stage import StepContext
from ..plan.errors import InputError, is_count, require, require_count
from ..plan.lowering import lower
from ..plan.partition import uniform
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from ..plan.simulate import Costs


def joined(stages: Sequence[StageSpec], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks gave by parameter name, in the order of the model's layers."""
    position = {name: at for at, name in enumerate(name for stage in stages for name in stage.names)}
    found = {name: value for part in parts for name, value in part.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: position[name.split(".")[0]])}


def parts_of(
    stages: Sequence[StageSpec], stage_to_rank: Sequence[int], state: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """For every rank of a replica the entries of a whole model's state that belong to its stages."""
    prefixes: list[tuple[str, ...]] = [()] * (1 + max(stage_to_rank))
    for stage, rank in zip(stages, stage_to_rank, strict=True):
        prefixes[rank] += tuple(f"{name}." for name in stage.names)
    return [{name: value for name, value in state.items() if name.startswith(here)} for here in prefixes]


Partition = str | Sequence[int]
Ties = Sequence[tuple[str, ...]]


def named_layers(model: Any) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
    """The layers of a model and their names: those of an `nn.Sequential`, or "0", "1", … of a list."""
    is_sequential = isinstance(model, nn.Sequential)
    is_list = isinstance(model, list | tuple | nn.ModuleList) and all(callable(layer) for layer in model)
    has_own_call = is_sequential and (
        type(model).forward is not nn.Sequential.forward
        or model._forward_hooks
        or model._forward_pre_hooks
        or model._backward_hooks
        or model._backward_pre_hooks
    )
    require(
        not has_own_call,
        "an nn.Sequential is its layers one after the other: a forward or hooks of its own would be left out",
        got=f"{type(model).__name__} with a forward or hooks of its own",
        where="model",
        remedy="write what it does besides as a layer, and give nn.Sequential(*layers)",
    )
    require(
        is_sequential or is_list,
        "a model is an nn.Sequential, a list of layers, or a list of functions that each build one",
        got=type(model).__name__,
        where="model",
        remedy="nn.Sequential(*layers)",
    )
    if is_sequential:
        children = dict(model.named_children())
        names, layers = tuple(children), tuple(children.values())
        if len(layers) != len(model):  # the same layer twice has one name
            names, layers = tuple(map(str, range(len(model)))), tuple(model)
    else:
        names, layers = tuple(map(str, range(len(model)))), tuple(model)
    require(len(layers) > 0, "a model has at least one layer", got="no layers", where="model")
    for name, layer in zip(names, layers, strict=True):
        _require_usable(name, layer)
    return names, layers


def _require_usable(name: str, layer: Layer) -> None:
    if isinstance(layer, nn.Module):
        require(
            not any(is_lazy(p) for p in (*layer.parameters(), *layer.buffers())),
            "a layer knows its sizes: the bytes and names of all weights are needed before any input",
            got="a lazy layer that has seen no input",
            where=f"layer {name!r}",
            remedy="model(example_input) once before, or the layer with its sizes",
        )
        require(
            not any(is_parametrized(module) for module in layer.modules()),
            "a layer travels to its worker by pickling, which torch allows for no parametrized module",
            got=f"{type(layer).__name__} with a parametrization, such as weight_norm",
            where=f"layer {name!r}",
            remedy="a function that builds it there: lambda: parametrizations.weight_norm(nn.Linear(4, 4))",
        )
        for own, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            require(
                not tensor.is_meta,
                "a layer's weights have values",
                got=f"{own} on the meta device",
                where=f"layer {name!r}",
                remedy="a function that builds the layer where it is to live: lambda: nn.Linear(4, 4)",
            )
            require(
                not (tensor._backward_hooks or tensor._post_accumulate_grad_hooks),
                "a layer travels to its worker by pickling, which drops the hooks of tensors",
                got=f"{own} with a hook",
                where=f"layer {name!r}",
                remedy="a function that builds the layer and registers the hook there",
            )
        return
    try:
        inspect.signature(layer).bind()
    except TypeError as error:
        raise InputError(
            "a layer is an nn.Module, or a function without arguments that builds one",
            got=f"{getattr(layer, '__name__', layer)!r}: {error}",
            where=f"layer {name!r}",
            remedy="nn.ReLU() for torch.relu; a class with forward(self, x) for a function of x",
        ) from error
    except ValueError:
        pass  # written in C: it says nothing of its arguments


def cut(model: Any, num_stages: int, partition: Partition = "uniform") -> tuple[StageSpec, ...]:
    """The stages of a model: "uniform", or the number of layers of each stage.

    Raises `InputError` for fewer layers than stages, sizes that do not add up, or running statistics or a
    dict, list or the like that two stages share.
    """
    names, layers = named_layers(model)
    spans = _spans(len(layers), num_stages, partition)
    stages = tuple(
        StageSpec(index, span.start, names[span.start : span.stop], layers[span.start : span.stop])
        for index, span in enumerate(spans)
    )
    _require_own_statistics(stages)
    shared = shared_between([stage.layers for stage in stages])
    return tuple(replace(stage, shared=own) for stage, own in zip(stages, shared, strict=True))


def _require_own_statistics(stages: Sequence[StageSpec]) -> None:
    """Weights can be shared by stages, and summed; two copies of running statistics would go apart."""
    owner: dict[nn.Module, int] = {}
    for stage in stages:
        for name, layer in zip(stage.names, stage.layers, strict=True):
            for module in layer.modules() if isinstance(layer, nn.Module) else ():
                is_norm = isinstance(module, _NormBase) and module.track_running_stats
                hooks = module._forward_pre_hooks.values()
                is_spectral = any(isinstance(hook, SpectralNorm) for hook in hooks)
                moves = module.training and (is_norm or is_spectral)
                require(
                    not moves or owner.setdefault(module, stage.index) == stage.index,
                    "a layer with running statistics is on one stage: each of two ranks would keep its own",
                    got=f"{type(module).__name__} shared by stages {owner.get(module)} and {stage.index}",
                    where=f"layer {name!r}",
                    remedy="a norm for each place, its weights tied: second.weight, second.bias = "
                    "first.weight, first.bias; or norm.eval(); or a partition that keeps both on one stage",
                )


def _spans(num_layers: int, num_stages: int, partition: Partition) -> tuple[range, ...]:
    if isinstance(partition, str):
        require(
            partition == "uniform",
            'partition is "uniform" or the number of layers of each stage; by what is measured in Lab.run',
            got=repr(partition),
            where="partition",
            remedy='partition=lab.profile(model, microbatch).sizes(num_stages, by="time")',
        )
        return uniform(num_layers, num_stages)
    sizes = list(partition) if isinstance(partition, Iterable) else [partition]
    fits = all(is_count(n) for n in sizes) and sum(sizes) == num_layers
    require(
        fits and len(sizes) == num_stages,
        "a partition gives every stage at least one layer and every layer to one stage",
        got=f"{sizes} for {num_layers} layers and {num_stages} stages",
        where="partition",
        remedy=f"partition={[len(span) for span in uniform(num_layers, num_stages)]}",
    )
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def find_ties(
    stages: Sequence[StageSpec], stage_to_rank: Sequence[int], named: Ties | None
) -> tuple[Tie, ...]:
    """The weights that layers share: those of modules are found, those of factories are `named`.

    `named` is a list of tuples of whole-model parameter names, each tuple one weight.
    """
    home = {
        name: (stage_to_rank[stage.index], layer)
        for stage in stages
        for name, layer in zip(stage.names, stage.layers, strict=True)
    }
    uses: dict[int, list[str]] = {}
    for stage in stages:
        for prefix, layer in zip(stage.names, stage.layers, strict=True):
            if isinstance(layer, nn.Module):
                for name, parameter in layer.named_parameters():
                    uses.setdefault(id(parameter), []).append(f"{prefix}.{name}")
    groups = [tuple(names) for names in uses.values() if len(names) > 1] + [tuple(n) for n in named or ()]
    return tuple(Tie(names, tuple(_home(name, home) for name in names)) for names in groups)


def _home(name: str, home: Mapping[str, tuple[int, Layer]]) -> int:
    """The rank that holds a parameter. Raises `InputError` for a name that no layer is known to have."""
    prefix = next((key for key in home if name.startswith(f"{key}.")), "")
    rank, layer = home.get(prefix, (0, None))
    found = [f"{prefix}.{own}" for own, _ in _parameters(layer)]
    require(
        callable(layer) and (name in found or not isinstance(layer, nn.Module)),
        "a tie names parameters of the model, as state_dict does",
        got=repr(name) + (f", of {', '.join(found)}" if found else ""),
        where="ties",
        remedy='ties=[("0.tokens.weight", "7.scores.weight")]',
    )
    return rank


def _parameters(layer: Layer | None) -> list[tuple[str, nn.Parameter]]:
    """A layer's parameters under all their names; none of one that is still to be built."""
    return list(layer.named_parameters(remove_duplicate=False)) if isinstance(layer, nn.Module) else []


MakeSchedule = Callable[[int, int], Schedule]  # of the number of ranks and the number of micro-batches
_lower = lru_cache(maxsize=64)(lower)


def made(
    schedule: Schedule | MakeSchedule, num_ranks: int, num_microbatches: int | None, *, where: str
) -> Schedule:
    """A schedule that was given as a value, or what a function given for one makes of P and M."""
    if not callable(schedule):
        own = getattr(schedule, "num_microbatches", num_microbatches)
        require(
            num_microbatches in (None, own),
            "a schedule has its number of micro-batches; num_microbatches is for a function that makes one",
            got=f"num_microbatches={num_microbatches!r} for a schedule of {own}",
            where=where,
            remedy="leave out num_microbatches",
        )
        return schedule
    require(
        num_microbatches is not None,
        "a function that makes a schedule is told the number of micro-batches",
        got="num_microbatches=None",
        where=where,
        remedy="num_microbatches=8",
    )
    require_count(num_microbatches, "num_microbatches", where=where)
    found = schedule(num_ranks, num_microbatches)  # type: ignore[arg-type]
    fits = isinstance(found, Schedule) and (found.num_ranks, found.num_microbatches)
    require(
        fits == (num_ranks, num_microbatches),
        "a function given for a schedule makes one for the lab's ranks and for num_microbatches",
        got=f"a schedule for (ranks, micro-batches) = {fits}" if fits else f"a {type(found).__name__}",
        where=f"{where}, {getattr(schedule, '__name__', schedule)}({num_ranks}, {num_microbatches})",
        remedy="def my_schedule(num_ranks, num_microbatches): return gl.Schedule(...)",
    )
    return found


@dataclass(frozen=True)
class Plan:
    """A step made ready: the job of every rank, and the schedule with its recomputes."""

    jobs: tuple[StepJob, ...]
    schedule: Schedule


def plan_step(
    schedule: Schedule,
    *,
    num_ranks: int,
    layers_per_stage: Sequence[int],
    inputs: Tree,
    targets: Tree | None,
    loss: LossRule | None,
    checkpoint: str = "never",
    early: bool = False,
    pace: Pace | None = None,
    hoist: int = 2,
    profile: bool = False,
    outputs: bool = False,
    costs: Costs | None = None,
    step: StepContext,
) -> Plan:
    """Check a step and split it into jobs. Raises `InputError` or `ScheduleError`: no process works yet.

    costs: measured ones, for the order of transfers; a pace has its own.
    """
    surrounding = surrounding_autocast()
    require(
        not surrounding,
        "workers compute under no autocast but the one they are told of",
        got=f"a step within torch.autocast({', '.join(map(repr, surrounding))})",
        where="step",
        remedy="autocast=torch.bfloat16 in lab.run or lab.pipeline, outside torch.autocast",
    )
    require(
        isinstance(schedule, Schedule),
        "a schedule is a gl.Schedule",
        got=type(schedule).__name__,
        where="schedule",
        remedy="gl.gpipe(num_stages, num_microbatches)",
    )
    every = parse_mode(checkpoint)
    require(
        step.autocast in (None, torch.bfloat16),
        "autocast is torch.bfloat16: float16 would need its gradients scaled",
        got=f"autocast={step.autocast}",
        where="step",
        remedy="autocast=torch.bfloat16",
    )
    require(
        pace is None or isinstance(pace, Pace),
        "pace is a gl.Pace",
        got=repr(pace),
        where="pace",
        remedy="pace=gl.Pace(forward_ms=10, backward_ms=20)",
    )
    if pace is not None:
        pace.check_stages(schedule.num_stages)
    require(
        schedule.num_ranks == num_ranks,
        "a schedule is for as many ranks as the lab has",
        got=f"{schedule.name!r} for {_ranks(schedule)}, a lab of {num_ranks}",
        where="schedule",
        remedy=f"lab.resize({schedule.num_ranks})",
    )
    schedule = with_recompute(schedule, checkpoint, early, layers_per_stage=layers_per_stage)
    num_microbatches = schedule.num_microbatches
    rows = batch_size(inputs)
    require(
        schedule.num_replicas == 1 or rows >= num_microbatches,
        "every micro-batch of every replica has at least one row",
        got=f"{rows} rows for {num_microbatches} micro-batches on {schedule.num_replicas} replicas",
        where="batch",
        remedy="a larger batch, or fewer micro-batches",
    )
    sizes = microbatch_sizes(rows, num_microbatches)
    inputs_split = split(inputs, num_microbatches)
    targets_split, scales = _targets(targets, loss, rows, sizes, trains=schedule.trains)
    if pace is not None:
        costs = pace.costs() if pace.flops_per_ms is None else None
    shared = StepJob(
        schedule=_lower(schedule, hoist=hoist, costs=costs),
        first_schedule=_lower(schedule, hoist=0, costs=costs),
        signatures=tuple(map(signature, inputs_split)),
        sizes=sizes,
        step=step,
        scales=scales,
        pace=pace,
        every=every,
        posts_ahead=hoist > 0,
        profile=profile,
        outputs=outputs,
    )
    inputs_at = _by_rank(inputs_split, 0, schedule)
    targets_at = _by_rank(targets_split, schedule.num_stages - 1, schedule)
    jobs = tuple(
        replace(shared, inputs=mine, targets=wanted)
        for mine, wanted in zip(inputs_at, targets_at, strict=True)
    )
    return Plan(jobs, schedule)


def _by_rank(parts: Sequence[Tree], stage: int, schedule: Schedule) -> list[dict[int, Tree]]:
    """What each rank needs of the micro-batches' parts to run `stage`, by micro-batch."""
    found: list[dict[int, Tree]] = [{} for _ in schedule.ops]
    for m, part in enumerate(parts):
        found[schedule.home(stage, m)][m] = part
    return found


def _ranks(schedule: Schedule) -> str:
    each = f"{schedule.num_replicas} x {schedule.ranks_per_replica} = " if schedule.num_replicas > 1 else ""
    return f"{each}{schedule.num_ranks} ranks"


def _targets(
    targets: Tree | None, loss: LossRule | None, rows: int, sizes: tuple[int, ...], *, trains: bool
) -> tuple[list[Tree], tuple[float, ...]]:
    require(
        not trains or (targets is not None and loss is not None),
        "a schedule with backwards needs a loss",
        got=f"targets={'given' if targets is not None else None}, loss_fn={'given' if loss else None}",
        where="step",
        remedy="give targets and loss_fn, or a forward_only schedule",
    )
    if targets is None or loss is None:
        return [], ()
    require(
        batch_size(targets) == rows,
        "targets have as many rows as inputs",
        got=f"{batch_size(targets)} rows of targets for {rows} of inputs",
        where="targets",
        remedy="one row of targets for each row of inputs",
    )
    parts = split(targets, len(sizes))
    return parts, tuple(loss.scales(parts, sizes))


def read_spec(
    stages: Sequence[StageSpec],
    schedule_ranks: Sequence[int],
    num_ranks: int,
    *,
    seed: int,
    limit_bytes: int | None,
    ties: Ties | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Callable | None = None,
    scheduler: Callable | None = None,
    scheduler_per: str = "step",
    max_norm: float | None = None,
    num_replicas: int = 1,
) -> list[PipelineSpec]:
    """One `PipelineSpec` a rank: the stages that `schedule_ranks` (stage → rank of a replica) puts there."""
    ranks_per_replica = num_ranks // num_replicas
    found = [
        replace(tie, ranks=tuple(replica * ranks_per_replica + rank for rank in tie.ranks))
        for replica in range(num_replicas)
        for tie in find_ties(stages, schedule_ranks, ties)
    ]
    return [
        PipelineSpec(
            stages=tuple(s for s in stages if schedule_ranks[s.index] == rank % ranks_per_replica),
            loss_fn=loss_fn,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_per=scheduler_per,
            max_norm=max_norm,
            ties=tuple(found),
            replica=rank // ranks_per_replica,
            num_replicas=num_replicas,
            seed=seed,
            limit_bytes=limit_bytes,
        )
        for rank in range(num_ranks)
    ]


__all__ = [
    "MakeSchedule",
    "Partition",
    "Plan",
    "Ties",
    "cut",
    "made",
    "named_layers",
    "plan_step",
    "read_loss",
    "read_spec",
]
