"""Running a model through a lab's workers once, and what every way of running it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..engine.batch import Tree, split
from ..engine.loss import LossFn, read_loss
from ..engine.pace import Pace
from ..engine.profile import CRITERIA, Profile
from ..engine.stage import StepContext
from ..plan.errors import require_count
from ..plan.schedule import Schedule
from ..plan.schedules import replicate
from ..plan.units import parse_bytes
from . import jobs
from .failures import as_input_errors
from .run import Run, assemble, middle
from .step import MakeSchedule, Partition, Plan, Ties, cut, made, named_layers, plan_step, read_spec

if TYPE_CHECKING:
    from .lab import Lab


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """A loss and how it averages, as the user gave it."""

    loss_fn: LossFn | None = None
    loss_weight: Callable[[Tree], float] | None = None
    loss_reduction: str | None = None

    def read(self) -> Any:
        if self.loss_fn is None:
            return None
        return read_loss(self.loss_fn, loss_weight=self.loss_weight, loss_reduction=self.loss_reduction)


def run_once(
    lab: Lab,
    schedule: Schedule | MakeSchedule,
    model: Any,
    inputs: Tree,
    targets: Tree | None,
    *,
    num_microbatches: int | None,
    loss: LossOptions,
    checkpoint: str,
    early: bool,
    seed: int,
    pace: Pace | None,
    partition: Partition,
    ties: Ties | None,
    num_replicas: int,
    autocast: torch.dtype | None,
    warmup: bool,
    repeats: int,
    hoist: int,
    strict: bool,
    profile: bool,
) -> Run:
    """See `Lab.run`."""
    require_count(repeats, "repeats", where="Lab.run")
    require_count(num_replicas, "num_replicas", where="Lab.run")
    schedule = made(schedule, lab.num_ranks // num_replicas, num_microbatches, where="Lab.run")
    if partition in CRITERIA and isinstance(schedule, Schedule):
        found = profile_model(
            lab, model, split(inputs, num_replicas * schedule.num_microbatches)[0], seed=seed
        )
        partition = found.sizes(schedule.num_stages, str(partition), schedule=schedule)
    schedule = replicate(schedule, num_replicas)
    stages = cut(model, getattr(schedule, "num_stages", 1), partition)
    trains = getattr(schedule, "trains", True)
    step = StepContext(seed=seed, training=trains, gradients=trains, autocast=autocast)
    plan = plan_step(
        schedule,
        num_ranks=lab.num_ranks,
        layers_per_stage=[len(s.layers) for s in stages],
        inputs=inputs,
        targets=targets,
        loss=loss.read(),
        checkpoint=checkpoint,
        early=early,
        pace=pace,
        hoist=hoist,
        profile=profile,
        step=step,
    )
    limit = parse_bytes(lab.memory_limit)
    specs = read_spec(
        stages,
        schedule.stage_to_rank,
        lab.num_ranks,
        seed=seed,
        limit_bytes=limit,
        ties=ties,
        loss_fn=loss.loss_fn,
        num_replicas=schedule.num_replicas,
    )
    args = [
        (spec, job, replace(job, pace=None, profile=False) if warmup else None, repeats, strict)
        for spec, job in zip(specs, plan.jobs, strict=True)
    ]
    sweep(lab)
    with as_input_errors():
        by_rank = lab.call(jobs.run_once, args)
    steps = zip(*(steps for steps, _ in by_rank), strict=True)
    runs = [assemble_step(lab, plan, list(results), pace) for results in steps]
    gradients = {name: g for _, found in by_rank for name, g in found.items()}
    return replace(middle(runs), _gradients=gradients, profiles=runs[-1].profiles)


def profile_model(
    lab: Lab, model: Any, microbatch: Tree, target: Tree = None, loss_fn: LossFn | None = None, seed: int = 0
) -> Profile:
    """See `Lab.profile`."""
    names, layers = named_layers(model)
    job = jobs.ProfileJob(microbatch, target, loss_fn, seed)
    rest: tuple = ((), (), None)
    args = [(layers, names, job), *[rest] * (lab.num_ranks - 1)]
    return lab.call(jobs.profile, args)[0]


def assemble_step(lab: Lab, plan: Plan, steps: list[tuple], pace: Pace | None) -> Run:
    results = [step[0] for step in steps]
    return assemble(
        results,
        plan.schedule,
        loss=steps[0][1],
        device=lab.device_plan.label,
        paced=pace is not None,
        limit_bytes=parse_bytes(lab.memory_limit),
    )


def sweep(lab: Lab) -> None:
    """Let the workers free the pipelines that the driver has let go of."""
    while lab.abandoned:
        lab.call(jobs.drop, [(lab.abandoned.pop(),)] * lab.num_ranks)
