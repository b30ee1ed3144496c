"""What the constructors of schedules share: checks of their arguments, and the orders they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .errors import require_count
from .ops import Kind, Op
from .schedule import Schedule


def check_counts(constructor: str, **counts: int) -> None:
    """Raise `InputError` unless every count is a whole number of at least 1."""
    call = f"{constructor}({', '.join(counts)})"
    for name, count in counts.items():
        require_count(count, name, where=call)


def build(
    name: str, num_microbatches: int, stage_to_rank: Sequence[int], row: Callable[[int], list[Op]]
) -> Schedule:
    """The schedule whose rank k runs row(k)."""
    place = tuple(int(rank) for rank in stage_to_rank)
    ops = tuple(tuple(row(rank)) for rank in range(1 + max(place)))
    return Schedule(name, int(num_microbatches), place, ops)


def loop_placement(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod P: the stages go round the ranks `num_chunks` times."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and up again: the first and the last stage share rank 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def each(kind: Kind, stage: int, num_microbatches: int) -> list[Op]:
    """One operation of a stage for every micro-batch, in order."""
    return [Op(kind, stage, m) for m in range(num_microbatches)]


def alternate(forwards: list[Op], backwards: list[Op], num_warmup: int) -> list[Op]:
    """Warmup: `num_warmup` forwards. Steady: one forward, one backward. Cooldown: the backwards left."""
    warmup, rest = forwards[:num_warmup], forwards[num_warmup:]
    steady = [op for pair in zip(rest, backwards, strict=False) for op in pair]
    return warmup + steady + backwards[len(rest) :]
