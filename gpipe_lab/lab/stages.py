"""A model cut into stages, and what its stages share: checked before any process works."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..engine.pipeline import Layer, StageSpec
from ..engine.ties import Tie
from ..plan.errors import InputError, is_count, require
from ..plan.partition import uniform

Partition = str | Sequence[int]
Ties = Sequence[tuple[str, ...]]


def named_layers(model: Any) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
    """The layers of a model and their names: those of an `nn.Sequential`, or "0", "1", … of a list."""
    is_sequential = isinstance(model, nn.Sequential)
    is_list = isinstance(model, list | tuple | nn.ModuleList) and all(callable(layer) for layer in model)
    has_own_call = is_sequential and (
        type(model).forward is not nn.Sequential.forward or model._forward_hooks or model._forward_pre_hooks
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

    Raises `InputError` for fewer layers than stages, sizes that do not add up, or running statistics that
    two stages share.
    """
    names, layers = named_layers(model)
    spans = _spans(len(layers), num_stages, partition)
    stages = tuple(
        StageSpec(index, span.start, names[span.start : span.stop], layers[span.start : span.stop])
        for index, span in enumerate(spans)
    )
    _require_own_statistics(stages)
    return stages


def _require_own_statistics(stages: Sequence[StageSpec]) -> None:
    """Weights can be shared by stages, and summed; two copies of running statistics would go apart."""
    owner: dict[nn.Module, int] = {}
    for stage in stages:
        for name, layer in zip(stage.names, stage.layers, strict=True):
            for module in layer.modules() if isinstance(layer, nn.Module) else ():
                moves = isinstance(module, _NormBase) and module.track_running_stats and module.training
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
