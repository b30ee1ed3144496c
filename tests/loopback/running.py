"""A step of the real engine over loopback: what `lab.run` gives, from the threads of one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from gpipe_lab.engine.loopback import World
from gpipe_lab.engine.rank_pipeline import RankPipeline
from gpipe_lab.engine.stage import StepContext
from gpipe_lab.lab.model import cut, rank_specs
from gpipe_lab.lab.options import ModelOptions, StepOptions
from gpipe_lab.lab.run import Run, assemble
from gpipe_lab.lab.step import prepare_step
from gpipe_lab.plan.schedules import replicate


@dataclass(frozen=True)
class Result:
    """`run` is the last step's; `losses` of all; `heard` how many values the host waited for, by step."""

    run: Run
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    heard: list[int]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    schedule,
    model,
    inputs,
    targets,
    *,
    loss_fn=torch.nn.functional.mse_loss,
    seed=0,
    num_replicas=1,
    ties=None,
    checkpoint="never",
    hoist=2,
    steps=1,
    optimizer=None,
    pace=None,
    autocast=None,
    partition="uniform",
    may_wait=False,
    lowered=None,
    layer_seed=0,
    max_norm=None,
) -> Result:
    """Run `schedule` on one thread a rank, `steps` times; raises the first error of any rank.

    lowered: a function that changes the lowered schedules, to see whether what is wrong there is noticed.
    """
    schedule = replicate(schedule, num_replicas)
    stages = cut(model, schedule.num_stages, partition)
    trains = schedule.trains
    options = ModelOptions(
        loss_fn=loss_fn,
        optimizer=optimizer,
        max_norm=max_norm,
        ties=ties,
        num_replicas=num_replicas,
        seed=layer_seed,
    )
    plan = prepare_step(
        schedule,
        inputs,
        targets,
        num_ranks=schedule.num_ranks,
        layers_per_stage=[len(stage.layers) for stage in stages],
        loss=options.loss_rule() if targets is not None else None,
        context=StepContext(seed=layer_seed, training=trains, gradients=trains, autocast=autocast),
        options=StepOptions(checkpoint=checkpoint, pace=pace, hoist=hoist),
    )
    jobs = plan.jobs
    if lowered is not None:
        change = {"schedule": lowered(jobs[0].schedule), "first_schedule": lowered(jobs[0].first_schedule)}
        jobs = tuple(_replace(job, change) for job in jobs)
    specs = rank_specs(stages, schedule.stage_to_rank, schedule.num_ranks, options)
    world = World(schedule.num_ranks, seed=seed, may_wait=may_wait or pace is not None)

    def program(transport):
        rank = transport.rank
        spec = copy.deepcopy(specs[rank])  # what pickling does for processes
        pipeline = RankPipeline(spec, world.boards[rank], transport)
        found, heard = [], []
        for _ in range(steps):
            before = transport.num_heard
            if optimizer is None:
                pipeline.zero_grad()
            if trains:
                result, loss, _ = pipeline.step(jobs[rank], transport, update=optimizer is not None)
            else:
                result, loss = pipeline.run(jobs[rank], transport)
            found.append((result, loss))
            heard.append(transport.num_heard - before)
        return found, heard, pipeline.gradients.copies(), pipeline.state_dict()

    by_rank = world.run(program)
    results = [found[-1][0] for found, *_ in by_rank]
    last = assemble(
        results, plan.schedule, loss=by_rank[0][0][-1][1], device="loopback", paced=pace is not None
    )
    return Result(
        last,
        [loss for _, loss in by_rank[0][0]],
        _joined([gradients for _, _, gradients, _ in by_rank]),
        [max(counts) for counts in zip(*(heard for _, heard, _, _ in by_rank), strict=True)],
        _joined([state for *_, state in by_rank]),
    )


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _replace(job, change):
    from dataclasses import replace

    return replace(job, **change)
