"""Split a batch into micro-batches and merge what comes back."""

from __future__ import annotations

from typing import Any

import torch

from ..plan.errors import require, require_count
from .tree import Tree, flatten, map_tensors, tensors, unflatten


def batch_size(batch: Tree) -> int:
    """Rows of a batch: the first dimension, the same for all its tensors. Raises `InputError` otherwise."""
    leaves, _ = flatten(batch)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and not isinstance(leaf, torch.Tensor)]
    require(
        not arrays,
        "what is split into micro-batches is tensors",
        got=", ".join(type(array).__name__ for array in arrays),
        where="batch",
        remedy="torch.as_tensor(array)",
    )
    shapes = [tuple(t.shape) for t in tensors(batch) if t.dim() > 0]
    require(
        len({shape[0] for shape in shapes}) == 1,
        "the tensors of a batch have the same number of rows (first dimension)",
        got=f"shapes {shapes}",
        where="batch",
        remedy="give at least one tensor, each with the batch as its first dimension",
    )
    return shapes[0][0]


def microbatch_sizes(num_rows: int, num_microbatches: int) -> tuple[int, ...]:
    """Rows of every micro-batch, as even as can be: 10 rows in 4 are (3, 3, 2, 2).

    Raises `InputError` where a micro-batch would be empty.
    """
    require_count(num_microbatches, "num_microbatches", where="split")
    require(
        num_rows >= num_microbatches,
        "every micro-batch has at least one row",
        got=f"a batch of {num_rows} rows for {num_microbatches} micro-batches",
        where="split",
        remedy=f"num_microbatches={max(num_rows, 1)} or fewer, or a larger batch",
    )
    share, left_over = divmod(num_rows, num_microbatches)
    return tuple(share + (m < left_over) for m in range(num_microbatches))


def split(batch: Tree, num_microbatches: int) -> list[Tree]:
    """The micro-batches, as copies: a view of the batch would keep all of it alive.

    Constants and zero-dimensional tensors go to every micro-batch as they are.
    """
    sizes = microbatch_sizes(batch_size(batch), num_microbatches)
    leaves, spec = flatten(batch)

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return [part.clone() for part in leaf.detach().split(sizes)]
        return [leaf] * num_microbatches

    return [unflatten(list(row), spec) for row in zip(*map(parts, leaves), strict=True)]


def merge(microbatches: list[Tree]) -> Tree:
    """One batch out of micro-batches of the same nesting: tensors joined along their first dimension."""
    _, spec = flatten(microbatches[0])
    columns = zip(*(flatten(m)[0] for m in microbatches), strict=True)

    def joined(column: tuple[Any, ...]) -> Any:
        first = column[0]
        return torch.cat(column) if isinstance(first, torch.Tensor) and first.dim() > 0 else first

    return unflatten([joined(column) for column in columns], spec)


def signature(microbatch: Tree) -> str:
    """What decides the shapes inside the pipeline: nesting, shapes, dtypes and strides of an input."""
    _, spec = flatten(microbatch)
    parts = map_tensors(lambda t: (tuple(t.shape), t.stride(), str(t.dtype)), microbatch)
    return f"{spec}{parts}"
