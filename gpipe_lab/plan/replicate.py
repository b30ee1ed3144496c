"""Data parallelism as a schedule: several replicas of one pipeline, each with its own ranks and data."""

from __future__ import annotations

from dataclasses import replace

from .errors import require, require_count
from .schedule import Schedule


def replicate(schedule: Schedule, num_replicas: int) -> Schedule:
    """`num_replicas` copies of a pipeline side by side, as one schedule.

    Replica r takes the ranks rP … rP+P-1 and the micro-batches rM … rM+M-1 of a pipeline of P ranks and M
    micro-batches; nothing passes between replicas until gradients are summed. Raises `InputError` for what
    is no schedule, or one that is replicated already.
    """
    require_count(num_replicas, "num_replicas", where="replicate")
    if num_replicas == 1:
        return schedule
    require(
        isinstance(schedule, Schedule) and schedule.num_replicas == 1,
        "what is replicated is a schedule of one pipeline",
        got=f"{getattr(schedule, 'num_replicas', type(schedule).__name__)} replicas",
        where="replicate",
        remedy="gl.replicate(gl.gpipe(num_stages, num_microbatches), 2)",
    )
    num_microbatches = schedule.num_microbatches
    rows = tuple(
        tuple(op._replace(microbatch=op.microbatch + replica * num_microbatches) for op in row)
        for replica in range(num_replicas)
        for row in schedule.ops
    )
    return replace(
        schedule, num_microbatches=num_replicas * num_microbatches, ops=rows, num_replicas=num_replicas
    )
