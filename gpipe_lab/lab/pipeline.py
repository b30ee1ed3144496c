"""A model on a lab's workers, step after step, with its weights staying there."""

from __future__ import annotations

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
from ..engine.executor import RankResult
from ..engine.rank_pipeline import PipelineSpec, RankPipeline, shape_of
from ..engine.saving import latest_save, require_fitting
from ..engine.stage import StepContext
from ..engine.updates import steps_alone
from ..plan.errors import InputError, require
from ..plan.schedule import Schedule
from ..plan.schedules import forward_only, replicate
from ..plan.simulate import Costs, costs_of
from ..plan.units import parse_bytes
from . import worker
from .failures import PipelineLost, as_input_errors
from .model import cut, joined, parts_of, rank_specs
from .options import ModelOptions, StepOptions, choose, class_made_by, takes
from .run import Run, assemble, middle
from .step import MakeSchedule, PreparedStep, made, prepare_step

if TYPE_CHECKING:
    from .lab import Lab

_keys = itertools.count()


class Pipeline:
    """A model whose weights live on a lab's workers and stay there from step to step.

    Made by `Lab.pipeline`. Names are those of the whole model, whatever the number of stages. When the
    workers are replaced (a failure, a stop, `lab.resize`) the weights are gone: every method then raises
    `PipelineLost`, except `load_state_dict`, `load` and `load_state`, which bring the pipeline back.
    """

    def __init__(self, lab: Lab, model: Any, options: ModelOptions) -> None:
        """Check and cut the model; `build` puts it on the workers."""
        self.lab = lab
        self.options = options
        self.stage_to_rank = _placement(options.stage_to_rank, max(lab.num_ranks // options.num_replicas, 1))
        self._stages = cut(model, len(self.stage_to_rank), options.partition)
        self._key = f"pipeline {next(_keys)}"
        self._steps = 0
        self._costs: Costs | None = None
        self._generation: int | None = None  # of the workers that it lives on

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def _ranks_per_replica(self) -> int:
        return 1 + max(self.stage_to_rank)

    @property
    def num_replicas(self) -> int:
        return self.options.num_replicas

    @takes(StepOptions)
    def step(
        self,
        schedule: Schedule | MakeSchedule,
        inputs: Tree,
        targets: Tree,
        *,
        update: bool = True,
        **options: Any,
    ) -> Run:
        """One training step: gradients of the batch, and with `update` an optimizer step.

        schedule: a `gl.Schedule` with the stages where the pipeline has them, or a function that makes one of
        (number of ranks, num_microbatches).
        After an update the next step starts from zeroed gradients; steps without one add up.

        Schedule, micro-batches and rows may change from step to step, for a batch that grows with time.
        A loss of an inner layer (load balancing, say) travels in the outputs: the layer returns it beside its
        activations, later layers hand it on, and `loss_fn` adds it.
        """
        require(
            not update or self.options.optimizer is not None,
            "an update needs an optimizer",
            got="optimizer=None",
            where="Pipeline.step",
            remedy="lab.pipeline(..., optimizer=functools.partial(torch.optim.SGD, lr=0.1)), or update=False",
        )
        how: StepOptions = choose(StepOptions, options)
        schedule = made(schedule, self._ranks_per_replica, how.num_microbatches, where="Pipeline.step")
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
        step = self._prepare(replicate(schedule, self.num_replicas), inputs, targets, how)
        results = self._each([(worker.step, job, update, how.strict) for job in step.jobs])
        self._steps += 1
        run = replace(self._assemble(step, results, how), grad_norm=results[0][2])
        if how.pace is None and self._costs is None and self.lab.device_plan.matches_by_order:
            self._costs = costs_of(run.trace)  # the order of transfers comes from them in later steps
        return run

    def run_once(
        self,
        schedule: Schedule,
        inputs: Tree,
        targets: Tree | None,
        how: StepOptions,
        *,
        warmup: bool,
        repeats: int,
    ) -> Run:
        """Live for `repeats` steps from the same weights, in one call: built, measured, gone again.

        Where the order of transfers counts, a first life has shown what each stage costs.
        """
        if warmup and how.pace is None and self._costs is None and self.lab.device_plan.matches_by_order:
            first = replace(how, profile=False)
            cold = self.run_once(schedule, inputs, targets, first, warmup=False, repeats=1)
            self._costs = costs_of(cold.trace)
        step = self._prepare(schedule, inputs, targets, how, training=getattr(schedule, "trains", True))
        plain = [replace(job, profile=False) for job in step.jobs]
        requests = [
            [
                (worker.build, self._key, spec),
                (
                    worker.measure,
                    self._key,
                    [replace(job, pace=None)] * warmup + [job] * (repeats - 1) + [last],
                    how.strict,
                ),
                (worker.drop, self._key),
            ]
            for spec, job, last in zip(self._specs(), plain, step.jobs, strict=True)
        ]
        try:
            with as_input_errors():
                replies = self.lab.call(worker.serve, self._with_drops(requests))
        except BaseException:  # where the workers live on, so does what they have built
            self.lab.abandoned.append(self._key)
            raise
        steps, gradients = zip(*(measured for *_, measured, _ in replies), strict=True)
        by_step = list(zip(*steps, strict=True))[warmup:]
        runs = [self._assemble(step, list(results), how) for results in by_step]
        found = {name: g for part in gradients for name, g in part.items()}
        return replace(middle(runs), _gradients=found, profiles=runs[-1].profiles)

    def evaluate(self, inputs: Tree, targets: Tree, *, num_microbatches: int = 1) -> float:
        """The loss of a batch, with layers in evaluation mode and no gradients."""
        require(
            self.options.loss_fn is not None,
            "an evaluation needs a loss",
            got="loss_fn=None",
            where="evaluate",
        )
        return self._forward(inputs, targets, num_microbatches).loss

    def predict(self, inputs: Tree, *, num_microbatches: int = 1) -> Tree:
        """The model's output for a batch, with layers in evaluation mode and no gradients.

        A number that each micro-batch has one of becomes a tensor with an entry for each. Raises `InputError`
        where the micro-batches' outputs do not fit together.
        """
        return self._forward(inputs, None, num_microbatches).outputs()

    def zero_grad(self) -> None:
        self._apply(RankPipeline.zero_grad)

    def scheduler_step(self, *metrics: float) -> None:
        """Move the scheduler on, after an epoch say: for a pipeline made with `scheduler_per="epoch"`.

        metrics: what the scheduler's own step is given, such as a loss for ReduceLROnPlateau.
        """
        scheduler, per = self.options.scheduler, self.options.scheduler_per
        require(
            scheduler is not None and per == "epoch",
            "a scheduler moves at every update, or when it is told to",
            got=f"scheduler={scheduler!r}, scheduler_per={per!r}",
            where="Pipeline.scheduler_step",
            remedy='lab.pipeline(..., scheduler=..., scheduler_per="epoch")',
        )
        require(
            bool(metrics) or steps_alone(class_made_by(scheduler)),
            "a scheduler that goes by a metric is given one",
            got="scheduler_step()",
            where="Pipeline.scheduler_step",
            remedy="pipe.scheduler_step(pipe.evaluate(inputs, targets))",
        )
        self._apply(RankPipeline.scheduler_step, *metrics)

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
            self.options.optimizer is not None,
            "learning rates are an optimizer's",
            got="optimizer=None",
            where="Pipeline.set_lr",
            remedy="lab.pipeline(..., optimizer=functools.partial(torch.optim.SGD, lr=0.1))",
        )
        self._apply(RankPipeline.set_lr, lr)

    def learning_rates(self) -> dict[str, float]:
        """Whole-model parameter names to the learning rates of the next update."""
        return joined(self._stages, self._apply(RankPipeline.learning_rates))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole-model parameter names to accumulated gradients, on the CPU."""
        return joined(self._stages, self._apply(worker.gradients))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's weights and buffers, on the CPU, as `nn.Sequential.state_dict` names them."""
        return joined(self._stages, self._apply(RankPipeline.state_dict))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the weights and buffers; brings back a pipeline that was lost, with a new optimizer."""
        if self._is_lost:
            self.build()
        given = {name: shape_of(value) for name, value in state.items()}
        expected = joined(self._stages, self._apply(RankPipeline.shapes))
        require_fitting(given, expected, "Pipeline.load_state_dict")
        parts = parts_of(self._stages, self.stage_to_rank, state)
        loads = [(worker.apply, RankPipeline.load_state_dict, part) for part in parts]
        self._each(loads * self.num_replicas)

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
        return Path(self._each([(worker.save, os.path.abspath(folder), self._steps)] * self.lab.num_ranks)[0])

    def load_state(self, folder: str | Path) -> None:
        """Go on from what `save_state` wrote, at any number of stages; brings back a pipeline that was lost.

        With the same stages training continues bitwise as it would have. For plain torch there is
        `gl.load_weights(folder)`. Raises `InputError` where there is no save.
        """
        latest_save(folder)
        if self._is_lost:
            self.build()
        found = self._each([(worker.load, os.path.abspath(folder))] * self.lab.num_ranks)[0]
        if isinstance(found, InputError):
            raise found
        self._steps = found

    @property
    def _is_lost(self) -> bool:
        return self.lab.generation != self._generation

    def build(self) -> None:
        """Put the stages on the workers, as the model has them."""
        requests = [[(worker.build, self._key, spec)] for spec in self._specs()]
        with as_input_errors():
            self.lab.call(worker.serve, self._with_drops(requests))
        if self._generation is None:
            weakref.finalize(self, self.lab.abandoned.append, self._key)
        self._generation = self.lab.generation

    def _specs(self) -> list[PipelineSpec]:
        num_ranks = self._ranks_per_replica * self.num_replicas
        require(
            self.lab.num_ranks == num_ranks,
            "a pipeline, or each of its replicas, has a stage on every rank of its lab",
            got=f"{self.num_replicas} x {self._ranks_per_replica} ranks with stages of {self.lab.num_ranks}",
            where="Pipeline",
            remedy=f"lab.resize({num_ranks})",
        )
        limit_bytes = parse_bytes(self.lab.memory_limit)
        return rank_specs(self._stages, self.stage_to_rank, num_ranks, self.options, limit_bytes=limit_bytes)

    def _prepare(
        self,
        schedule: Schedule,
        inputs: Tree,
        targets: Tree | None,
        how: StepOptions,
        *,
        training: bool = True,
    ) -> PreparedStep:
        options = self.options
        return prepare_step(
            schedule,
            inputs,
            targets,
            num_ranks=self.lab.num_ranks,
            layers_per_stage=[len(s.layers) for s in self._stages],
            loss=options.loss_rule(),
            context=StepContext(
                seed=options.seed,
                step=self._steps,
                training=training,
                gradients=training,
                autocast=options.autocast,
            ),
            options=how,
            costs=self._costs,
        )

    def _assemble(
        self, step: PreparedStep, replies: Sequence[tuple[RankResult, float, float]], how: StepOptions
    ) -> Run:
        return assemble(
            [result for result, _, _ in replies],
            step.schedule,
            loss=replies[0][1],
            device=self.lab.device_plan.label,
            paced=how.pace is not None,
            limit_bytes=parse_bytes(self.lab.memory_limit),
        )

    def _forward(self, inputs: Tree, targets: Tree | None, num_microbatches: int) -> Run:
        forwards = forward_only(self.num_stages, num_microbatches, stage_to_rank=self.stage_to_rank)
        schedule = replicate(forwards, self.num_replicas)
        how = StepOptions()
        step = self._prepare(schedule, inputs, targets, how, training=False)
        replies = self._each([(worker.step, job, False, False) for job in step.jobs])
        return self._assemble(step, replies, how)

    def _apply(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """`method(rank's pipeline, *args)` on every rank; the results by rank."""
        return self._each([(worker.apply, method, *args)] * self.lab.num_ranks)

    def _each(self, asked: Sequence[tuple]) -> list[Any]:
        """Ask (function, *args), one of the worker's, of each rank's pipeline; the answers by rank."""
        if self._is_lost:
            raise PipelineLost(
                "rule:   a pipeline's weights live in its workers\n"
                "got:    workers that have been replaced since\n"
                "where:  Pipeline\n"
                "remedy: pipe.load_state_dict(saved_state), or make the pipeline anew"
            )
        requests = [([(function, self._key, *args)],) for function, *args in asked]
        with as_input_errors():
            replies = self.lab.call(worker.serve, requests, generation=self._generation)
        return [answer for (answer,) in replies]

    def _with_drops(self, requests: Sequence[list[worker.Request]]) -> list[tuple]:
        """The requests by rank, and before them those to free the pipelines that the driver has let go of."""
        drops = [(worker.drop, self.lab.abandoned.pop()) for _ in range(len(self.lab.abandoned))]
        return [([*drops, *mine],) for mine in requests]


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
