"""Gradients of a rank's weights: added up over micro-batches, summed over ties and replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..plan.errors import InputError, require
from .device import Device
from .ledger import Ledger


class GradientBook:
    """Lets each step accumulate apart and adds it to `.grad` once.

    Two steps without zeroing so give exactly twice one, whatever the number of micro-batches. `borrowed`
    has the ids of parameters that another rank owns: they are neither reported nor counted in a norm here.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], ledger: Ledger, *, borrowed: Collection[int] = ()
    ) -> None:
        self.parameters = parameters
        self.ledger = ledger
        self._borrowed = borrowed
        self._before: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}  # in float32, of parameters with fewer bits
        self._keys: dict[str, list[int]] = {}
        self._keys_before: dict[str, list[int]] = {}
        self._awaited: dict[str, nn.Parameter] = {}  # those whose gradients a backward is to take in

    def begin(self) -> None:
        """Set aside what earlier steps have accumulated."""
        for name, parameter in self.parameters.items():
            require(
                parameter.dtype is not torch.float16 or not parameter.requires_grad,
                "weights are trained in bfloat16 or more: float16 would need its gradients scaled",
                got=f"{name} in float16",
                where="step",
                remedy="model.bfloat16()",
            )
            if parameter.grad is not None:
                self._before[name] = parameter.grad
                self._keys_before[name] = self._keys.pop(name, [])
                parameter.grad = None
        self._awaited = dict(self.parameters)

    def take_in(self) -> None:
        """After a backward: gradients of few bits go into float32 sums, and new ones into the ledger."""
        for name, parameter in list(self._awaited.items()):
            if parameter.grad is None:
                continue
            held = parameter.grad
            if held.layout is not torch.strided:
                raise InputError(
                    "gradients are dense tensors",
                    got=f"a gradient of layout {held.layout}",
                    where=name,
                    remedy="nn.Embedding(..., sparse=False)",
                )
            if parameter.dtype is torch.bfloat16:
                held = self._step_sum(name)
                held.add_(parameter.grad)
                parameter.grad = None
            else:
                del self._awaited[name]  # later micro-batches add to the same tensor
            if name not in self._keys:
                self._keys[name] = self.ledger.hold("gradients", [held])

    def sum_over(self, replicas: Replicas) -> int:
        """Add up this step's gradients over replicas, those of few bits in float32; the bytes summed.

        A parameter that has a gradient on one replica counts as zero on those where it has none.
        """
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        found = torch.tensor([name in self._sums or p.grad is not None for name, p in trained.items()])
        counts = found.to(torch.int32)
        replicas.sum([counts])
        wanted = [name for name, count in zip(trained, counts.tolist(), strict=True) if count]
        return replicas.sum([self._step_sum(name) for name in wanted])

    def _step_sum(self, name: str) -> torch.Tensor:
        """The sum over this step's micro-batches, to be changed in place; zeros where there is none yet."""
        parameter = self.parameters[name]
        if parameter.dtype is torch.bfloat16:
            return self._sums.setdefault(name, torch.zeros_like(parameter, dtype=torch.float32))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def finish_sums(self) -> None:
        """After the last backward: `.grad` is the sum over all micro-batches, rounded once."""
        for name, total in self._sums.items():
            self.ledger.release("gradients", self._keys.pop(name, []))
            self.parameters[name].grad = total.to(self.parameters[name].dtype)
        self._sums.clear()
        self._count()

    def _count(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name not in self._keys:
                self._keys[name] = self.ledger.hold("gradients", [parameter.grad])

    def end(self) -> None:
        """Add this step's gradients to the earlier ones."""
        for name, earlier in self._before.items():
            parameter = self.parameters[name]
            self.ledger.release("gradients", self._keys.pop(name, []) + self._keys_before.pop(name))
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._before.clear()
        self._count()

    def zero(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for keys in self._keys.values():
            self.ledger.release("gradients", keys)
        self._keys.clear()

    def restore(self, saved: Mapping[str, torch.Tensor | None]) -> None:
        """Start from gradients that an earlier process has accumulated."""
        self.zero()
        for name, gradient in saved.items():
            if gradient is not None:
                self.parameters[name].grad = gradient.to(self.parameters[name].device)
        self._count()

    def squared_norm(self) -> float:
        """The sum of squares of this rank's gradients, in float64."""
        return sum(_real(gradient).double().square().sum().item() for _, gradient in self._owned())

    def scale(self, factor: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def copies(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name, on the CPU; a parameter without one is left out."""
        return {name: gradient.detach().cpu().clone() for name, gradient in self._owned()}

    def _owned(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and id(parameter) not in self._borrowed:
                yield name, parameter.grad


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: few messages, and little memory for them
MESH_DIMS = ("data", "pipeline")


class Replicas:
    """The data group of one rank, from a `DeviceMesh` of replicas × ranks of a pipeline.

    Making one is a collective call of all ranks. The default group stays the pipeline's own.
    """

    def __init__(self, num_replicas: int, device: Device) -> None:
        kind = device.torch_device.type
        over_nccl = kind == "cuda" and "nccl" in dist.get_backend_config()
        shape = num_replicas, dist.get_world_size() // num_replicas
        self.mesh = init_device_mesh("cuda" if over_nccl else "cpu", shape, mesh_dim_names=MESH_DIMS)
        self.group = self.mesh.get_group(MESH_DIMS[0])
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self._staged = kind != "cpu" and not over_nccl

    def sum(self, tensors: Sequence[torch.Tensor]) -> int:
        """Add up each tensor over the group, in place; the bytes of what was summed on this rank.

        Every rank of the group gives tensors of the same shapes and gets the same bits.
        """
        num_bytes = 0
        for bucket in buckets([t for t in tensors if t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            host = flat.cpu() if self._staged else flat
            dist.all_reduce(host, group=self.group)
            parts = host.to(flat.device).split([t.numel() for t in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
            num_bytes += flat.numel() * flat.element_size()
        return num_bytes


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype together, up to `limit_bytes` unless a single tensor has more."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + num_bytes > limit_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


def replicas_in(groups: dict[Any, Any], num_replicas: int, device: Device) -> Replicas:
    """The replicas of the default process group, made once for each; a collective call of all ranks."""
    key = "replicas", num_replicas
    if key not in groups:
        groups[key] = Replicas(num_replicas, device)
    return groups[key]


@dataclass(frozen=True)
class Tie:
    """One weight under several whole-model names; `ranks[i]` holds `names[i]`. The first owns it.

    Gradients of all its uses are summed, it counts once in a norm, and it is reported under its first name.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def owner(self) -> int:
        return self.ranks[0]

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.ranks)))

    def local_names(self, rank: int) -> tuple[str, ...]:
        return tuple(name for name, r in zip(self.names, self.ranks, strict=True) if r == rank)


def join_locally(ties: Iterable[Tie], rank: int, layers: Mapping[str, nn.Module]) -> None:
    """Make the layers of one rank use one parameter where they are tied.

    layers: whole-model layer names to modules. Raises `InputError` for a name that no layer here has.
    """
    for tie in ties:
        local = tie.local_names(rank)
        first = _find(local[0], layers)[2] if local else None
        for name in local:
            module, attribute, parameter = _find(name, layers)
            require(
                first is not None and parameter.shape == first.shape,
                "tied weights have one shape",
                got=f"{local[0]} and {name}",
                where="ties",
            )
            setattr(module, attribute, first)


def _find(name: str, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, str, nn.Parameter]:
    layer = next((key for key in layers if name.startswith(f"{key}.")), None)
    path, _, attribute = (name[len(layer) + 1 :] if layer is not None else "").rpartition(".")
    try:
        module = layers[layer].get_submodule(path) if layer is not None else None
    except AttributeError:
        module = None
    parameter = getattr(module, attribute, None) if attribute else None
    require(
        isinstance(parameter, nn.Parameter),
        "a tie names parameters of the model, as state_dict does",
        got=repr(name),
        where="ties",
        remedy='ties=[("0.tokens.weight", "7.scores.weight")]',
    )
    assert module is not None and isinstance(parameter, nn.Parameter)
    return module, attribute, parameter


class Tied:
    """The ties of one rank's pipeline, over groups of the ranks that hold them."""

    def __init__(self, ties: Iterable[Tie], rank: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self.rank = rank
        self._spread = [tie for tie in ties if len(tie.holders) > 1]
        self._parameters = {
            tie: parameters[tie.local_names(rank)[0]] for tie in self._spread if rank in tie.holders
        }

    def borrowed(self) -> set[int]:
        """The ids of parameters that another rank owns."""
        return {id(p) for tie, p in self._parameters.items() if tie.owner != self.rank}

    def spread_values(self, groups: dict[Any, Any]) -> None:
        """Give every holder the owner's value. All ranks of the pipeline call this."""
        for tie in self._spread:
            group = _group(tie.holders, groups)
            if tie in self._parameters:
                value = self._parameters[tie].detach()
                _require_alike(tie, value, group)
                host = value.cpu()
                dist.broadcast(host, tie.owner, group=group)
                value.copy_(host)

    def sum_gradients(self, groups: dict[Any, Any]) -> dict[tuple[int, ...], int]:
        """Sum the gradients of all uses, on every holder. All ranks call this.

        Returns the bytes summed, by the ranks that hold them, for the ties of this rank.
        """
        num_bytes: dict[tuple[int, ...], int] = {}
        for tie in self._spread:
            group = _group(tie.holders, groups)
            if tie in self._parameters:
                parameter = self._parameters[tie]
                uses = torch.tensor([parameter.grad is not None], dtype=torch.int32)
                dist.all_reduce(uses, group=group)
                if not uses.item():  # frozen, or out of the loss's reach: as in one process it has none
                    continue
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                host = gradient.cpu()
                dist.all_reduce(host, group=group)
                parameter.grad = host.to(gradient.device)
                num_bytes[tie.holders] = num_bytes.get(tie.holders, 0) + host.nbytes
        return num_bytes


def _require_alike(tie: Tie, value: torch.Tensor, group: Any) -> None:
    """Compare a tied weight with its owner's: a transfer of another size would end the process."""
    found: list[Any] = [None] * len(tie.holders)
    dist.all_gather_object(found, f"{tuple(value.shape)} {value.dtype}", group=group)
    require(
        len(set(found)) == 1,
        "tied weights have one shape and dtype",
        got=", ".join(f"{what} on rank {rank}" for rank, what in zip(tie.holders, found, strict=True)),
        where=f"ties, {tie.names}",
    )


def _group(ranks: tuple[int, ...], groups: dict[Any, Any]) -> Any:
    """A process group of these ranks, made once for each default group; making one is a collective call."""
    key = "tie", ranks
    if key not in groups:
        groups[key] = dist.new_group(list(ranks))
    return groups[key]
