"""A batch, nested as the user gives it, and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..plan.errors import require, require_count

Tree = Any  # a tensor, or any nesting of tuples, lists and dicts of tensors and constants


class TreeSpec(NamedTuple):
    """A nesting without its leaves; keys are those of a dict."""

    container: Any = None  # a class, or None for a leaf
    keys: tuple[Any, ...] = ()
    children: tuple[TreeSpec, ...] = ()

    def __str__(self) -> str:
        if self.container is None:
            return "*"
        names = [f"{key!r}: " for key in self.keys] or [""] * len(self.children)
        inside = ", ".join(f"{name}{child}" for name, child in zip(names, self.children, strict=True))
        return f"{self.container.__name__}({inside})"


LEAF = TreeSpec()


def flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """(leaves, what is needed to put them together again)."""
    if isinstance(tree, torch.Tensor):  # by far the most common
        return [tree], LEAF
    if isinstance(tree, dict):
        keys, values = tuple(tree), list(tree.values())
    elif isinstance(tree, list | tuple):
        keys, values = (), list(tree)
    else:
        return [tree], LEAF
    parts = [flatten(value) for value in values]
    leaves = [leaf for part, _ in parts for leaf in part]
    return leaves, TreeSpec(type(tree), keys, tuple(spec for _, spec in parts))


def unflatten(leaves: list[Any], spec: TreeSpec) -> Tree:
    """The nesting that `flatten` took apart, with these leaves."""
    return _build(iter(leaves), spec)


def _build(leaves: Iterator[Any], spec: TreeSpec) -> Tree:
    if spec.container is None:
        return next(leaves)
    values = [_build(leaves, child) for child in spec.children]
    if issubclass(spec.container, dict):
        mapping = spec.container()  # a defaultdict takes no items here, and loses its default
        for key, value in zip(spec.keys, values, strict=True):
            mapping[key] = value
        return mapping
    if hasattr(spec.container, "_make"):  # a named tuple takes its fields one by one
        return spec.container._make(values)
    return spec.container(values)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same nesting with `function` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten([function(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def tensors(tree: Tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


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
