"""The bytes that a training step sends, by method: formula, calls counted, bytes on the wire.

    python -m gpipe_lab.course.bytes_by_method data/runs/bytes_by_method.csv

records them for the course's GPT on four ranks, with their origin in the first line.
"""

from __future__ import annotations

import csv
import platform
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..plan.schedules import one_f_one_b
from ..planner import traffic
from .workload import LENGTH, NUM_BLOCKS, WIDTH, tiny_batch, tiny_gpt

if TYPE_CHECKING:
    from ..lab.lab import Lab
    from ..lab.worker import RankContext

ROWS = 8
NUM_MICROBATCHES = 4
BYTES_PER_NUMBER = 4  # float32


class Traffic(NamedTuple):
    """Bytes that one rank sends in a step; of the pipeline, its middle rank, which sends the most.

    counted: from the sizes of the calls, every collective as a ring. wire: by the kernel, None where it does
    not tell.
    """

    method: str
    num_ranks: int
    tokens: int  # of the whole batch
    calls: str
    predicted: float
    counted: float
    wire: int | None


def measure(lab: Lab, *, rows: int = ROWS, num_microbatches: int = NUM_MICROBATCHES) -> list[Traffic]:
    """Run one step of every method on the course's GPT, over all ranks of `lab`."""
    return [
        *(torch_traffic(lab, method, rows) for method in FORMULAS),
        pipeline_traffic(lab, rows, num_microbatches),
    ]


FORMULAS: dict[str, Callable[[float, float, int], float]] = {
    "data parallel": lambda parameters, boundary, n: traffic.data_parallel_bytes(parameters, n),
    "fully sharded": lambda parameters, boundary, n: traffic.fully_sharded_bytes(parameters, n),
    "tensor parallel": lambda parameters, boundary, n: traffic.tensor_parallel_bytes(NUM_BLOCKS, boundary, n),
}


def torch_traffic(lab: Lab, method: str, rows: int = ROWS) -> Traffic:
    """One step of a method of torch's own."""
    from ..engine.models import next_token_loss
    from .methods import step_of_method

    steps = lab.launch(step_of_method, method, tiny_gpt(), *tiny_batch(rows), next_token_loss)
    busiest = max(steps, key=lambda step: step.ring_bytes)
    wires = [step.wire_bytes for step in steps if step.wire_bytes is not None]
    calls = ", ".join(f"{count} {kind}" for kind, count in busiest.counts.items())
    predicted = FORMULAS[method](parameter_bytes(), boundary_bytes(rows), lab.num_ranks)
    return Traffic(
        method, lab.num_ranks, rows * LENGTH, calls, predicted, busiest.ring_bytes, max(wires, default=None)
    )


def pipeline_traffic(lab: Lab, rows: int = ROWS, num_microbatches: int = NUM_MICROBATCHES) -> Traffic:
    """One step of this engine's pipeline, one stage a rank."""
    from ..engine.models import next_token_loss

    schedule = one_f_one_b(lab.num_ranks, num_microbatches)
    inputs, targets = tiny_batch(rows)
    pipe = lab.pipeline(tiny_gpt(), loss_fn=next_token_loss)
    pipe.step(schedule, inputs, targets, update=False)  # opens the links, agrees on shapes
    before = lab.launch(wire_so_far)
    run = pipe.step(schedule, inputs, targets, update=False)
    after = lab.launch(wire_so_far)
    sent = Counter[int]()
    for (sender, _), num_bytes in run.bytes_sent.items():
        sent[sender] += num_bytes
    wires = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return Traffic(
        "pipeline",
        lab.num_ranks,
        rows * LENGTH,
        f"{2 * num_microbatches} sends",
        traffic.pipeline_bytes(boundary_bytes(rows), middle=lab.num_ranks > 2),
        max(sent.values()),
        max(wires, default=None),
    )


def wire_so_far(context: RankContext) -> int | None:
    from .collectives import wire_bytes_sent

    return wire_bytes_sent()


def parameter_bytes() -> int:
    """Of the course's GPT, built for this and let go."""
    layers = [build() for build in tiny_gpt()]
    return BYTES_PER_NUMBER * sum(p.numel() for layer in layers for p in layer.parameters())


def boundary_bytes(rows: int) -> int:
    """What passes from one block to the next for the whole batch: T·h numbers."""
    return BYTES_PER_NUMBER * rows * LENGTH * WIDTH


def record(path: Path) -> None:
    import torch

    from ..lab.lab import Lab

    with Lab(4, device="cpu") as lab:
        rows = measure(lab)
    origin = (
        f"# {date.today()}; python -m gpipe_lab.course.bytes_by_method; the course's GPT, float32; "
        f"python {platform.python_version()}, torch {torch.__version__}, gloo, {platform.system()}"
    )
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(origin + "\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Traffic._fields)
        writer.writerows(
            row._replace(predicted=round(row.predicted), counted=round(row.counted)) for row in rows
        )


if __name__ == "__main__":
    record(Path(sys.argv[1]))
