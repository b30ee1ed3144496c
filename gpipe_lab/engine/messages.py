"""What crosses a stage boundary: agreed once per input signature, then sent as raw bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..plan.errors import InputError
from .batch import Tree, TreeSpec, flatten, require_dense, unflatten

ALIGNMENT = 64  # bytes: each tensor of a message begins where an allocator might have put it


class PeerLost(RuntimeError):
    """A transfer failed because the other end is gone: a consequence, never the first failure."""


class BoundaryChanged(InputError):
    """A message is not what both ends agreed on; the text compares it field by field."""


class NothingCame(InputError):
    """The other end has given the step up, and sent word instead of a message: never the first refusal."""


class TensorMeta(NamedTuple):
    """Everything the receiving end must know of a tensor before it arrives.

    Strides are part of it: the same numbers laid out differently add up in a different order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MessageMeta:
    """A message's nesting and its leaves: a `TensorMeta` each, or a constant that needs no transfer."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @cached_property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    @cached_property
    def needs_gradient(self) -> list[bool]:
        """For each tensor, whether it needs a gradient."""
        return [tensor.needs_gradient for tensor in self.tensors]

    def with_zeros(self, gradients: list[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
        """A list of gradients with zeros for those that are absent though the receiver expects them."""
        return [
            meta.empty(device).zero_() if gradient is None else gradient
            for gradient, meta in zip(gradients, self.tensors, strict=True)
        ]

    @cached_property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the message's bytes, and where they end."""
        found = [0]
        for tensor in self.tensors:
            found.append(-(-(found[-1] + tensor.num_bytes) // ALIGNMENT) * ALIGNMENT)
        if self.tensors:
            found[-1] = found[-2] + self.tensors[-1].num_bytes
        return tuple(found)

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a message's bytes: they share its memory, but no version counter."""
        storage = flat.untyped_storage()
        return [
            torch.empty(0, dtype=meta.dtype, device=flat.device).set_(
                storage, offset // meta.dtype.itemsize, meta.shape, meta.stride
            )
            for meta, offset in zip(self.tensors, self.offsets, strict=False)
        ]

    def assemble(self, tensors: list[torch.Tensor]) -> Tree:
        if self.spec.container is None and tensors:
            return tensors[0]
        remaining = iter(tensors)
        return unflatten(
            [next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves], self.spec
        )


class Message(NamedTuple):
    """A tree of tensors on its way, as bytes in a row: one transfer, whatever the types and sizes."""

    meta: MessageMeta
    flat: torch.Tensor  # shape (bytes,), uint8


def pack(
    tree: Tree, *, needs_gradient: list[bool], where: object, agreed: MessageMeta | None = None
) -> Message:
    """Make a message of a stage's output (or of gradients).

    Raises `InputError` for what cannot be sent, `BoundaryChanged` for what is not as `agreed`.
    """
    leaves, spec = flatten(tree)
    flags = iter(needs_gradient)
    metas: list[Any] = []
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            require_dense(leaf, where)
            tensor = dense(leaf.detach())
            tensors.append(tensor)
            metas.append(TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, next(flags)))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            metas.append(leaf)
        else:
            raise InputError(
                "what crosses a stage boundary is a nesting (tuple, list, dict) of tensors and of constants",
                got=type(leaf).__name__,
                where=str(where),
                remedy="return the tensors inside it",
            )
    found = tuple(metas)
    if agreed is None or agreed.leaves != found or agreed.spec != spec:
        actual = MessageMeta(spec, found)
        check_agreed(actual, actual if agreed is None else agreed, where)
        agreed = actual
    return Message(agreed, _flat(tensors, agreed))


def _flat(tensors: list[torch.Tensor], meta: MessageMeta) -> torch.Tensor:
    """The bytes of tensors in a row: of a single one as they are, of several a copy."""
    if len(tensors) == 1:
        return bytes_of(tensors[0])
    offsets = meta.offsets
    device = tensors[0].device if tensors else None
    flat = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
    for tensor, offset in zip(tensors, offsets, strict=False):
        data = bytes_of(tensor)
        flat[offset : offset + data.numel()].copy_(data)
    return flat


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory in the order in which it lies there, as bytes; no copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its elements fill their memory without gaps or overlaps, else a copy.

    So is one that is only marked as conjugated or negated: its memory holds other numbers.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def check_agreed(actual: MessageMeta, agreed: MessageMeta, where: object) -> None:
    """Raise `BoundaryChanged`, with the fields that differ, unless a message is what both ends expect."""
    if actual == agreed:
        return
    lines = []
    if actual.spec != agreed.spec or len(actual.leaves) != len(agreed.leaves):
        lines.append(f"nesting: {actual.spec} instead of {agreed.spec}")
    for index, (new, old) in enumerate(zip(actual.leaves, agreed.leaves, strict=False)):
        if isinstance(new, TensorMeta) and isinstance(old, TensorMeta):
            changed = [n for n in TensorMeta._fields if getattr(new, n) != getattr(old, n)]
            lines += [f"tensor {index}, {n}: {getattr(new, n)} instead of {getattr(old, n)}" for n in changed]
        elif new != old:
            lines.append(f"value {index}: {new!r} instead of {old!r}")
    raise BoundaryChanged(
        "messages between the same stages, for the same kind of input, are alike, or announced one by one",
        got="; ".join(lines),
        where=str(where),
    )
