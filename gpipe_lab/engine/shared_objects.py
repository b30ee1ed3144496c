"""What layers on several stages share beside weights: each rank has a copy, and nobody keeps copies equal.

Sharing is fine while nothing changes. A change is found when it has happened, since nothing says beforehand
which objects a forward changes: a layer's configuration is shared as often as a dict to pass activations by.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections import deque
from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..plan.errors import require

CONTAINERS = (dict, list, set, deque, bytearray)
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    FunctionType,
    BuiltinFunctionType,
)
GENERATORS = (torch.Generator, random.Random, np.random.Generator)
_MODULES_OWN = frozenset(vars(nn.Module()))  # hooks, parameters and the like


class Kept(NamedTuple):
    """An object that can be changed, and the module of which it is an attribute, where it is one."""

    value: Any
    holder: nn.Module | None


def shared_between(stages: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """For the layers of each stage, modules or functions that build them, what they share with another stage.

    Raises `InputError` for a container that modules on two stages have as an attribute and that holds no
    configuration: it is there to be changed.
    """
    found = [_kept_by(layers) for layers in stages]
    first: dict[int, tuple[int, Kept]] = {}
    shared: set[int] = set()
    for stage, objects in enumerate(found):
        for key, kept in objects.items():
            other, theirs = first.setdefault(key, (stage, kept))
            if other != stage:
                shared.add(key)
                apart = None not in (kept.holder, theirs.holder) and kept.holder is not theirs.holder
                require(
                    not (apart and isinstance(kept.value, CONTAINERS)) or _is_configuration(kept.value),
                    "layers on two stages share nothing that can be changed: each rank changes its own copy",
                    got=f"a {type(kept.value).__name__} in a {type(theirs.holder).__name__} of stage {other} "
                    f"and a {type(kept.holder).__name__} of stage {stage}",
                    where="model",
                    remedy="return what later layers need beside the output, (x, skip), for them to hand on; "
                    "a copy, or a tuple, for what nobody changes",
                )
    return [tuple(kept.value for key, kept in objects.items() if key in shared) for objects in found]


def _is_configuration(value: Any) -> bool:
    """Whether a container has something in it, and no more than numbers, strings and the like."""
    inside = _inside(value)
    return bool(inside) and all(isinstance(v, PLAIN) or _is_configuration(v) for v in inside)


def _kept_by(layers: Iterable[Any]) -> dict[int, Kept]:
    """By id, all that can be changed of what goes along when layers are pickled, but for weights."""
    found: dict[int, Kept] = {}
    seen: set[int] = set()
    left: list[tuple[Any, nn.Module | None]] = [(layer, None) for layer in layers]
    while left:
        value, holder = left.pop()
        if id(value) in seen or isinstance(value, nn.Parameter):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            left += [(v, value) for name, v in vars(value).items() if name not in _MODULES_OWN]
            left += [(v, None) for v in (*value._buffers.values(), *value.children(), *_hooks(value))]
            continue
        if isinstance(value, (*CONTAINERS, *GENERATORS, torch.Tensor)) or _is_plain_object(value):
            found[id(value)] = Kept(value, holder)
        is_container = isinstance(value, (*CONTAINERS, tuple))
        left += [(v, holder if is_container else None) for v in _inside(value)]
    return found


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _inside(value: Any) -> list[Any]:
    """What an object takes along when it is pickled."""
    match value:
        case dict():
            return list(value.values())
        case list() | tuple() | set() | deque():
            return list(value)
        case FunctionType():
            return [content for cell in value.__closure__ or () for content in _filling(cell)]
        case MethodType():
            return [value.__self__]
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
    return list(vars(value).values()) if _is_plain_object(value) else []


def _filling(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _is_plain_object(value: Any) -> bool:
    """Whether an object is pickled attribute by attribute, unlike a logger, which is found by its name."""
    cls = type(value)
    is_plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    is_code = isinstance(value, type | FunctionType | MethodType | functools.partial | nn.Module)
    return is_plain and hasattr(value, "__dict__") and cls.__getstate__ is object.__getstate__ and not is_code


class SharedObjects:
    """Holds what a stage shares with others to what it was when the step began.

    Made before the layers move to their device, which may give them other buffers.
    """

    def __init__(self, shared: Sequence[Any], layers: Iterable[nn.Module]) -> None:
        wanted = set(map(id, shared))
        modules = [module for layer in layers for module in layer.modules()] if shared else []
        self._buffers = [(m, name) for m in modules for name, b in m._buffers.items() if id(b) in wanted]
        moved = {id(module._buffers[name]) for module, name in self._buffers}
        self._objects = [value for value in shared if id(value) not in moved]
        self._before: list[list[Any]] = []

    def begin(self) -> None:
        self._before = [_contents(value) for value in self._values()]

    def check(self) -> None:
        """Raise `InputError` where an object is no longer what it was at `begin`."""
        for value, before in zip(self._values(), self._before, strict=True):
            now = _contents(value)
            require(
                len(now) == len(before) and all(map(_is_same, now, before)),
                "what layers on several stages share stays as it is: each rank changes its own copy",
                got=f"a {type(value).__name__} that a forward has changed",
                where="model",
                remedy="return what later layers need beside the output, (x, skip), for them to hand on; "
                "or a partition that keeps the layers that share it on one stage",
            )

    def _values(self) -> list[Any]:
        return [*self._objects, *[module._buffers[name] for module, name in self._buffers]]


def _contents(value: Any) -> list[Any]:
    """What a change of an object itself changes; what is inside its parts is looked at with them."""
    match value:
        case torch.Tensor():
            return [value, value._version]
        case dict():
            return [*value.keys(), *value.values()]
        case list() | set() | deque():
            return list(value)
        case bytearray():
            return [bytes(value)]
        case torch.Generator() | random.Random() | np.random.Generator():
            return [pickle.dumps(value)]
    return [*vars(value).keys(), *vars(value).values()] if hasattr(value, "__dict__") else []


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, int | str | bytes) and now == before
    )
