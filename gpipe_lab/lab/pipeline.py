"""A model on a lab's workers, step after step, with its weights staying there."""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..engine.batch import Tree
from ..engine.pace import Pace
from ..engine.rank_pipeline import shape_of
from ..engine.saving import latest_save, require_fitting
from ..engine.stage import StepContext
from ..engine.updates import steps_alone
from ..plan.errors import InputError, require, require_count
from ..plan.schedule import Schedule
from ..plan.schedules import forward_only, replicate
from ..plan.simulate import Costs, costs_of
from ..plan.units import parse_bytes
from . import jobs
from .failures import PipelineLost, as_input_errors
from .once import LossOptions, assemble_step, sweep
from .run import Run
from .step import (
    MakeSchedule,
    Partition,
    Plan,
    Ties,
    cut,
    joined,
    made,
    parts_of,
    plan_step,
    read_spec,
)

if TYPE_CHECKING:
    from .lab import Lab

_keys = itertools.count()


class Pipeline:
    """A model whose weights live on a lab's workers and stay there from step to step.

    Made by `Lab.pipeline`. Names are those of the whole model, whatever the number of stages. When the
    workers are replaced (a failure, a stop, `lab.resize`) the weights are gone: every method then raises
    `PipelineLost`, except `load_state_dict`, `load` and `load_state`, which bring the pipeline back.
    """

    def __init__(
        self,
        lab: Lab,
        model: Any,
        *,
        loss: LossOptions,
        optimizer: Callable | None,
        scheduler: Callable | None,
        scheduler_per: str,
        max_norm: float | None,
        partition: Partition,
        stage_to_rank: Sequence[int] | Schedule | None,
        ties: Ties | None,
        num_replicas: int,
        autocast: torch.dtype | None,
        seed: int,
    ) -> None:
        for name, function in (("optimizer", optimizer), ("scheduler", scheduler)):
            require(
                function is None or callable(function),
                f"{name} is a function that makes one, on every rank for the weights there",
                got=f"{name}={function!r}",
                where="Lab.pipeline",
                remedy="optimizer=functools.partial(torch.optim.SGD, lr=0.1)",
            )
            given_a_metric = name == "scheduler" and scheduler_per == "epoch"
            require(
                given_a_metric or steps_alone(_class_made_by(function)),
                f"the step of an {name} here needs neither a closure nor a metric",
                got=f"{name} makes a {getattr(_class_made_by(function), '__name__', '')}",
                where="Lab.pipeline",
                remedy="torch.optim.AdamW"
                if name == "optimizer"
                else 'scheduler_per="epoch", and pipe.scheduler_step(metric) after each',
            )
        require(
            scheduler_per in ("step", "epoch"),
            'scheduler_per is "step" or "epoch"',
            got=f"scheduler_per={scheduler_per!r}",
            where="Lab.pipeline",
            remedy='scheduler_per="epoch", and pipe.scheduler_step() after each',
        )
        require(
            scheduler is None or optimizer is not None,
            "a scheduler needs an optimizer",
            got="optimizer=None",
            where="Lab.pipeline",
            remedy="optimizer=functools.partial(torch.optim.SGD, lr=0.1)",
        )
        require(
            max_norm is None
            or (isinstance(max_norm, int | float) and math.isfinite(max_norm) and max_norm > 0),
            "max_norm is a positive number",
            got=f"max_norm={max_norm!r}",
            where="Lab.pipeline",
            remedy="max_norm=1.0",
        )
        self.lab = lab
        self.seed = seed
        self.autocast = autocast
        self._loss = loss
        self._rule = loss.read()
        require_count(num_replicas, "num_replicas", where="Lab.pipeline")
        self.num_replicas = num_replicas
        self.stage_to_rank = _placement(stage_to_rank, max(lab.num_ranks // num_replicas, 1))
        self._stages = cut(model, len(self.stage_to_rank), partition)
        self._options: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
        self._options |= {"scheduler_per": scheduler_per, "max_norm": max_norm, "ties": ties}
        self._key = f"pipeline {next(_keys)}"
        self._steps = 0
        self._costs: Costs | None = None
        self._build()
        weakref.finalize(self, lab.abandoned.append, self._key)

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def _ranks_per_replica(self) -> int:
        return 1 + max(self.stage_to_rank)

    def step(
        self,
        schedule: Schedule | MakeSchedule,
        inputs: Tree,
        targets: Tree,
        *,
        num_microbatches: int | None = None,
        update: bool = True,
        checkpoint: str = "never",
        early: bool = False,
        pace: Pace | None = None,
        hoist: int = 2,
        strict: bool = False,
        profile: bool = False,
        outputs: bool = False,
    ) -> Run:
        """One training step: gradients of the batch, and with `update` an optimizer step.

        schedule: a `gl.Schedule` with the stages where the pipeline has them, or a function that makes one of
        (number of ranks, num_microbatches).
        After an update the next step starts from zeroed gradients; steps without one add up.
        profile: run torch's profiler along, which takes time; `run.profiles` has a trace for each rank.
        outputs: bring the model's outputs back, for metrics: `run.outputs()`.

        Schedule, micro-batches and rows may change from step to step, for a batch that grows with time.
        A loss of an inner layer (load balancing, say) travels in the outputs: the layer returns it beside its
        activations, later layers hand it on, and `loss_fn` adds it.
        """
        require(
            not update or self._options["optimizer"] is not None,
            "an update needs an optimizer",
            got="optimizer=None",
            where="Pipeline.step",
            remedy="lab.pipeline(..., optimizer=functools.partial(torch.optim.SGD, lr=0.1)), or update=False",
        )
        schedule = made(schedule, self._ranks_per_replica, num_microbatches, where="Pipeline.step")
        place = getattr(schedule, "stage_to_rank", self.stage_to_rank)
        require(
            place == self.stage_to_rank or len(set(place)) != self._ranks_per_replica,
            "a pipeline's stages stay where they were put: a schedule for it has them there",
            got=f"{schedule.name!r} with stages on ranks {place}, the pipeline's are on {self.stage_to_rank}",
            where="Pipeline.step",
            remedy="lab.pipeline(..., stage_to_rank=schedule)",
        )
        require(
            getattr(schedule, "trains", True),
            "a training step needs a schedule with backwards",
            got=f"{getattr(schedule, 'name', schedule)!r}",
            where="Pipeline.step",
            remedy="pipe.evaluate(inputs, targets)",
        )
        plan = self._plan(
            replicate(schedule, self.num_replicas),
            inputs,
            targets,
            StepContext(seed=self.seed, step=self._steps, autocast=self.autocast),
            checkpoint=checkpoint,
            early=early,
            pace=pace,
            hoist=hoist,
            profile=profile,
            outputs=outputs,
        )
        replies = self._call(jobs.step, [(job, update, strict) for job in plan.jobs])
        self._steps += 1
        run = replace(assemble_step(self.lab, plan, replies, pace), grad_norm=replies[0][2])
        if pace is None and self._costs is None and self.lab.device_plan.matches_by_order:
            self._costs = costs_of(run.trace)  # the order of transfers comes from them in later steps
        return run

    def evaluate(self, inputs: Tree, targets: Tree, *, num_microbatches: int = 1) -> float:
        """The loss of a batch, with layers in evaluation mode and no gradients."""
        require(self._rule is not None, "an evaluation needs a loss", got="loss_fn=None", where="evaluate")
        return self._forward(inputs, targets, num_microbatches).loss

    def predict(self, inputs: Tree, *, num_microbatches: int = 1) -> Tree:
        """The model's output for a batch, with layers in evaluation mode and no gradients.

        A number that each micro-batch has one of becomes a tensor with an entry for each. Raises `InputError`
        where the micro-batches' outputs do not fit together.
        """
        return self._forward(inputs, None, num_microbatches).outputs()

    def zero_grad(self) -> None:
        self._ask("zero_grad")

    def scheduler_step(self, *metrics: float) -> None:
        """Move the scheduler on, after an epoch say: for a pipeline made with `scheduler_per="epoch"`.

        metrics: what the scheduler's own step is given, such as a loss for ReduceLROnPlateau.
        """
        require(
            self._options["scheduler"] is not None and self._options["scheduler_per"] == "epoch",
            "a scheduler moves at every update, or when it is told to",
            got=f"scheduler={self._options['scheduler']!r}, scheduler_per={self._options['scheduler_per']!r}",
            where="Pipeline.scheduler_step",
            remedy='lab.pipeline(..., scheduler=..., scheduler_per="epoch")',
        )
        require(
            bool(metrics) or steps_alone(_class_made_by(self._options["scheduler"])),
            "a scheduler that goes by a metric is given one",
            got="scheduler_step()",
            where="Pipeline.scheduler_step",
            remedy="pipe.scheduler_step(pipe.evaluate(inputs, targets))",
        )
        self._ask("scheduler_step", *metrics)

    def set_lr(self, lr: float) -> None:
        """Give all weights this learning rate from now on, as `group["lr"] = lr` does in torch.

        A scheduler that works from the rates it began with (LambdaLR, OneCycleLR) goes back to its own.
        """
        require(
            isinstance(lr, int | float) and math.isfinite(lr) and lr >= 0,
            "a learning rate is a number, not negative",
            got=f"lr={lr!r}",
            where="Pipeline.set_lr",
            remedy="pipe.set_lr(0.01)",
        )
        require(
            self._options["optimizer"] is not None,
            "learning rates are an optimizer's",
            got="optimizer=None",
            where="Pipeline.set_lr",
            remedy="lab.pipeline(..., optimizer=functools.partial(torch.optim.SGD, lr=0.1))",
        )
        self._ask("set_lr", lr)

    def learning_rates(self) -> dict[str, float]:
        """Whole-model parameter names to the learning rates of the next update."""
        return joined(self._stages, self._ask("learning_rates"))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole-model parameter names to accumulated gradients, on the CPU."""
        return joined(self._stages, self._call(jobs.gradients))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's weights and buffers, on the CPU, as `nn.Sequential.state_dict` names them."""
        return joined(self._stages, self._ask("state_dict"))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the weights and buffers; brings back a pipeline that was lost, with a new optimizer."""
        if self._is_lost:
            self._build()
        given = {name: shape_of(value) for name, value in state.items()}
        require_fitting(given, joined(self._stages, self._ask("shapes")), "Pipeline.load_state_dict")
        parts = parts_of(self._stages, self.stage_to_rank, state)
        self._call(jobs.ask, [("load_state_dict", part) for part in parts] * self.num_replicas)

    def save(self, path: str | Path) -> Path:
        """Write `state_dict` with torch.save, whole or not at all."""
        path = Path(path)
        state = self.state_dict()
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            torch.save(state, unfinished := os.path.join(folder, path.name))
            os.replace(unfinished, path)
        return path

    def load(self, path: str | Path) -> None:
        """Read what `save` or plain torch wrote, from any number of stages."""
        self.load_state_dict(torch.load(path, weights_only=True))

    def save_state(self, folder: str | Path) -> Path:
        """Write the whole training state into `folder`, in place of the last one, whole or not at all.

        Weights, optimizer, learning rates, gradients not yet used and the number of steps: each rank writes
        its part, in the format of torch.distributed.checkpoint. Returns the save within the folder.
        """
        folder = os.path.abspath(folder)
        return Path(self._call(jobs.save_state, [(folder, self._steps)] * self.lab.num_ranks)[0])

    def load_state(self, folder: str | Path) -> None:
        """Go on from what `save_state` wrote, at any number of stages; brings back a pipeline that was lost.

        With the same stages training continues bitwise as it would have. For plain torch there is
        `gl.load_weights(folder)`. Raises `InputError` where there is no save.
        """
        latest_save(folder)
        if self._is_lost:
            self._build()
        found = self._call(jobs.load_state, [(os.path.abspath(folder),)] * self.lab.num_ranks)[0]
        if isinstance(found, InputError):
            raise found
        self._steps = found

    @property
    def _is_lost(self) -> bool:
        return self.lab.generation != self._generation

    def _build(self) -> None:
        num_ranks = self._ranks_per_replica * self.num_replicas
        require(
            self.lab.num_ranks == num_ranks,
            "a pipeline, or each of its replicas, has a stage on every rank of its lab",
            got=f"{self.num_replicas} x {self._ranks_per_replica} ranks with stages of {self.lab.num_ranks}",
            where="Pipeline",
            remedy=f"lab.resize({num_ranks})",
        )
        specs = read_spec(
            self._stages,
            self.stage_to_rank,
            self.lab.num_ranks,
            seed=self.seed,
            limit_bytes=parse_bytes(self.lab.memory_limit),
            loss_fn=self._loss.loss_fn,
            num_replicas=self.num_replicas,
            **self._options,
        )
        sweep(self.lab)
        with as_input_errors():
            self.lab.call(jobs.build, [(self._key, spec) for spec in specs])
        self._generation = self.lab.generation

    def _plan(
        self, schedule: Schedule, inputs: Tree, targets: Tree | None, step: StepContext, **options: Any
    ) -> Plan:
        return plan_step(
            schedule,
            num_ranks=self.lab.num_ranks,
            layers_per_stage=[len(s.layers) for s in self._stages],
            inputs=inputs,
            targets=targets,
            loss=self._rule,
            costs=self._costs,
            step=step,
            **options,
        )

    def _forward(self, inputs: Tree, targets: Tree | None, num_microbatches: int) -> Run:
        forwards = forward_only(self.num_stages, num_microbatches, stage_to_rank=self.stage_to_rank)
        schedule = replicate(forwards, self.num_replicas)
        step = StepContext(
            seed=self.seed, step=self._steps, training=False, gradients=False, autocast=self.autocast
        )
        plan = self._plan(schedule, inputs, targets, step)
        return assemble_step(
            self.lab, plan, self._call(jobs.step, [(job, False, False) for job in plan.jobs]), None
        )

    def _call(self, function: Callable, args_by_rank: list[tuple] | None = None) -> list[Any]:
        if self._is_lost:
            raise PipelineLost(
                "rule:   a pipeline's weights live in its workers\n"
                "got:    workers that have been replaced since\n"
                "where:  Pipeline\n"
                "remedy: pipe.load_state_dict(saved_state), or make the pipeline anew"
            )
        args = args_by_rank if args_by_rank is not None else [()] * self.lab.num_ranks
        with as_input_errors():
            return self.lab.call(function, [(self._key, *rest) for rest in args], generation=self._generation)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self._call(jobs.ask, [(method, *args)] * self.lab.num_ranks)


def _placement(given: Sequence[int] | Schedule | None, num_ranks: int) -> tuple[int, ...]:
    """The rank of a replica that holds each stage: given, or that of a schedule, or one stage a rank."""
    if given is None:
        return tuple(range(num_ranks))
    place = tuple(given.stage_to_rank if isinstance(given, Schedule) else given)
    require(
        bool(place) and set(place) == set(range(1 + max(place))),
        "stage_to_rank has a rank for every stage, and a stage for every rank",
        got=f"stage_to_rank={place}",
        where="Lab.pipeline",
        remedy="stage_to_rank=gl.interleaved(4, 8), or (0, 1, 2, 3, 0, 1, 2, 3)",
    )
    return place


def _class_made_by(function: Callable | None) -> type | None:
    """The class that a function makes instances of, where it says so without being called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, type) else None
