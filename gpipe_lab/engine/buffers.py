"""Buffers that a forward changes: a recompute must see them as its forward did, and not change them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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


class Snapshot:
    """All buffers of some modules, which `restore` gives the values of now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = find(modules)
        self._copies = copies(self._buffers)

    def restore(self) -> None:
        put(self._buffers)
        for key, buffer in self._buffers.items():
            with torch.no_grad():
                buffer.copy_(self._copies[key])


class Changes:
    """Finds out which buffers are changed between its making and `before`, and what they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = find(modules)
        self._versions = {key: (buffer, buffer._version) for key, buffer in found.items()}
        self._copies = copies(found)

    def before(self) -> Buffers:
        """The earlier values of those that have been modified or replaced since."""
        return {
            (module, name): self._copies[module, name]
            for (module, name), (buffer, version) in self._versions.items()
            if module._buffers.get(name) is not buffer or buffer._version != version
        }


@contextmanager
def as_before(buffers: Buffers) -> Iterator[None]:
    """Within, these buffers have earlier values; afterwards they are what they were."""
    now = find(module for module, _ in buffers)
    put(buffers)
    try:
        yield
    finally:
        put({key: now[key] for key in buffers})
