"""Weights that several layers share, on ranks of their own: one weight, kept the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..plan.errors import require


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
