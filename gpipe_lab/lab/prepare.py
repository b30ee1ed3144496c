"""Check what the user gives and turn it into what every rank is told. This needs no process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..engine.executor import StepJob
from ..engine.loss import LossFn, LossRule, read_loss
from ..engine.microbatch import batch_size, microbatch_sizes, signature, split
from ..engine.pace import Pace
from ..engine.pipeline import PipelineSpec, StageSpec
from ..engine.stage import StepContext
from ..engine.tree import Tree
from ..plan.errors import require, require_count
from ..plan.lowering import lower
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from .stages import Partition, Ties, cut, find_ties, named_layers

MakeSchedule = Callable[[int, int], Schedule]  # of the number of ranks and the number of micro-batches
_lower = lru_cache(maxsize=64)(lower)


def made(
    schedule: Schedule | MakeSchedule, num_ranks: int, num_microbatches: int | None, *, where: str
) -> Schedule:
    """A schedule that was given as a value, or what a function given for one makes of P and M."""
    if not callable(schedule):
        own = getattr(schedule, "num_microbatches", num_microbatches)
        require(
            num_microbatches in (None, own),
            "a schedule has its number of micro-batches; num_microbatches is for a function that makes one",
            got=f"num_microbatches={num_microbatches!r} for a schedule of {own}",
            where=where,
            remedy="leave out num_microbatches",
        )
        return schedule
    require(
        num_microbatches is not None,
        "a function that makes a schedule is told the number of micro-batches",
        got="num_microbatches=None",
        where=where,
        remedy="num_microbatches=8",
    )
    require_count(num_microbatches, "num_microbatches", where=where)
    found = schedule(num_ranks, num_microbatches)  # type: ignore[arg-type]
    fits = isinstance(found, Schedule) and (found.num_ranks, found.num_microbatches)
    require(
        fits == (num_ranks, num_microbatches),
        "a function given for a schedule makes one for the lab's ranks and for num_microbatches",
        got=f"a schedule for (ranks, micro-batches) = {fits}" if fits else f"a {type(found).__name__}",
        where=f"{where}, {getattr(schedule, '__name__', schedule)}({num_ranks}, {num_microbatches})",
        remedy="def my_schedule(num_ranks, num_microbatches): return gl.Schedule(...)",
    )
    return found


@dataclass(frozen=True)
class Plan:
    """A step made ready: the job of every rank, and the schedule with its recomputes."""

    jobs: tuple[StepJob, ...]
    schedule: Schedule


def plan_step(
    schedule: Schedule,
    *,
    num_ranks: int,
    layers_per_stage: Sequence[int],
    inputs: Tree,
    targets: Tree | None,
    loss: LossRule | None,
    checkpoint: str = "never",
    early: bool = False,
    pace: Pace | None = None,
    hoist: int = 2,
    profile: bool = False,
    step: StepContext,
) -> Plan:
    """Check a step and split it into jobs. Raises `InputError` or `ScheduleError`: no process works yet."""
    require(
        isinstance(schedule, Schedule),
        "a schedule is a gl.Schedule",
        got=type(schedule).__name__,
        where="schedule",
        remedy="gl.gpipe(num_stages, num_microbatches)",
    )
    every = parse_mode(checkpoint)
    require(
        step.autocast in (None, torch.bfloat16),
        "autocast is torch.bfloat16: float16 would need its gradients scaled",
        got=f"autocast={step.autocast}",
        where="step",
        remedy="autocast=torch.bfloat16",
    )
    require(
        pace is None or isinstance(pace, Pace),
        "pace is a gl.Pace",
        got=repr(pace),
        where="pace",
        remedy="pace=gl.Pace(forward_ms=10, backward_ms=20)",
    )
    if pace is not None:
        pace.check_stages(schedule.num_stages)
    require(
        schedule.num_ranks == num_ranks,
        "a schedule is for as many ranks as the lab has",
        got=f"{schedule.name!r} for {_ranks(schedule)}, a lab of {num_ranks}",
        where="schedule",
        remedy=f"lab.resize({schedule.num_ranks})",
    )
    schedule = with_recompute(schedule, checkpoint, early, layers_per_stage=layers_per_stage)
    num_microbatches = schedule.num_microbatches
    rows = batch_size(inputs)
    require(
        schedule.num_replicas == 1 or rows >= num_microbatches,
        "every micro-batch of every replica has at least one row",
        got=f"{rows} rows for {num_microbatches} micro-batches on {schedule.num_replicas} replicas",
        where="batch",
        remedy="a larger batch, or fewer micro-batches",
    )
    sizes = microbatch_sizes(rows, num_microbatches)
    inputs_split = split(inputs, num_microbatches)
    targets_split, scales = _targets(targets, loss, rows, sizes, trains=schedule.trains)
    costs = (
        pace.costs() if pace is not None and pace.flops_per_ms is None else None
    )  # for the transfers' order
    shared = StepJob(
        schedule=_lower(schedule, hoist=hoist, costs=costs),
        first_schedule=_lower(schedule, hoist=0, costs=costs),
        signatures=tuple(map(signature, inputs_split)),
        sizes=sizes,
        step=step,
        scales=scales,
        pace=pace,
        every=every,
        posts_ahead=hoist > 0,
        profile=profile,
    )
    inputs_at = _by_rank(inputs_split, 0, schedule)
    targets_at = _by_rank(targets_split, schedule.num_stages - 1, schedule)
    jobs = tuple(
        replace(shared, inputs=mine, targets=wanted)
        for mine, wanted in zip(inputs_at, targets_at, strict=True)
    )
    return Plan(jobs, schedule)


def _by_rank(parts: Sequence[Tree], stage: int, schedule: Schedule) -> list[dict[int, Tree]]:
    """What each rank needs of the micro-batches' parts to run `stage`, by micro-batch."""
    found: list[dict[int, Tree]] = [{} for _ in schedule.ops]
    for m, part in enumerate(parts):
        found[schedule.home(stage, m)][m] = part
    return found


