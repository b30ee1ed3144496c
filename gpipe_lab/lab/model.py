"""A model cut into stages: its layers and their names, the weights they share, and what each rank builds."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from ..engine.gradients import Tie
from ..engine.rank_pipeline import Layer, PipelineSpec, StageSpec
from ..engine.shared_objects import shared_between
from ..plan.errors import InputError, is_count, require
from ..plan.partition import uniform
from .options import ModelOptions, Partition, Ties


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


def rank_specs(
    stages: Sequence[StageSpec],
    stage_to_rank: Sequence[int],
    num_ranks: int,
    options: ModelOptions,
    *,
    limit_bytes: int | None = None,
) -> list[PipelineSpec]:
    """What each rank builds: the stages that `stage_to_rank` (of a replica) puts there, and their ties."""
    num_replicas = options.num_replicas
    ranks_per_replica = num_ranks // num_replicas
    ties = tuple(
        replace(tie, ranks=tuple(replica * ranks_per_replica + rank for rank in tie.ranks))
        for replica in range(num_replicas)
        for tie in find_ties(stages, stage_to_rank, options.ties)
    )
    return [
        PipelineSpec(
            stages=tuple(s for s in stages if stage_to_rank[s.index] == rank % ranks_per_replica),
            loss_fn=options.loss_fn,
            optimizer=options.optimizer,
            scheduler=options.scheduler,
            scheduler_per=options.scheduler_per,
            max_norm=options.max_norm,
            ties=ties,
            replica=rank // ranks_per_replica,
            num_replicas=num_replicas,
            seed=options.seed,
            limit_bytes=limit_bytes,
        )
        for rank in range(num_ranks)
    ]


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
