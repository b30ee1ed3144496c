"""What a step needs, worked out by the driver before any rank is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..engine.batch import Tree, batch_size, microbatch_sizes, signature, split
from ..engine.device import surrounding_autocast
from ..engine.executor import StepJob
from ..engine.loss import LossRule
from ..engine.stage import StepContext
from ..plan.errors import require, require_count
from ..plan.lowering import lower
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from ..plan.simulate import Costs
from .options import StepOptions

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
class PreparedStep:
    """A step made ready: the job of every rank, and the schedule with its recomputes."""

    jobs: tuple[StepJob, ...]
    schedule: Schedule


def require_no_autocast(where: str) -> None:
    """Raise `InputError` within `torch.autocast`, which does not reach the workers."""
    surrounding = surrounding_autocast()
    require(
        not surrounding,
        "workers compute under no autocast but the one they are told of",
        got=f"a call within torch.autocast({', '.join(map(repr, surrounding))})",
        where=where,
        remedy="autocast=torch.bfloat16 in lab.run or lab.pipeline, outside torch.autocast",
    )


def prepare_step(
    schedule: Schedule,
    inputs: Tree,
    targets: Tree | None,
    *,
    num_ranks: int,
    layers_per_stage: Sequence[int],
    loss: LossRule | None,
    context: StepContext,
    options: StepOptions,
    costs: Costs | None = None,
) -> PreparedStep:
    """Check a step and split it into jobs. Raises `InputError` or `ScheduleError`: no process works yet.

    costs: measured ones, for the order of transfers; a pace has its own.
    """
    require_no_autocast("step")
    require(
        isinstance(schedule, Schedule),
        "a schedule is a gl.Schedule",
        got=type(schedule).__name__,
        where="schedule",
        remedy="gl.gpipe(num_stages, num_microbatches)",
    )
    pace, hoist = options.pace, options.hoist
    if pace is not None:
        pace.check_stages(schedule.num_stages)
    require(
        schedule.num_ranks == num_ranks,
        "a schedule is for as many ranks as the lab has",
        got=f"{schedule.name!r} for {_ranks(schedule)}, a lab of {num_ranks}",
        where="schedule",
        remedy=f"lab.resize({schedule.num_ranks})",
    )
    schedule = with_recompute(schedule, options.checkpoint, options.early, layers_per_stage=layers_per_stage)
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
    if pace is not None:
        costs = pace.costs() if pace.flops_per_ms is None else None
    shared = StepJob(
        schedule=_lower(schedule, hoist=hoist, costs=costs),
        first_schedule=_lower(schedule, hoist=0, costs=costs),
        signatures=tuple(map(signature, inputs_split)),
        sizes=sizes,
        step=context,
        scales=scales,
        pace=pace,
        every=parse_mode(options.checkpoint),
        posts_ahead=hoist > 0,
        profile=options.profile,
        outputs=options.outputs,
    )
    inputs_at = _by_rank(inputs_split, 0, schedule)
    targets_at = _by_rank(targets_split, schedule.num_stages - 1, schedule)
    jobs = tuple(
        replace(shared, inputs=mine, targets=wanted)
        for mine, wanted in zip(inputs_at, targets_at, strict=True)
    )
    return PreparedStep(jobs, schedule)


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
