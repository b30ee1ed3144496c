"""Bytes a rank sends: the closed forms against rings that are walked step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lab.planner import traffic

RANKS = st.integers(1, 9)


def walked_reduce_scatter(values):
    """values[rank][part] summed around a ring: (part r complete on rank r, numbers each rank sent)."""
    num_ranks = len(values)
    held = [list(row) for row in values]
    sent = [0] * num_ranks
    for hop in range(num_ranks - 1):
        messages = [(rank, (rank - hop - 1) % num_ranks) for rank in range(num_ranks)]
        moving = [held[rank][part] for rank, part in messages]
        for (rank, part), number in zip(messages, moving, strict=True):
            held[(rank + 1) % num_ranks][part] += number
            sent[rank] += 1
    return [held[rank][rank] for rank in range(num_ranks)], sent


def walked_all_gather(parts):
    num_ranks = len(parts)
    known = [{rank: parts[rank]} for rank in range(num_ranks)]
    sent = [0] * num_ranks
    for hop in range(num_ranks - 1):
        moving = [
            ((rank - hop) % num_ranks, known[rank][(rank - hop) % num_ranks]) for rank in range(num_ranks)
        ]
        for rank, (part, number) in enumerate(moving):
            known[(rank + 1) % num_ranks][part] = number
            sent[rank] += 1
    return known, sent


@given(RANKS)
def test_collectives_equal_a_walked_ring(num_ranks):
    values = [[10 * rank + part for part in range(num_ranks)] for rank in range(num_ranks)]
    sums, scattered = walked_reduce_scatter(values)
    assert sums == [sum(row[part] for row in values) for part in range(num_ranks)]
    known, gathered = walked_all_gather(sums)
    assert known == [dict(enumerate(sums))] * num_ranks
    assert set(scattered) == {traffic.reduce_scatter_bytes(num_ranks, num_ranks)}
    assert set(gathered) == {traffic.all_gather_bytes(num_ranks, num_ranks)}
    both = [a + b for a, b in zip(scattered, gathered, strict=True)]
    assert set(both) == {traffic.all_reduce_bytes(num_ranks, num_ranks)}


@given(RANKS, st.integers(1, 10**12))
def test_fully_sharded_sends_half_as_much_again(num_ranks, parameter_bytes):
    ratio = 2 * traffic.fully_sharded_bytes(parameter_bytes, num_ranks)
    assert ratio == pytest.approx(3 * traffic.data_parallel_bytes(parameter_bytes, num_ranks))


@given(st.integers(2, 1024), st.integers(1, 200), st.integers(1, 20_000), st.floats(0.01, 100))
def test_the_pipeline_sends_less_below_the_crossover_only(num_ranks, num_layers, width, times):
    tokens = times * traffic.crossover_tokens(num_layers, width, num_ranks)
    pipeline = traffic.pipeline_bytes(2 * tokens * width)
    data = traffic.data_parallel_bytes(2 * traffic.block_parameters(num_layers, width), num_ranks)
    assert pipeline == pytest.approx(times * data)


@given(st.integers(2, 1024), st.integers(1, 200), st.integers(1, 10**9))
def test_the_pipeline_always_sends_less_than_tensor_parallel(num_ranks, num_layers, boundary_bytes):
    assert traffic.pipeline_bytes(boundary_bytes) < traffic.tensor_parallel_bytes(
        num_layers, boundary_bytes, num_ranks
    )


def test_one_rank_sends_nothing():
    assert traffic.data_parallel_bytes(100, 1) == traffic.fully_sharded_bytes(100, 1) == 0
    assert traffic.tensor_parallel_bytes(3, 100, 1) == 0
