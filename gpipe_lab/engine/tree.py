"""Nested values (tuples, named tuples, lists, dicts) seen as a flat list of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

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
