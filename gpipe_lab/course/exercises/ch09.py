"""Chapter 09, the official API: its names, its listing of 1F1B mended, a step written with it."""

from __future__ import annotations

import csv
import io
from functools import partial
from typing import Any

from ...plan.errors import InputError
from ...plan.schedules import SCHEDULES, one_f_one_b
from ...plan.torch_csv import from_csv
from ..exercise import Answer, Case, Exercise, Mismatch, over_cases
from ..official import torch_listing
from .step_on_ranks import outcome, reference

TOLERANCE = 1e-12


# The names.


def torch_name(schedule_name):
    """What get_schedule_class takes for one of this lab's schedules."""
    names = {"gpipe": "GPipe", "one_f_one_b": ..., "interleaved": ..., "zero_bubble_h1": ...}
    return names[schedule_name]


def torch_name_solution(schedule_name):
    names = {
        "gpipe": "GPipe",
        "one_f_one_b": "1F1B",
        "interleaved": "Interleaved1F1B",
        "zero_bubble_h1": "InterleavedZeroBubble",  # with one stage on each rank
    }
    return names[schedule_name]


@over_cases(*({"schedule_name": name} for name in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")))
def same_operations(answer: Answer, schedule_name: str) -> Mismatch | None:
    """torch's schedule of that name runs the same operations in the same order, at P = 2, M = 4"""
    name = answer(schedule_name)
    chunks = 2 if schedule_name == "interleaved" else 1
    listing = torch_listing(name, 2, 4, chunks)
    try:
        theirs = from_csv(listing)
    except InputError:
        theirs = from_csv(repair_solution(listing))  # torch lists its own 1F1B wrongly
    wanted = {"gpipe": partial(SCHEDULES["gpipe"], backward="fifo")}
    ours = wanted.get(schedule_name, SCHEDULES[schedule_name])(2, 4)
    if theirs.ops == ours.ops:
        return None
    return Mismatch(ours.grid(), f"torch's {name!r}", theirs.grid())


TORCH_NAME = Exercise(
    name="09-names",
    statement="Fill in the three names that are missing: what torch calls this lab's schedules.",
    starter=torch_name,
    solution=torch_name_solution,
    properties=(same_operations,),
    hints=(
        "dir(torch.distributed.pipelining) lists the classes; the name is the class's, without Schedule.",
        "Two of the three take several stages of a rank in a list. One of those splits its backward.",
        "1F1B; Interleaved1F1B; and the zero bubble that is no V: InterleavedZeroBubble, one stage a rank.",
    ),
)


# The listing.


def repair(listing):
    """torch's listing of 1F1B as CSV, so mended that gl.from_csv reads it as 1F1B."""
    rows = [line.split(",") for line in listing.splitlines()]
    return "\n".join(",".join(row) for row in rows)


def repair_solution(listing):
    rows = [line.split(",") for line in listing.splitlines()]
    last = rows[-1]
    for place, cell in enumerate(last):
        stage, letter, number = cell.partition("F")
        if letter:  # the last rank counts its forwards from 1
            last[place] = f"{stage}F{int(number) - 1}"
    return "\n".join(",".join(row) for row in rows)


SIZES: tuple[Case, ...] = tuple(
    {"P": P, "M": M} for P in range(1, 5) for M in range(P, 7)
)  # torch's 1F1B needs M ≥ P


@over_cases(*SIZES)
def reads_as_1f1b(answer: Answer, P: int, M: int) -> Mismatch | None:
    """gl.from_csv accepts it, and what it reads is 1F1B"""
    text = answer(torch_listing("1F1B", P, M))
    expected = one_f_one_b(P, M)
    try:
        found = from_csv(text)
    except InputError as error:
        return Mismatch("a schedule that can run", error.got, getattr(error, "grid", ""))
    return None if found.ops == expected.ops else Mismatch(expected.grid(), "another order", found.grid())


@over_cases(*SIZES)
def the_rest_as_it_was(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every other row is as torch wrote it"""
    given = torch_listing("1F1B", P, M)
    for rank, (before, after) in enumerate(zip(_cells(given)[:-1], _cells(answer(given))[:-1], strict=True)):
        if before != after:
            return Mismatch(",".join(before), ",".join(after), f"row of rank {rank}")
    return None


def _cells(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text)) if row]


REPAIR = Exercise(
    name="09-repair",
    statement=(
        "Mend torch's listing of 1F1B: its text comes in, and what you return gl.from_csv reads as 1F1B. "
        "Leave alone what is right in it."
    ),
    starter=repair,
    solution=repair_solution,
    properties=(reads_as_1f1b, the_rest_as_it_was),
    hints=(
        "Read the refusal: which row, which forward is missing, and which is there that should not be?",
        "On the last rank torch counts the forwards from 1, the backwards from 0.",
        "In the last row turn 3F1 into 3F0, 3F2 into 3F1 and so on; cell.partition('F') takes a cell apart.",
    ),
)


# A step with it.


def torch_step(context, stage, x, target, num_microbatches, loss_fn):
    """One GPipe step with torch.distributed.pipelining; then every parameter's .grad is the batch's.

    stage: this rank's nn.Module. x: the whole batch, on rank 0 (None elsewhere); target: its targets, on the
    last rank. loss_fn(output, target) is a mean over rows. Returns the loss of the batch, on the last rank.
    """

    raise NotImplementedError("wrap the stage, make the schedule, step it")


def torch_step_solution(context, stage, x, target, num_microbatches, loss_fn):
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    wrapped = PipelineStage(stage, context.rank, context.num_ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(wrapped, num_microbatches, loss_fn=loss_fn)
    losses = []
    if context.rank == 0:
        schedule.step(x)
    elif context.rank < context.num_ranks - 1:
        schedule.step()
    else:
        schedule.step(target=target, losses=losses)
        return torch.stack(losses).mean()  # losses of micro-batches, all of the same size


def torch_step_on_a_rank(
    context: Any, answer: Answer, file: str, rows: int, M: int, limit_s: float
) -> tuple[float | None, dict[str, Any]]:
    """A job: the answer's step on this rank, of the batch that `reference` takes whole."""
    import torch

    from .step_on_ranks import build_batch, build_stage

    torch.set_default_dtype(torch.float64)
    stage = build_stage(context.rank)
    (x,), (target,) = build_batch(rows, 1)
    is_last = context.rank == context.num_ranks - 1
    loss = answer(
        context,
        stage,
        x if context.rank == 0 else None,
        target if is_last else None,
        M,
        torch.nn.functional.mse_loss,
    )
    return None if loss is None else float(loss), {name: p.grad for name, p in stage.named_parameters()}


@over_cases({"P": 2, "rows": 8, "M": 4}, {"P": 3, "rows": 6, "M": 2})
def equal_to_one_process(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """loss and gradients are those of one process and the whole batch"""
    import torch

    found = outcome(answer, P, rows, M, job=torch_step_on_a_rank, limit_s=60.0)
    if found.failure is not None:
        return found.failure
    loss, expected = reference(P, rows)
    for rank, (got, right) in enumerate(zip(found.gradients, expected, strict=True)):
        missing = [name for name, g in got.items() if g is None]
        if missing:
            return Mismatch("a gradient in each parameter's .grad", f"None in {missing[0]} of stage {rank}")
        mine, one = (torch.cat([g.flatten() for g in found.values()]) for found in (got, right))
        if not (mine - one).norm() <= TOLERANCE * one.norm():
            ratio = (mine.norm() / one.norm()).item()
            return Mismatch(f"stage {rank}: the gradients of one process", f"{ratio:.4g} × as large")
    returned = found.losses[-1]
    if returned is None or not abs(returned - loss) <= TOLERANCE * loss:
        return Mismatch(f"{loss:.6f} returned on the last rank, the batch's loss", returned)
    return None


PORT = Exercise(
    name="09-port",
    statement=(
        "Write torch_step: the step of chapter 03, with torch's PipelineStage and ScheduleGPipe instead of "
        "send and receive. It is run on 2 and 3 real ranks and compared with one process."
    ),
    starter=torch_step,
    solution=torch_step_solution,
    properties=(equal_to_one_process,),
    hints=(
        "PipelineStage(module, stage_index, num_stages, device) first, then "
        "ScheduleGPipe(stage, num_microbatches, loss_fn=loss_fn).",
        "schedule.step takes the batch on the first rank, nothing in the middle, and target= on the last.",
        "step(target=target, losses=losses) fills the list with the micro-batches' losses; their mean is the "
        "batch's. The gradients are scaled already.",
    ),
    on_ranks=True,
)

EXERCISES = (TORCH_NAME, REPAIR, PORT)
