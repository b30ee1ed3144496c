"""Cut a list of layers into stages of consecutive layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from .errors import require, require_count


def uniform(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers for every stage, as even as can be; the first stages take what is left over.

    Every layer is in exactly one stage. Raises `InputError` where there are fewer layers than stages.
    """
    _check(num_layers, num_stages)
    share, left_over = divmod(num_layers, num_stages)
    sizes = [share + (stage < left_over) for stage in range(num_stages)]
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def balanced(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """The cut whose costliest stage costs least, for layers of these costs (any unit, not negative)."""
    require(
        all(cost >= 0 for cost in costs),
        "a layer's cost is a number, not negative",
        got=f"{list(costs)}",
        where="partition",
    )
    before = [0.0, *accumulate(costs)]
    return min_max(len(costs), num_stages, lambda stage, start, stop: before[stop] - before[start])


def min_max(num_layers: int, num_stages: int, cost: Callable[[int, int, int], float]) -> tuple[range, ...]:
    """The cut whose costliest stage costs least; cost(stage, start, stop) is that of layers start to stop.

    Exact, by dynamic programming over (stages, layers) in P·L² steps; of equal cuts the one whose first
    stages are shortest. Raises `InputError` where there are fewer layers than stages.
    """
    _check(num_layers, num_stages)
    worst = {stop: cost(0, 0, stop) for stop in range(1, num_layers + 1)}  # of the stages so far
    chosen: list[dict[int, int]] = [dict.fromkeys(worst, 0)]  # by stage: stop -> start
    for stage in range(1, num_stages):
        starts: dict[int, int] = {}
        reached: dict[int, float] = {}
        for stop in range(stage + 1, num_layers + 1):
            options = {start: max(worst[start], cost(stage, start, stop)) for start in range(stage, stop)}
            starts[stop] = min(options, key=options.__getitem__)
            reached[stop] = options[starts[stop]]
        worst = reached
        chosen.append(starts)
    spans = []
    stop = num_layers
    for starts in reversed(chosen):
        spans.append(range(starts[stop], stop))
        stop = starts[stop]
    return tuple(reversed(spans))


def _check(num_layers: int, num_stages: int) -> None:
    require_count(num_stages, "num_stages", where="partition")
    require(
        num_layers >= num_stages,
        "every stage holds at least one layer",
        got=f"{num_layers} layers for {num_stages} stages",
        where="partition",
        remedy=f"at most {max(num_layers, 1)} stages, or a model of more layers",
    )
