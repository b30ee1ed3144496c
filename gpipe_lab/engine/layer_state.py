"""What layers keep beside their weights: running statistics, buffers, random states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def layer_seed(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The seed set before `layer` (counted over the whole model) runs on a micro-batch.

    Keyed so, a dropout mask is the same whatever the stages, the schedule or the recompute.
    """
    key = f"{seed}/{step}/{layer}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())


def init_seed(seed: int, layer: int) -> int:
    """The seed set before a factory builds `layer`."""
    return int.from_bytes(hashlib.blake2b(f"init/{seed}/{layer}".encode(), digest_size=7).digest())


class _Sums:
    """Of a layer's inputs in one of its uses, over a step, in float64."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.num_batches_tracked is not None
        device = layer.num_batches_tracked.device
        self.count = torch.zeros(1, dtype=torch.float64, device=device)
        self.total = torch.zeros(layer.num_features, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.total)

    def add(self, x: torch.Tensor) -> None:
        over = [dim for dim in range(x.dim()) if dim != 1]
        x = x.detach()
        self.count += x.numel() // x.shape[1]
        self.total += x.sum(over, dtype=torch.float64)
        self.squares += torch.linalg.vector_norm(x, dim=over, dtype=torch.float64).square()


class _Gathered:
    """One layer's settings from before the step, and what each of its uses has seen in it.

    A layer that a model uses twice moves its statistics twice for a batch, so its uses are kept apart.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.num_batches_tracked is not None
        self.layer = layer
        self.momentum = layer.momentum
        self.num_batches = layer.num_batches_tracked.clone()
        self.uses: list[_Sums] = []
        self.microbatch_uses = 0  # so far, in the micro-batch that is running
        layer.momentum = 0.0  # its own forwards leave the statistics where they are

    def add(self, x: torch.Tensor) -> None:
        if self.microbatch_uses == len(self.uses):
            self.uses.append(_Sums(self.layer))
        self.uses[self.microbatch_uses].add(x)
        self.microbatch_uses += 1

    def commit(self) -> None:
        """Move the running statistics as torch does for one batch of all that was gathered."""
        layer = self.layer
        assert layer.num_batches_tracked is not None
        layer.momentum = self.momentum
        layer.num_batches_tracked.copy_(self.num_batches)
        for sums in self.uses:
            if sums.count.item():  # an input without rows moves nothing
                self._move(sums)

    def _move(self, sums: _Sums) -> None:
        layer = self.layer
        assert layer.running_mean is not None and layer.running_var is not None
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        share = 1.0 / layer.num_batches_tracked.item() if self.momentum is None else self.momentum
        count = sums.count.item()
        mean = sums.total / count
        variance = (sums.squares / count - mean.square()).clamp(min=0.0)
        unbiased = variance * count / max(count - 1, 1)
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)


class RunningStatistics:
    """Watches the batch-norm layers of a stage between `begin` and `end` of a training step."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        found = dict.fromkeys(m for layer in layers for m in layer.modules() if isinstance(m, _BatchNorm))
        self._layers = [m for m in found if m.track_running_stats and m.running_mean is not None]
        self._gathered: dict[nn.Module, _Gathered] = {}
        self.recomputing = False
        for layer in self._layers:
            layer.register_forward_pre_hook(self._watch)

    def watches(self, module: nn.Module) -> bool:
        """Whether the statistics of this layer are seen to here."""
        return module in self._layers

    def begin(self) -> None:
        """From now on statistics are gathered, not moved."""
        self._gathered = {layer: _Gathered(layer) for layer in self._layers}

    def begin_microbatch(self) -> None:
        """Of a forward that counts: what a layer sees next is its first use in it."""
        for gathered in self._gathered.values():
            gathered.microbatch_uses = 0

    def sums(self) -> list[torch.Tensor]:
        """What the step has gathered: other replicas' are to be added to it, in place."""
        uses = [use for gathered in self._gathered.values() for use in gathered.uses]
        return [t for use in uses for t in (use.count, use.total, use.squares)]

    def end(self) -> None:
        """Commit what the step has gathered."""
        for gathered in self._gathered.values():
            gathered.commit()
        self._gathered = {}

    def abandon(self) -> None:
        """Forget what the step has gathered."""
        for gathered in self._gathered.values():
            gathered.uses.clear()
        self.end()
        self.recomputing = False

    def _watch(self, layer: nn.Module, inputs: Any) -> None:
        if layer in self._gathered and not self.recomputing:
            self._gathered[layer].add(inputs[0])


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
