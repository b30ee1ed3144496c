"""Chapter 07, cutting the model: even sizes, and the cut whose costliest stage costs least."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from ..exercise import Answer, Case, Exercise, Mismatch, over, over_cases

Sizes = list[int]

# Even sizes for any number of layers.


def even_sizes(num_layers, num_stages):
    """How many layers each stage gets: a list with one number a stage, as even as can be."""
    share = num_layers // num_stages
    return [share for stage in range(num_stages)]  # change this line: left-over layers are in no stage


def even_solution(num_layers, num_stages):
    share, left_over = divmod(num_layers, num_stages)
    return [share + (stage < left_over) for stage in range(num_stages)]


@over(num_layers=range(1, 20), num_stages=range(1, 9))
def every_layer_once_and_even(answer: Answer, num_layers: int, num_stages: int) -> Mismatch | None:
    """every layer is in one stage, and no stage has two layers more than another"""
    if num_layers < num_stages:
        return None  # some stage would be empty
    sizes = answer(num_layers, num_stages)
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        return Mismatch(f"{num_stages} stages, {num_layers} layers in all", f"{sizes}, {sum(sizes)} in all")
    if max(sizes) - min(sizes) > 1:
        return Mismatch("sizes that differ by one at most", f"{sizes}")
    return None


EVEN = Exercise(
    name="07-even",
    statement=(
        "Change one line, so that every layer is in a stage for any number of layers and stages, and the "
        "sizes differ by one at most."
    ),
    starter=even_sizes,
    solution=even_solution,
    properties=(every_layer_once_and_even,),
    hints=(
        "7 layers on 3 stages: the share is 2 and one is left over. Who takes it?",
        "num_layers % num_stages layers are left over. As many stages take one more each; any of them may.",
        "In Python `stage < num_layers % num_stages` counts as 1 where it is true.",
    ),
)


# The cut whose costliest stage costs least.


def min_max_sizes(costs, num_stages):
    """How many layers each stage gets, in order, so that the costliest stage costs as little as can be.

    costs: one number a layer, not negative. Every stage holds at least one layer.
    """
    raise NotImplementedError("find the cut")


def solution(costs, num_stages):
    num_layers = len(costs)
    before = [0.0]  # before[n]: what the first n layers cost together
    for cost in costs:
        before.append(before[-1] + cost)

    # best[n]: (the costliest stage, the sizes) of the best cut of the first n layers, one stage so far.
    best = {n: (before[n], [n]) for n in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        longer = {}
        for n in range(stage + 1, num_layers + 1):
            choices = [
                (max(best[start][0], before[n] - before[start]), [*best[start][1], n - start])
                for start in range(stage, n)  # the last stage holds layers start to n
            ]
            longer[n] = min(choices)
        best = longer
    return best[num_layers][1]


def all_sizes(num_layers: int, num_stages: int) -> list[Sizes]:
    """Every way to cut: where the stages after the first begin."""
    return [
        [stop - start for start, stop in pairwise((0, *inner, num_layers))]
        for inner in combinations(range(1, num_layers), num_stages - 1)
    ]


def stage_costs(costs: list[int], sizes: Sizes) -> list[int]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def _cases() -> tuple[Case, ...]:
    """The chapter's model, heavy ends, equal layers, and 60 drawn at random; small ones first."""
    draw = random.Random(7)
    fixed = [
        ([1, 1, 1, 1], 2),
        ([4, 1, 1, 1, 1], 2),
        ([0, 1, 1, 1, 1, 1, 1, 3], 2),
        ([0, 2, 2, 2, 2, 2, 2, 5], 4),
        ([5, 1, 1, 1, 1, 1, 1, 5], 4),
    ]
    drawn = [([draw.randint(0, 9) for _ in range(draw.randint(2, 9))], draw.randint(1, 5)) for _ in range(60)]
    kept = [(costs, num_stages) for costs, num_stages in fixed + drawn if len(costs) >= num_stages]
    return tuple(
        {"costs": costs, "num_stages": num_stages}
        for costs, num_stages in sorted(kept, key=lambda case: (len(case[0]), case[1]))
    )


@over_cases(*_cases())
def no_cut_is_better(answer: Answer, costs: list[int], num_stages: int) -> Mismatch | None:
    """every layer is in one stage, and no cut has a cheaper costliest stage (all cuts are tried)"""
    sizes = list(answer(costs, num_stages))
    if len(sizes) != num_stages or sum(sizes) != len(costs) or min(sizes) < 1:
        return Mismatch(f"{num_stages} stages of at least one layer, {len(costs)} in all", f"{sizes}")
    best = min(all_sizes(len(costs), num_stages), key=lambda sizes: max(stage_costs(costs, sizes)))
    least, got = max(stage_costs(costs, best)), max(stage_costs(costs, sizes))
    if got == least:
        return None
    return Mismatch(
        f"the costliest stage costs {least:g}, as with {best}",
        f"{got:g}, with {sizes}: stages cost {stage_costs(costs, sizes)}",
    )


MIN_MAX = Exercise(
    name="07-min-max",
    statement=(
        "Write min_max_sizes(costs, num_stages): the sizes of the stages, in order, such that the costliest "
        "stage costs as little as can be. Layers stay in order, and every stage holds at least one. Of "
        "several such cuts any is right. It is checked against every cut there is, on 65 models."
    ),
    starter=min_max_sizes,
    solution=solution,
    properties=(no_cut_is_better,),
    hints=(
        "Suppose you know the best cut of the first n layers into P − 1 stages, for every n. "
        "What is left to choose for P stages?",
        "Only where the last stage starts. Its cost is a sum of layers, and the costliest stage of the whole "
        "is the larger of it and the best of what comes before.",
        "Start with one stage, whose cost is a sum. Then P − 1 times: for every n take the best start. "
        "Keep the sizes beside the cost. Or search for the lowest limit under which filling stages works.",
    ),
)

EXERCISES = (EVEN, MIN_MAX)
