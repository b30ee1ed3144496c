"""Gradients of a rank's weights: added up over micro-batches, summed over ties and replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..plan.errors import InputError, require
from .ledger import Ledger
from .transport import Ranks, Transport


class GradientAccumulator:
    """Lets each step accumulate apart and adds it to `.grad` once.

    Two steps without zeroing so give exactly twice one, whatever the number of micro-batches. Gradients of
    bfloat16 weights accumulate in float32 and are rounded once. `borrowed` has the ids of parameters that
    another rank owns: they are neither reported nor counted in a norm here.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], ledger: Ledger, *, borrowed: Collection[int] = ()
    ) -> None:
        for name, parameter in parameters.items():
            require(
                parameter.dtype is not torch.float16 or not parameter.requires_grad,
                "weights are trained in bfloat16 or more: float16 would need its gradients scaled",
                got=f"{name} in float16",
                where="model",
                remedy="model.bfloat16()",
            )
        self.parameters = parameters
        self.ledger = ledger
        self._borrowed = borrowed
        self._earlier: dict[str, torch.Tensor] = {}  # of earlier steps
        self._sums: dict[str, torch.Tensor] = {}  # this step's in float32, of bfloat16 weights
        self._keys: list[int] = []  # the ledger's, for all of them
        self._awaited: dict[str, nn.Parameter] = {}  # those that have no gradient yet, or one to be moved

    def begin(self) -> None:
        """Set aside what earlier steps have accumulated."""
        self._awaited = dict(self.parameters)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._earlier[name] = parameter.grad
                parameter.grad = None

    def accumulate(self) -> None:
        """After a backward: gradients of bfloat16 weights go to their sums, and new ones into the ledger."""
        for name, parameter in list(self._awaited.items()):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise InputError(
                    "gradients are dense tensors",
                    got=f"a gradient of layout {gradient.layout}",
                    where=name,
                    remedy="nn.Embedding(..., sparse=False)",
                )
            if parameter.dtype is torch.bfloat16:
                self._step_sum(name).add_(gradient)
                parameter.grad = None
            else:
                del self._awaited[name]  # later micro-batches add to the same tensor
                self._hold(gradient)

    def all_reduce(self, names: Iterable[str], ranks: Ranks, transport: Transport) -> int:
        """Add up this step's gradients over `ranks`, each with its own names of the same weights.

        A weight that has a gradient on one of them counts as zero where it has none; one without any stays
        without. Returns the bytes summed.
        """
        names = list(names)
        found = [name in self._sums or self.parameters[name].grad is not None for name in names]
        counts = torch.tensor(found, dtype=torch.int32)
        transport.all_reduce([counts], ranks)
        wanted = [name for name, count in zip(names, counts.tolist(), strict=True) if count]
        return transport.all_reduce([self._step_sum(name) for name in wanted], ranks)

    def _step_sum(self, name: str) -> torch.Tensor:
        """The sum over this step's micro-batches, to be changed in place; zeros where there is none yet."""
        parameter = self.parameters[name]
        if parameter.dtype is torch.bfloat16:
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(parameter, dtype=torch.float32)
                self._hold(self._sums[name])
            return self._sums[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            self._hold(parameter.grad)
        return parameter.grad

    def end(self) -> None:
        """Round this step's gradients and add them to the earlier ones."""
        for name, total in self._sums.items():
            self.parameters[name].grad = total.to(self.parameters[name].dtype)
        self._sums.clear()
        for name, earlier in self._earlier.items():
            gradient = self.parameters[name].grad
            self.parameters[name].grad = earlier if gradient is None else earlier.add_(gradient)
        self._earlier.clear()
        self._count_anew()

    def _hold(self, gradient: torch.Tensor) -> None:
        self._keys += self.ledger.hold("gradients", [gradient])

    def _count_anew(self) -> None:
        self.ledger.release("gradients", self._keys)
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        self._keys = self.ledger.hold("gradients", found)

    def abandon(self) -> None:
        """Drop this step's gradients and keep the earlier ones."""
        self._sums.clear()
        self.restore(self._earlier)
        self._earlier.clear()

    def zero(self) -> None:
        self.restore({})

    def restore(self, saved: Mapping[str, torch.Tensor | None]) -> None:
        """Start from gradients that an earlier process has accumulated."""
        for name, parameter in self.parameters.items():
            gradient = saved.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._count_anew()

    def squared_norm(self) -> float:
        """The sum of squares of this rank's gradients, in float64."""
        owned = [g for _, g in self._owned()]
        norms = [
            torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float64)) for g in owned
        ]
        return torch.stack(norms).square().sum().item() if norms else 0.0  # the one wait for the device

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


