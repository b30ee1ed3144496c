"""Cuts into stages: every layer once, and the costliest stage as cheap as can be."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_lab.plan.partition import balanced, min_max, uniform


def covers(spans, num_layers, num_stages):
    assert len(spans) == num_stages
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    assert all(len(span) >= 1 for span in spans)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_uniform_places_every_layer_once(num_stages):
    for num_layers in range(num_stages, 30):
        spans = uniform(num_layers, num_stages)
        covers(spans, num_layers, num_stages)
        share, left_over = divmod(num_layers, num_stages)
        assert [len(span) for span in spans] == [share + (stage < left_over) for stage in range(num_stages)]


def brute_force(num_layers, num_stages, cost):
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return min(
        max(cost(k, a, b) for k, (a, b) in enumerate(zip((0, *c), (*c, num_layers), strict=True)))
        for c in cuts
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_balanced_is_as_good_as_trying_all(costs, num_stages):
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="at least one layer"):
            balanced(costs, num_stages)
        return
    spans = balanced(costs, num_stages)
    covers(spans, len(costs), num_stages)
    worst = max(sum(costs[i] for i in span) for span in spans)
    assert worst == brute_force(len(costs), num_stages, lambda _, a, b: sum(costs[a:b]))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=8), st.integers(1, 4))
@settings(deadline=None, derandomize=True)
def test_costs_may_hang_on_the_stage(layers, num_stages):
    """As memory does: a stage holds more micro-batches than the next."""

    def cost(stage, start, stop):
        return sum(w + (num_stages - stage) * s for w, s in layers[start:stop])

    spans = min_max(len(layers), num_stages, cost)
    covers(spans, len(layers), num_stages)
    worst = max(cost(k, span.start, span.stop) for k, span in enumerate(spans))
    assert worst == brute_force(len(layers), num_stages, cost)


def test_a_heavy_head_stands_alone():
    assert [len(span) for span in balanced([1, 1, 1, 1, 1, 1, 4], 3)] == [3, 3, 1]