def _ranks(schedule: Schedule) -> str:
    each = f"{schedule.num_replicas} x {schedule.ranks_per_replica} = " if schedule.num_replicas > 1 else ""
    return f"{each}{schedule.num_ranks} ranks"


def _targets(
    targets: Tree | None, loss: LossRule | None, rows: int, sizes: tuple[int, ...], *, trains: bool
) -> tuple[list[Tree], tuple[float, ...]]:
    require(
        not trains or (targets is not None and loss is not None),
        "a schedule with backwards needs a loss",
        got=f"targets={'given' if targets is not None else None}, loss_fn={'given' if loss else None}",
        where="step",
        remedy="give targets and loss_fn, or a forward_only schedule",
    )
    if targets is None or loss is None:
        return [], ()
    require(
        batch_size(targets) == rows,
        "targets have as many rows as inputs",
        got=f"{batch_size(targets)} rows of targets for {rows} of inputs",
        where="targets",
        remedy="one row of targets for each row of inputs",
    )
    parts = split(targets, len(sizes))
    return parts, tuple(loss.scales(parts, sizes))


def read_spec(
    stages: Sequence[StageSpec],
    schedule_ranks: Sequence[int],
    num_ranks: int,
    *,
    seed: int,
    limit_bytes: int | None,
    ties: Ties | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Callable | None = None,
    scheduler: Callable | None = None,
    max_norm: float | None = None,
    num_replicas: int = 1,
) -> list[PipelineSpec]:
    """One `PipelineSpec` a rank: the stages that `schedule_ranks` (stage → rank of a replica) puts there."""
    ranks_per_replica = num_ranks // num_replicas
    found = [
        replace(tie, ranks=tuple(replica * ranks_per_replica + rank for rank in tie.ranks))
        for replica in range(num_replicas)
        for tie in find_ties(stages, schedule_ranks, ties)
    ]
    return [
        PipelineSpec(
            stages=tuple(s for s in stages if schedule_ranks[s.index] == rank % ranks_per_replica),
            loss_fn=loss_fn,
            optimizer=optimizer,
            scheduler=scheduler,
            max_norm=max_norm,
            ties=tuple(found),
            replica=rank // ranks_per_replica,
            num_replicas=num_replicas,
            seed=seed,
            limit_bytes=limit_bytes,
        )
        for rank in range(num_ranks)
    ]


__all__ = [
    "MakeSchedule",
    "Partition",
    "Plan",
    "Ties",
    "cut",
    "made",
    "named_layers",
    "plan_step",
    "read_loss",
    "read_spec",
]