def first_name(name: str, ties: Iterable[tuple[str, ...]]) -> str:
    """The name that stands for a weight: of tied ones the first."""
    return next((names[0] for names in ties if name in names), name)


def _find(name: str, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, str, nn.Parameter]:
    """The module that holds a parameter of that whole-model name, its attribute there, and the parameter."""
    path, _, attribute = name.rpartition(".")
    for prefix, layer in layers.items():
        for found, module in layer.named_modules(prefix=prefix, remove_duplicate=False):
            parameter = getattr(module, attribute, None) if found == path else None
            if isinstance(parameter, nn.Parameter):
                return module, attribute, parameter
    raise InputError(
        "a tie names parameters of the model, as state_dict does",
        got=repr(name),
        where="ties",
        remedy='ties=[("0.tokens.weight", "7.scores.weight")]',
    )


class TiedWeights:
    """The ties of one rank's pipeline, within the rank and over several.

    layers: whole-model layer names to modules, which are made to use one parameter where they are tied.
    Raises `InputError` for a name that no layer here has. `borrowed` as in `GradientAccumulator`.
    """

    def __init__(self, ties: Sequence[Tie], rank: int, layers: Mapping[str, nn.Module]) -> None:
        self._ties = [tie for tie in ties if len(tie.holders) > 1]
        self._parameters: dict[Tie, nn.Parameter] = {}  # of those that other ranks have too
        for tie in ties:
            local = tie.local_names(rank)
            found = [_find(name, layers) for name in local]
            for name, (module, attribute, parameter) in zip(local, found, strict=True):
                first = found[0][2]
                require(
                    parameter.shape == first.shape,
                    "tied weights have one shape",
                    got=f"{local[0]} and {name}",
                    where="ties",
                )
                setattr(module, attribute, first)
            if found and tie in self._ties:
                self._parameters[tie] = found[0][2]
        self.borrowed = {id(p) for tie, p in self._parameters.items() if tie.owner != rank}

    def broadcast(self, transport: Transport) -> None:
        """Give every holder the owner's value. All ranks of the pipeline call this."""
        for tie in self._ties:
            transport.open_group(tie.holders)
            if tie in self._parameters:
                value = self._parameters[tie].detach()
                alike = transport.gather(f"{tuple(value.shape)} {value.dtype}", tie.holders)
                require(  # a transfer of another size would end the process
                    len(set(alike)) == 1,
                    "tied weights have one shape and dtype",
                    got=", ".join(
                        f"{what} on rank {rank}" for rank, what in zip(tie.holders, alike, strict=True)
                    ),
                    where=f"ties, {tie.names}",
                )
                transport.broadcast(value, tie.owner, tie.holders)

    def all_reduce(self, gradients: GradientAccumulator, transport: Transport) -> dict[Ranks, int]:
        """Sum the gradients of all uses, on every holder; the bytes summed here, by holders.

        All ranks of the pipeline call this.
        """
        for tie in self._ties:
            transport.open_group(tie.holders)
        names = {id(parameter): name for name, parameter in gradients.parameters.items()}
        by_holders: dict[Ranks, list[str]] = {}
        for tie, parameter in self._parameters.items():
            by_holders.setdefault(tie.holders, []).append(names[id(parameter)])
        summed = {r: gradients.all_reduce(held, r, transport) for r, held in by_holders.items()}
        return {holders: num_bytes for holders, num_bytes in summed.items() if num_bytes}
