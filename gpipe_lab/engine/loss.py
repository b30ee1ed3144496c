"""How the losses of micro-batches combine into the loss of the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..plan.errors import require
from .batch import Tree, tensors

LossFn = Callable[[Any, Any], torch.Tensor]
OPTIONS = ("reduction", "ignore_index", "weight")  # of a torch loss, that decide how it averages
IGNORED_BY_DEFAULT = -100  # torch's default ignore_index


@dataclass(frozen=True)
class LossRule:
    """A loss and the weight of a micro-batch in it.

    A mean is weighted by `weight(target, rows)`; where that is None the loss is a sum and every
    micro-batch counts in full.
    """

    loss_fn: LossFn
    weight: Callable[[Tree, int], float] | None

    def scales(self, targets: list[Tree], sizes: tuple[int, ...]) -> list[float]:
        """What each micro-batch's loss is multiplied by, known before the first backward.

        The scales of a mean add up to 1; a micro-batch without weight has scale 0.
        """
        if self.weight is None:
            return [1.0] * len(targets)
        weights = [float(self.weight(t, n)) for t, n in zip(targets, sizes, strict=True)]
        require(
            all(math.isfinite(w) and w >= 0 for w in weights),
            "the weight of a micro-batch is a finite number, not negative",
            got=f"weights {weights}",
            where="loss_weight",
        )
        total = sum(weights)
        return [w / total if total else 0.0 for w in weights]


def read_loss(
    loss_fn: LossFn,
    *,
    loss_weight: Callable[[Tree], float] | None = None,
    loss_reduction: str | None = None,
) -> LossRule:
    """Find out how `loss_fn(output, target)` averages.

    A mean over rows unless told otherwise: `loss_weight` gives the weight of a target,
    `loss_reduction="sum"` says that losses add up. torch's own losses are read: their reduction,
    `ignore_index` and class weights. Raises `InputError` for what cannot be combined.
    """
    require(
        callable(loss_fn), "loss_fn is a function of (output, target)", got=repr(loss_fn), where="loss_fn"
    )
    require(
        not (isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters())),
        "a loss has no weights to train: only the model's are",
        got=f"{type(loss_fn).__name__} with parameters",
        where="loss_fn",
        remedy="make its weights part of the model's last layer, or loss_fn.requires_grad_(False)",
    )
    require(
        loss_weight is None or callable(loss_weight),
        "loss_weight is a function from a target to its weight",
        got=f"loss_weight={loss_weight!r}",
        where="loss_fn",
        remedy="loss_weight=lambda target: target.numel()",
    )
    options = _torch_options(loss_fn)
    require(
        bool(options)
        or loss_reduction is not None
        or loss_weight is not None
        or not _averages_otherwise(loss_fn),
        "a loss of your own that derives from torch's, or has a reduction of its own, says how it averages",
        got=getattr(loss_fn, "__name__", type(loss_fn).__name__),
        where="loss_fn",
        remedy='loss_reduction="sum"; loss_reduction="mean" for a mean over rows; '
        "loss_weight=lambda target: (target != -100).sum() for one over the targets that count",
    )
    reduction = loss_reduction or options.get("reduction", "mean")
    require(
        reduction in ("mean", "sum", "batchmean"),
        'a loss is one number: reduction "mean" or "sum"',
        got=f"reduction={reduction!r}",
        where="loss_fn",
        remedy='reduction="mean"',
    )
    given = options.get("reduction", reduction)
    require(
        (given == "sum") == (reduction == "sum"),
        "loss_reduction says what loss_fn does",
        got=f"loss_reduction={reduction!r} for a loss with reduction={given!r}",
        where="loss_fn",
        remedy=f"loss_reduction={given!r}, or leave it out",
    )
    require(
        reduction != "sum" or loss_weight is None,
        "the weights of micro-batches are for means: losses that are sums add up",
        got="loss_weight with a sum",
        where="loss_fn",
        remedy="leave out loss_weight",
    )
    if reduction == "sum":
        return LossRule(loss_fn, None)
    if loss_weight is not None:
        return LossRule(loss_fn, lambda target, rows: loss_weight(target))
    if "ignore_index" in options:
        return LossRule(
            loss_fn, functools.partial(_class_weight, options["ignore_index"], options.get("weight"))
        )
    return LossRule(loss_fn, _rows)


def _rows(target: Tree, rows: int) -> float:
    return rows


def _class_weight(ignore_index: int, class_weights: torch.Tensor | None, target: Tree, rows: int) -> float:
    """The denominator of torch's mean: counted targets, or the sum of their class weights."""
    (classes,) = tensors(target)
    if classes.is_floating_point():  # class probabilities: the mean is over rows
        return rows
    counted = classes[classes != ignore_index]
    if class_weights is None:
        return counted.numel()
    return class_weights.to(counted.device)[counted].sum().item()


def _torch_options(loss_fn: LossFn) -> dict[str, Any]:
    """reduction, ignore_index and weight of a module or function of torch's, or a partial of one.

    Another loss may use these names for something else, so that nothing is read from it.
    """
    function, given = _unwrapped(loss_fn)
    if isinstance(loss_fn, nn.Module):
        forward = getattr(type(loss_fn), "forward", None)
        is_torchs = getattr(forward, "__module__", "") == nn.modules.loss.__name__
        given = vars(loss_fn) | loss_fn._buffers if is_torchs else {}
    elif getattr(function, "__module__", "") != F.__name__:
        given = {}
    elif function in (F.cross_entropy, F.nll_loss):
        given.setdefault("ignore_index", IGNORED_BY_DEFAULT)
    return {name: value for name, value in given.items() if name in OPTIONS}


def _averages_otherwise(loss_fn: LossFn) -> bool:
    """Whether a loss of the user's own looks as if it were no mean over rows."""
    function, given = _unwrapped(loss_fn)
    derived = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss)
    return derived or given.get("reduction", getattr(function, "reduction", "mean")) in ("sum", "none")


def _unwrapped(loss_fn: LossFn) -> tuple[Any, dict[str, Any]]:
    """The function within partials, and the keywords they give it."""
    given: dict[str, Any] = {}
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        given = {**function.keywords, **given}
        function = function.func
    return function, given
