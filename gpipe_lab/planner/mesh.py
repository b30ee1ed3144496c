"""Which rank stands where: replicas, stages of a pipeline, and parts of a stage's matrices."""

from __future__ import annotations

from typing import NamedTuple

from ..plan.errors import require, require_count


class Place(NamedTuple):
    """A rank's coordinates: which copy of the model, which stage of it, which part of that stage."""

    data: int
    pipeline: int
    tensor: int


def place_of(rank: int, num_stages: int, tensor_parallel: int = 1) -> Place:
    """rank = (data · P + pipeline) · T + tensor: neighbours in a tensor group have neighbouring numbers."""
    stage, tensor = divmod(rank, tensor_parallel)
    return Place(*divmod(stage, num_stages), tensor)


def groups(num_replicas: int, num_stages: int, tensor_parallel: int = 1) -> dict[str, list[tuple[int, ...]]]:
    """{"data", "pipeline", "tensor"}: the groups of each kind, of ranks that differ in that coordinate alone.

    Every rank is in one group of each kind. Raises `InputError` for a size that is no count.
    """
    sizes = {"num_replicas": num_replicas, "num_stages": num_stages, "tensor_parallel": tensor_parallel}
    for name, size in sizes.items():
        require_count(size, name, where="groups")
    found: dict[str, dict[Place, list[int]]] = {kind: {} for kind in Place._fields}
    for rank in range(num_replicas * num_stages * tensor_parallel):
        place = place_of(rank, num_stages, tensor_parallel)
        for kind, members in found.items():
            members.setdefault(place._replace(**{kind: 0}), []).append(rank)
    return {kind: [tuple(ranks) for ranks in members.values()] for kind, members in found.items()}


def microbatches_of_a_replica(batch_rows: int, microbatch_rows: int, num_replicas: int) -> int:
    """M = B/(mD): replicas share the batch, so each of D has that many micro-batches of m rows."""
    require(
        batch_rows % (microbatch_rows * num_replicas) == 0,
        "replicas get equally many whole micro-batches",
        got=f"{batch_rows} rows, {num_replicas} replicas, micro-batches of {microbatch_rows}",
        where="microbatches_of_a_replica",
    )
    return batch_rows // (microbatch_rows * num_replicas)


def overhead_at(num_ranks: int, batch_rows: int, microbatch_rows: int, num_replicas: int) -> float:
    """(N−D)m/B: idle over ideal time, (P−1)/M at P = N/D and M = B/(mD). GPipe or 1F1B, equal stages."""
    return (num_ranks - num_replicas) * microbatch_rows / batch_rows
