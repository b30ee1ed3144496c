"""A few settings in which every two values of different factors meet: most faults need no more than two."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

Setting = dict[str, Any]


def pairwise(
    factors: dict[str, Sequence[Any]], exists: Callable[[Setting], bool] = lambda setting: True
) -> list[Setting]:
    """Of all settings that exist, some that hold every pair of values which any of them holds.

    The next one is always that with most new pairs, the first of equals: the same call gives the same list.
    """
    settings = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    pairs = [frozenset(_pairs(setting, factors)) for setting in settings if exists(setting)]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(pairs, key=lambda found: len(found & left))
        left -= best
        chosen.append({name: factors[name][index] for pair in sorted(best) for name, index in pair})
    return chosen


def _pairs(setting: Setting, factors: dict[str, Sequence[Any]]) -> Iterator[tuple]:
    """Its pairs, each a (factor, position of the value) twice, since values need not be hashable."""
    places = [(name, factors[name].index(value)) for name, value in setting.items()]
    return combinations(places, 2)
