"""A batch, nested as the user gives it, and its micro-batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..plan.errors import InputError, require, require_count

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


@dataclass(frozen=True)
class Whole:
    """A part of a batch that every micro-batch gets as it is; made by `whole`."""

    value: Tree


def whole(value: Tree) -> Whole:
    """Mark a part of the inputs or targets that has no rows: every micro-batch gets all of it.

    For a (T, T) attention mask or a table of positions: `lab.run(schedule, model, (x, gl.whole(mask)), y)`.
    Without it a tensor is cut along its first dimension, also where that is the batch's size by chance.
    """
    return Whole(value)


def unmarked(batch: Tree) -> Tree:
    """A batch that is not cut: what `whole` has marked is in it like the rest."""
    leaves, spec = flatten(batch)
    return unflatten([leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves], spec)


def batch_size(batch: Tree) -> int:
    """Rows of a batch: the first dimension, the same for all its tensors. Raises `InputError` otherwise."""
    leaves, _ = flatten(batch)
    for leaf in leaves:
        _require_divisible(leaf)
    shapes = [tuple(t.shape) for t in tensors(batch) if t.dim() > 0]
    require(
        len({shape[0] for shape in shapes}) == 1,
        "the tensors of a batch have the same number of rows (first dimension)",
        got=f"shapes {shapes}",
        where="batch",
        remedy="give at least one tensor, each with the batch as its first dimension, "
        "or gl.whole(mask) for one that every micro-batch needs whole",
    )
    return shapes[0][0]


def require_dense(tensor: torch.Tensor, where: object) -> None:
    """Raise `InputError` for a tensor that is not all its values in a row of memory."""
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta:
        return
    if tensor.is_nested:
        got, remedy = "a nested tensor", "torch.nested.to_padded_tensor(x, 0.0)"
    elif tensor.is_meta:
        got, remedy = "a tensor on the meta device", 'torch.randn(..., device="cpu")'
    else:
        got, remedy = f"a tensor of layout {tensor.layout}", "x.to_dense()"
    rule = "tensors of a batch, and those that cross stage boundaries, are dense and have values"
    raise InputError(rule, got=got, where=str(where), remedy=remedy)


def _require_divisible(leaf: Any) -> None:
    """Raise `InputError` for what has rows and is not a tensor that can be cut along them."""
    if isinstance(leaf, Whole):
        return
    if isinstance(leaf, torch.Tensor):
        require_dense(leaf, "batch")
        return
    require(
        not hasattr(leaf, "shape"),
        "what is split into micro-batches is tensors",
        got=type(leaf).__name__,
        where="batch",
        remedy="torch.as_tensor(array)",
    )
    require(
        not _holds_tensors(leaf),
        "a batch is a nesting of tuples, lists and dicts: nothing looks into other objects",
        got=f"{type(leaf).__name__} with tensors",
        where="batch",
        remedy="dict(batch)" if isinstance(leaf, Mapping) else "vars(batch), or a tuple of its tensors",
    )


def _holds_tensors(value: Any) -> bool:
    """Whether an object that is neither a tuple, a list nor a dict has tensors inside."""
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, set | frozenset):
        inside = list(value)
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return any(tensors(each) for each in inside)


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

    Constants, zero-dimensional tensors and what is marked by `whole` go to every micro-batch as they are.
    """
    sizes = microbatch_sizes(batch_size(batch), num_microbatches)
    leaves, spec = flatten(batch)
    if num_microbatches > 1:
        _warn_of_squares(leaves, sum(sizes))

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return [part.clone() for part in leaf.detach().split(sizes)]
        return [leaf.value if isinstance(leaf, Whole) else leaf] * num_microbatches

    return [unflatten(list(row), spec) for row in zip(*map(parts, leaves), strict=True)]


def _warn_of_squares(leaves: list[Any], rows: int) -> None:
    """Of several tensors a square one as long as the batch may be a mask that is not to be cut."""
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    for tensor in found if len(found) > 1 else []:
        if tensor.shape == (rows, rows) and (tensor.is_floating_point() or tensor.dtype is torch.bool):
            warnings.warn(
                f"a tensor of shape {tuple(tensor.shape)} in a batch of {rows} rows is cut along its first "
                "dimension; if it is a mask for all rows, give gl.whole(mask)",
                stacklevel=3,
            )


def merge(microbatches: list[Tree]) -> Tree:
    """One batch out of the outputs of micro-batches: their tensors joined along the first dimension.

    A number that each micro-batch has one of (a tensor without dimensions) becomes a tensor with one entry
    for each. Raises `InputError` where they do not fit together.
    """
    _, spec = flatten(microbatches[0])
    _require_joinable(len({str(flatten(m)[1]) for m in microbatches}) == 1, "other nestings")
    columns = zip(*(flatten(m)[0] for m in microbatches), strict=True)
    return unflatten([_joined(column) for column in columns], spec)


def _joined(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        _require_joinable(all(type(v) is type(first) and v == first for v in column), f"values {column}")
        return first
    _require_joinable(all(isinstance(v, torch.Tensor) for v in column), "a tensor from some of them only")
    for value in column:
        require_dense(value, "outputs")
    shapes = [tuple(v.shape) for v in column]
    _require_joinable(len({(len(shape), shape[1:]) for shape in shapes}) == 1, f"shapes {shapes}")
    return torch.cat(column) if first.dim() else torch.stack(column)


def _require_joinable(fits: bool, got: str) -> None:
    require(
        fits,
        "the outputs of micro-batches are alike but for their rows, so that they make the whole batch's",
        got=got,
        where="outputs",
        remedy="num_microbatches=1, or outputs padded to one size, each a tensor",
    )


def signature(microbatch: Tree) -> str:
    """What decides the shapes inside the pipeline: nesting, shapes, dtypes and strides of an input."""
    _, spec = flatten(microbatch)
    parts = map_tensors(lambda t: (tuple(t.shape), t.stride(), str(t.dtype)), microbatch)
    return f"{spec}{parts}"
