"""Wrong answers to the exercises of chapter 09, which each of them must refuse."""

from __future__ import annotations

from functools import partial

from gpipe_lab.course.exercises.ch09 import repair_solution, torch_name_solution
from gpipe_lab.plan.schedules import SCHEDULES
from gpipe_lab.plan.torch_csv import from_csv, to_csv


def _shifted(listing: str, *, letter: str, rows: slice) -> str:
    """The listing with the micro-batches of one kind of operation counted one lower in some rows."""
    cells = [line.split(",") for line in listing.splitlines()]
    for row in cells[rows]:
        for place, cell in enumerate(row):
            stage, found, number = cell.partition(letter)
            if found and number.isdigit() and int(number):
                row[place] = f"{stage}{letter}{int(number) - 1}"
    return "\n".join(",".join(row) for row in cells)


def _first_forward_added(listing: str) -> str:
    """The forward that is missing put in front, the one too many left where it is."""
    cells = [line.split(",") for line in listing.splitlines()]
    cells[-1].insert(0, f"{len(cells) - 1}F0")
    return "\n".join(",".join(row) for row in cells)


def _gpipe_of_that_size(listing: str) -> str:
    rows = listing.splitlines()
    count = sum("F" in cell for cell in rows[0].split(","))
    return to_csv(SCHEDULES["gpipe"](len(rows), count))


def torch_variant(
    context,
    stage,
    x,
    target,
    num_microbatches,
    loss_fn,
    *,
    scale_grads=True,
    total="mean",
    steps=1,
    reverse=False,
):
    """The solution with one thing done differently."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    index = context.num_ranks - 1 - context.rank if reverse else context.rank
    wrapped = PipelineStage(stage, index, context.num_ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(wrapped, num_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
    losses = []
    for _ in range(steps):
        if context.rank == 0:
            schedule.step(x)
        elif context.rank < context.num_ranks - 1:
            schedule.step()
        else:
            schedule.step(target=target, losses=losses)
    return getattr(torch.stack(losses), total)() if losses else None


MUTANTS = {
    "09-names": {
        "GPipe for 1F1B": lambda name: {"one_f_one_b": "GPipe"}.get(name) or torch_name_solution(name),
        "1F1B, though a rank has two stages": lambda name: (
            "1F1B" if name == "interleaved" else torch_name_solution(name)
        ),
        "looped, but breadth first": lambda name: (
            "LoopedBFS" if name == "interleaved" else torch_name_solution(name)
        ),
        "1F1B for zero bubble": lambda name: (
            "1F1B" if name == "zero_bubble_h1" else torch_name_solution(name)
        ),
    },
    "09-repair": {
        "every row shifted": partial(_shifted, letter="F", rows=slice(None)),
        "the backwards shifted": partial(_shifted, letter="B", rows=slice(-1, None)),
        "the missing forward put in front": _first_forward_added,
        "a GPipe of that size": _gpipe_of_that_size,
        "written anew, its idle cells lost": lambda listing: to_csv(from_csv(repair_solution(listing))),
    },
    "09-port": {
        "gradients not scaled": partial(torch_variant, scale_grads=False),
        "losses added up": partial(torch_variant, total="sum"),
        "stepped twice": partial(torch_variant, steps=2),
        "stages numbered from the end": partial(torch_variant, reverse=True),
    },
}
