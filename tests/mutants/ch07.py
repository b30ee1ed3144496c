"""Wrong answers to the exercises of chapter 07, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch07 import Sizes, all_sizes, even_solution, solution, stage_costs


def all_left_over_in_the_last(num_layers: int, num_stages: int) -> Sizes:
    share, left_over = divmod(num_layers, num_stages)
    return [share] * (num_stages - 1) + [share + left_over]


def rounded_up(num_layers: int, num_stages: int) -> Sizes:
    share = -(-num_layers // num_stages)
    return [share] * (num_stages - 1) + [num_layers - share * (num_stages - 1)]


def one_for_everybody(num_layers: int, num_stages: int) -> Sizes:
    """Left-over layers are handed to every stage."""
    share, left_over = divmod(num_layers, num_stages)
    return [share + (left_over > 0) for _ in range(num_stages)]


def as_even_as_can_be(costs: list[int], num_stages: int) -> Sizes:
    return even_solution(len(costs), num_stages)


def fills_to_the_mean(costs: list[int], num_stages: int) -> Sizes:
    """Greedy: a stage takes layers until it holds its share of the total cost."""
    share = sum(costs) / num_stages
    sizes, held = [0], 0.0
    for index, cost in enumerate(costs):
        stages_left, layers_left = num_stages - len(sizes), len(costs) - index
        is_full = held >= share or layers_left <= stages_left
        if sizes[-1] and stages_left and is_full:
            sizes.append(0)
            held = 0.0
        sizes[-1] += 1
        held += cost
    return sizes


def least_spread(costs: list[int], num_stages: int) -> Sizes:
    """The smallest difference between the costliest and the cheapest stage, which is another goal."""

    def spread(sizes: Sizes) -> float:
        found = stage_costs(costs, sizes)
        return max(found) - min(found)

    return min(all_sizes(len(costs), num_stages), key=spread)


def heaviest_layer_alone(costs: list[int], num_stages: int) -> Sizes:
    """Cut around the costliest layer first, then evenly."""
    at = max(range(len(costs)), key=costs.__getitem__)
    if num_stages == 1 or at not in (0, len(costs) - 1):
        return even_solution(len(costs), num_stages)
    rest = even_solution(len(costs) - 1, num_stages - 1)
    return [1, *rest] if at == 0 else [*rest, 1]


def last_stage_empty(costs: list[int], num_stages: int) -> Sizes:
    """The best cut into one stage less, and a stage without layers."""
    return [*solution(costs, num_stages - 1), 0] if num_stages > 1 else [len(costs)]


MUTANTS = {
    "07-even": {
        "the last stage takes all that is left over": all_left_over_in_the_last,
        "shares rounded up, the last stage gets the rest": rounded_up,
        "every stage takes one more": one_for_everybody,
    },
    "07-min-max": {
        "as even as can be, whatever the layers cost": as_even_as_can_be,
        "fills each stage to the mean, front to back": fills_to_the_mean,
        "the smallest spread between stages": least_spread,
        "the heaviest end alone, the rest evenly": heaviest_layer_alone,
        "a stage left empty": last_stage_empty,
    },
}
