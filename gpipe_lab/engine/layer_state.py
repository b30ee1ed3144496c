"""What layers keep beside their weights: running statistics, buffers, plain attributes, random states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..plan.errors import require
from .batch import Tree, map_tensors, tensors
from .transport import Ranks, Transport


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

    def num_uses(self) -> list[int]:
        """How often a micro-batch has used each layer."""
        return [len(gathered.uses) for gathered in self._gathered.values()]

    def sums(self, num_uses: Sequence[int]) -> list[torch.Tensor]:
        """What the step has gathered: other replicas' are to be added to it, in place.

        num_uses: at least those of every replica; one that has used a layer less often has zeros.
        """
        for gathered, count in zip(self._gathered.values(), num_uses, strict=True):
            gathered.uses += [_Sums(gathered.layer) for _ in range(count - len(gathered.uses))]
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
        # Within a backward, a layer's own checkpoint runs it again.
        is_again = self.recomputing or torch._C._current_graph_task_id() != -1
        if layer in self._gathered and layer.training and not is_again:
            self._gathered[layer].add(inputs[0])


class Slot(NamedTuple):
    """Where a module keeps a value: an entry of its buffers or of its attributes."""

    entries: dict[str, Any]
    name: str
    value: Any
    version: int | None  # of a tensor
    copy: Any = None  # of a tensor; slots that share one share its copy

    @property
    def is_changed(self) -> bool:
        now = self.entries.get(self.name, self.value)
        return now is not self.value or (self.version is not None and now._version != self.version)


_PLAIN = (bool, int, float, complex, str, type(None), torch.Tensor)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module of the user's own keeps beside parameters and buffers; torch's own keep nothing there."""
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


class LayerState:
    """What some modules have beside their parameters, as it is now.

    That is their buffers, attributes that are tensors, numbers, strings, booleans or None, and the states of
    random generators (torch's, Python's, numpy's) that they own. What is inside lists, dicts and other
    objects is not looked after: a layer whose forward changes such a thing keeps it in a buffer instead.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.slots: list[Slot] = []
        self.generators: list[tuple[Any, Any]] = []  # with their states
        copies: dict[int, torch.Tensor] = {}
        for module in modules:
            attributes = _attributes(module)
            kept = [(module._buffers, name, value) for name, value in module._buffers.items()]
            for entries, name, value in kept + [(vars(module), *item) for item in attributes.items()]:
                if isinstance(value, torch.Tensor):
                    if id(value) not in copies:
                        copies[id(value)] = value.detach().clone()
                    self.slots.append(Slot(entries, name, value, value._version, copies[id(value)]))
                elif isinstance(value, _PLAIN):
                    self.slots.append(Slot(entries, name, value, None, value))
            found = [value for value in attributes.values() if isinstance(value, _GENERATORS)]
            self.generators += [(generator, generator_state(generator)) for generator in found]

    def restore(self) -> None:
        """Set everything to what it was, tensors in place."""
        with torch.no_grad():
            for entries, name, value, version, copy in self.slots:
                entries[name] = value
                if version is not None:
                    value.copy_(copy)
        for generator, state in self.generators:
            set_generator_state(generator, state)

    def keep_changes(self) -> None:
        """Forget what is still the same, so that little is held until it is needed."""
        self.slots = [slot for slot in self.slots if slot.is_changed]

    @contextmanager
    def in_place_of_now(self) -> Iterator[None]:
        """Within, modules have this state; afterwards what they have now."""
        now = [(entries, name, entries[name]) for entries, name, *_ in self.slots]
        states = [(generator, generator_state(generator)) for generator, _ in self.generators]
        for entries, name, _, _, copy in self.slots:
            entries[name] = copy
        for generator, state in self.generators:
            set_generator_state(generator, state)
        try:
            yield
        finally:
            for entries, name, value in now:
                entries[name] = value
            for generator, state in states:
                set_generator_state(generator, state)


def named_generators(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The random generators that a layer and its submodules own."""
    for path, module in layer.named_modules():
        for name, value in _attributes(module).items():
            if isinstance(value, _GENERATORS):
                yield f"{path}.{name}".lstrip("."), value


def generator_state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
    return generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case _:
            generator.bit_generator.state = state


def keepers(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that may keep what they return: neither torch's own nor without a buffer."""
    found = [m for m in layer.modules() if m._buffers or not type(m).__module__.startswith("torch.")]
    return [m for m in found if not isinstance(m, _BatchNorm)]


def apart_from_state(output: Tree, modules: Iterable[nn.Module]) -> Tree:
    """A layer's output, with copies of tensors that its modules keep as well.

    The next micro-batch may write to those while this one's are still on their way, or needed for a backward.
    """
    kept: set[int] = set()
    for module in modules:
        for value in (*module._buffers.values(), *_attributes(module).values()):
            if isinstance(value, torch.Tensor | list | tuple | dict):
                kept.update(map(_address, tensors(value)))
    kept.discard(0)
    return map_tensors(lambda t: t.clone() if _address(t) in kept else t, output) if kept else output


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory is; 0 for those that have none, or more than one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


class SharedState:
    """State besides weights that replicas of a stage are to have alike, as they see different rows.

    Batch norm's statistics are those of all rows. Of any other buffer that a forward has changed, every
    replica takes on the first one's value, as under torch's DistributedDataParallel.
    """

    def __init__(self, layers: nn.Module, statistics: RunningStatistics) -> None:
        self._statistics = statistics
        modules = [(path, m) for path, m in layers.named_modules() if not statistics.watches(m)]
        self._places = [(module._buffers, name) for _, module in modules for name in module._buffers]
        self._names = [f"{path}.{name}" for path, module in modules for name in module._buffers]
        self._note()

    def _note(self) -> None:
        self._slots = []
        for entries, name in self._places:
            value = entries.get(name)
            self._slots.append(Slot(entries, name, value, None if value is None else value._version))

    def agree(self, transport: Transport, replicas: Ranks) -> None:
        """Make this step's state one; all of the stage's ranks `replicas` call this, the first one first."""
        num_uses = self._statistics.num_uses()
        if not num_uses and not self._slots:
            return
        changed = {i: _form(slot.entries[slot.name]) for i, slot in enumerate(self._slots) if slot.is_changed}
        found = transport.gather((num_uses, changed), replicas)
        most = [max(counts) for counts in zip(*(uses for uses, _ in found), strict=True)]
        transport.all_reduce(self._statistics.sums(most), replicas)
        for i in sorted({i for _, changes in found for i in changes}):
            slot = self._slots[i]
            forms = {changes.get(i, _form(slot.value)) for _, changes in found}
            require(
                len(forms) == 1,
                "a buffer that a forward changes has one shape and dtype on all replicas",
                got=", ".join(sorted(forms)),
                where=f"buffer {self._names[i]!r}",
                remedy="keep what hangs on a replica's rows in a plain attribute, not in a buffer",
            )
            value = slot.entries[slot.name]
            if value is not None and value.numel():
                memory = value.detach().contiguous()
                transport.broadcast(memory.view(-1).view(torch.uint8), replicas[0], replicas)
                with torch.no_grad():
                    value.copy_(memory)
        self._note()


def _form(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{tuple(value.shape)} {value.dtype}"
