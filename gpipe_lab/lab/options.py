"""The options of a pipeline and of a step, each written once, and how functions take them as keywords."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from ..engine.batch import Tree
from ..engine.loss import LossFn, LossRule, read_loss
from ..engine.pace import Pace
from ..engine.updates import steps_alone
from ..plan.errors import require, require_count
from ..plan.recompute import parse_mode
from ..plan.schedule import Schedule

Partition = str | Sequence[int]
Ties = Sequence[tuple[str, ...]]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model lies on the ranks, what its loss is, and how it learns.

    loss_fn(output, target) is a mean over rows unless `loss_weight` (target → weight) or
    `loss_reduction="sum"` says otherwise. torch's own losses are read, with their `reduction`, `ignore_index`
    and class weights; a function or class of your own is not looked into: where it leaves rows out, give
    `loss_weight=lambda target: (target != -100).sum()`.
    optimizer: a function from named parameters to a torch Optimizer, such as
    `functools.partial(torch.optim.SGD, lr=0.1)`; scheduler: from that to a learning-rate scheduler, which
    moves at every update, or with `scheduler_per="epoch"` when `pipe.scheduler_step()` is called.
    max_norm: clip gradients by their norm over all stages.
    partition: "uniform", or a list with the number of layers of each stage; in a run also "parameters",
    "flops", "time" or "memory", measured first.
    stage_to_rank: where the stages are, for schedules with several on a rank, `gl.interleaved(4, 8)` itself
    or its tuple; one stage a rank unless given.
    ties: tuples of parameter names that are one weight, for factories; shared modules are found.
    num_replicas: that many copies of the pipeline, on ranks one after another, share the batch; their
    gradients are summed once a step.
    autocast: torch.bfloat16 runs layers and loss under autocast; weights and gradients keep their dtype.
    seed: keys random layers and factories.
    """

    loss_fn: LossFn | None = None
    loss_weight: Callable[[Tree], float] | None = None
    loss_reduction: str | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    scheduler: Callable[..., Any] | None = None
    scheduler_per: str = "step"
    max_norm: float | None = None
    partition: Partition = "uniform"
    stage_to_rank: Sequence[int] | Schedule | None = None
    ties: Ties | None = None
    num_replicas: int = 1
    autocast: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work, before any process is asked."""
        for name, function in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            require(
                function is None or callable(function),
                f"{name} is a function that makes one, on every rank for the weights there",
                got=f"{name}={function!r}",
                where="Lab.pipeline",
                remedy="optimizer=functools.partial(torch.optim.SGD, lr=0.1)",
            )
            given_a_metric = name == "scheduler" and self.scheduler_per == "epoch"
            require(
                given_a_metric or steps_alone(class_made_by(function)),
                f"the step of an {name} here needs neither a closure nor a metric",
                got=f"{name} makes a {getattr(class_made_by(function), '__name__', '')}",
                where="Lab.pipeline",
                remedy="torch.optim.AdamW"
                if name == "optimizer"
                else 'scheduler_per="epoch", and pipe.scheduler_step(metric) after each',
            )
        require(
            self.scheduler_per in ("step", "epoch"),
            'scheduler_per is "step" or "epoch"',
            got=f"scheduler_per={self.scheduler_per!r}",
            where="Lab.pipeline",
            remedy='scheduler_per="epoch", and pipe.scheduler_step() after each',
        )
        require(
            self.scheduler is None or self.optimizer is not None,
            "a scheduler needs an optimizer",
            got="optimizer=None",
            where="Lab.pipeline",
            remedy="optimizer=functools.partial(torch.optim.SGD, lr=0.1)",
        )
        norm = self.max_norm
        require(
            norm is None or (isinstance(norm, int | float) and math.isfinite(norm) and norm > 0),
            "max_norm is a positive number",
            got=f"max_norm={norm!r}",
            where="Lab.pipeline",
            remedy="max_norm=1.0",
        )
        require(
            self.autocast in (None, torch.bfloat16),
            "autocast is torch.bfloat16: float16 would need its gradients scaled",
            got=f"autocast={self.autocast}",
            where="autocast",
            remedy="autocast=torch.bfloat16",
        )
        require_count(self.num_replicas, "num_replicas", where="num_replicas")
        self.loss_rule()

    def loss_rule(self) -> LossRule | None:
        """How the loss of a batch is made up of those of its micro-batches."""
        if self.loss_fn is None:
            return None
        return read_loss(self.loss_fn, loss_weight=self.loss_weight, loss_reduction=self.loss_reduction)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is run.

    num_microbatches: for a schedule that is given as a function of (number of ranks, number of
    micro-batches).
    checkpoint: "never", "always", "except_last" or "every:k"; early: recompute at most one ahead of its
    gradient. A recompute sees a layer's buffers, plain numbers and strings, and random generators of its own
    as its forward saw them; lists, dicts and other objects that a forward changes in place it sees as they
    are.
    pace: a `gl.Pace`; None runs at full speed.
    hoist: how many computations ahead of need receives are posted. strict: one transfer at a time on each
    rank.
    profile: run torch's profiler in the (last measured) step, which takes time; `run.profiles` has a trace
    for each rank, with every operation named.
    outputs: bring the model's outputs of a training step back, for metrics: `run.outputs()`.
    """

    num_microbatches: int | None = None
    checkpoint: str = "never"
    early: bool = False
    pace: Pace | None = None
    hoist: int = 2
    strict: bool = False
    profile: bool = False
    outputs: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work, before any process is asked."""
        parse_mode(self.checkpoint)
        require(
            self.pace is None or isinstance(self.pace, Pace),
            "pace is a gl.Pace",
            got=repr(self.pace),
            where="pace",
            remedy="pace=gl.Pace(forward_ms=10, backward_ms=20)",
        )


def takes(*kinds: type, without: Collection[str] = ()) -> Callable[[_F], _F]:
    """Let a function with `**options` show the fields of these dataclasses as its own keywords.

    They are in its signature, for help() and completion, and their descriptions follow its docstring;
    a keyword that is none of them is a TypeError, as Python's own would be.
    """
    names = [field.name for kind in kinds for field in fields(kind) if field.name not in without]

    def decorate(function: _F) -> _F:
        own = inspect.signature(function)
        *first, last = own.parameters.values()
        assert last.kind is last.VAR_KEYWORD, "options are taken as **options"
        keywords = [
            inspect.Parameter(f.name, last.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for kind in kinds
            for f in fields(kind)
            if f.name in names
        ]
        allowed = {p.name for p in (*first, *keywords)}

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - allowed:
                near = difflib.get_close_matches(name, allowed, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
            return function(*args, **given)

        vars(checked)["__signature__"] = own.replace(parameters=[*first, *keywords])
        about = [_described(kind, without) for kind in kinds]
        checked.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), *about])
        return checked  # type: ignore[return-value]

    return decorate


def _described(kind: type, without: Collection[str]) -> str:
    """What a dataclass's docstring says of its fields, but for some; each begins a line with its name."""
    entries = re.split(r"\n(?=\w+[:(])", inspect.cleandoc(kind.__doc__ or ""))
    return "\n".join(e for e in entries if re.split(r"\W", e, maxsplit=1)[0] not in without)


def choose(kind: type[Any], given: dict[str, Any]) -> Any:
    """The options of one kind among those given."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


def class_made_by(function: Callable | None) -> type | None:
    """The class that a function makes instances of, where it says so without being called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, type) else None
