"""What a forward changes in its layers: a recompute must see it as its forward did, and not change it again.

That is buffers, plain numbers and strings, and random generators of a layer's own. Lists, dicts and other
objects that a forward changes in place are not seen to.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Buffers = dict[tuple[nn.Module, str], torch.Tensor]


def find(modules: Iterable[nn.Module]) -> Buffers:
    """The buffers of these modules, their submodules not included."""
    return {
        (module, name): buffer
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def put(buffers: Buffers) -> None:
    """Give modules these tensors as their buffers."""
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer


def copies(buffers: Buffers) -> Buffers:
    """Their values now; two modules that share a buffer share its copy."""
    made: dict[int, torch.Tensor] = {}
    for buffer in buffers.values():
        if id(buffer) not in made:
            made[id(buffer)] = buffer.clone()
    return {key: made[id(buffer)] for key, buffer in buffers.items()}


PLAIN = (bool, int, float, complex, str, type(None))
Attributes = dict[tuple[nn.Module, str], Any]


def plain_attributes(modules: Iterable[nn.Module]) -> Attributes:
    """What modules keep as plain numbers, strings and the like. What is changed in place is not among it."""
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, PLAIN)
    }


def generators(modules: Iterable[nn.Module]) -> list[Any]:
    """The random generators that modules own: torch's, Python's and numpy's."""
    kinds = (torch.Generator, random.Random, np.random.Generator)
    return [value for module in modules for value in vars(module).values() if isinstance(value, kinds)]


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            generator.bit_generator.state = state


@dataclass(frozen=True)
class Earlier:
    """What layers had before a forward and have no longer."""

    buffers: Buffers
    attributes: Attributes
    generators: list[tuple[Any, Any]]  # with their states

    def put(self) -> None:
        put(self.buffers)
        for (module, name), value in self.attributes.items():
            vars(module)[name] = value
        for generator, state in self.generators:
            _set_state(generator, state)


class Snapshot:
    """All state of some modules beside their parameters, which `restore` sets to what it is now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._buffers = find(modules)
        self._copies = copies(self._buffers)
        states = [(generator, _state(generator)) for generator in generators(modules)]
        self._rest = Earlier({}, plain_attributes(modules), states)

    def restore(self) -> None:
        put(self._buffers)
        for key, buffer in self._buffers.items():
            with torch.no_grad():
                buffer.copy_(self._copies[key])
        self._rest.put()


class Changes:
    """Finds out what a forward between its making and `before` has changed, and what it was."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        found = find(modules)
        self._versions = {key: (buffer, buffer._version) for key, buffer in found.items()}
        self._copies = copies(found)
        self._attributes = plain_attributes(modules)
        self._states = [(generator, _state(generator)) for generator in generators(modules)]

    def before(self) -> Earlier:
        """The earlier values of what has been modified or replaced since, and the generators' states."""
        buffers = {
            (module, name): self._copies[module, name]
            for (module, name), (buffer, version) in self._versions.items()
            if module._buffers.get(name) is not buffer or buffer._version != version
        }
        attributes = {
            (module, name): value
            for (module, name), value in self._attributes.items()
            if vars(module).get(name, value) is not value
        }
        return Earlier(buffers, attributes, self._states)


@contextmanager
def as_before(earlier: Earlier) -> Iterator[None]:
    """Within, layers have their earlier state; afterwards what they have now."""
    buffers = find(module for module, _ in earlier.buffers)
    now = Earlier(
        {key: buffers[key] for key in earlier.buffers},
        {(module, name): vars(module)[name] for module, name in earlier.attributes},
        [(generator, _state(generator)) for generator, _ in earlier.generators],
    )
    earlier.put()
    try:
        yield
    finally:
        now.put()
