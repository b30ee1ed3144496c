"""What crosses a stage boundary: agreed once per input signature, then sent as raw bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from .failures import BoundaryChanged
from .tree import Tree, TreeSpec, flatten, unflatten


@dataclass(frozen=True)
class TensorMeta:
    """Everything the receiving end must know of a tensor before it arrives.

    Strides are part of it: the same numbers laid out differently add up in a different order.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class MessageMeta:
    """A message's nesting and its leaves: a `TensorMeta` each, or a constant that needs no transfer."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    def assemble(self, tensors: list[torch.Tensor]) -> Tree:
        remaining = iter(tensors)
        return unflatten(
            [next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves], self.spec
        )


@dataclass(frozen=True)
class Message:
    """A tree of tensors on its way, each dense in memory; `rows` are the same as rows of bytes."""

    meta: MessageMeta
    tensors: list[torch.Tensor]
    rows: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(row.numel() for row in self.rows)


def pack(tree: Tree, *, needs_gradient: list[bool], where: str) -> Message:
    """Make a message of a stage's output (or of gradients). Raises `TypeError` for what cannot be sent."""
    leaves, spec = flatten(tree)
    flags = iter(needs_gradient)
    metas: list[Any] = []
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensor = dense(leaf.detach())
            tensors.append(tensor)
            metas.append(TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, next(flags)))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            metas.append(leaf)
        else:
            raise TypeError(
                f"rule:   what crosses a stage boundary is a nesting (tuple, list, dict) of tensors and "
                f"plain constants\ngot:    {type(leaf).__name__}\nwhere:  {where}\n"
                "remedy: return the tensors inside it"
            )
    rows = [raw_bytes(tensor) for tensor in tensors if tensor.numel()]
    return Message(MessageMeta(spec, tuple(metas)), tensors, rows)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its elements fill their memory without gaps or overlaps, else a copy.

    So is one that is only marked as conjugated or negated: its memory holds other numbers.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one row of bytes, whatever its dtype and strides; no copy."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def check_agreed(actual: MessageMeta, agreed: MessageMeta, where: str) -> None:
    """Raise `BoundaryChanged`, with the fields that differ, unless a message is what both ends expect."""
    if actual == agreed:
        return
    lines = []
    if actual.spec != agreed.spec or len(actual.leaves) != len(agreed.leaves):
        lines.append(f"nesting: {actual.spec} instead of {agreed.spec}")
    for index, (new, old) in enumerate(zip(actual.leaves, agreed.leaves, strict=False)):
        if isinstance(new, TensorMeta) and isinstance(old, TensorMeta):
            changed = [f.name for f in fields(new) if getattr(new, f.name) != getattr(old, f.name)]
            lines += [f"tensor {index}, {n}: {getattr(new, n)} instead of {getattr(old, n)}" for n in changed]
        elif new != old:
            lines.append(f"value {index}: {new!r} instead of {old!r}")
    raise BoundaryChanged(
        "rule:   the same input signature gives the same messages, so that the receiver can prepare\n"
        f"got:    {'; '.join(lines)}\nwhere:  {where}\n"
        "remedy: let shapes depend on the input's shape alone, or pad to a fixed size"
    )
