"""Ranks and their groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipe_lab as gl
from gpipe_lab.plan import formulas
from gpipe_lab.planner.mesh import groups, microbatches_of_a_replica, overhead_at, place_of

SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES)
def test_every_rank_is_in_one_group_of_each_kind(D, P, T):
    sizes = {"data": D, "pipeline": P, "tensor": T}
    for kind, found in groups(D, P, T).items():
        assert sorted(rank for group in found for rank in group) == list(range(D * P * T))
        assert {len(group) for group in found} == {sizes[kind]}
        for group in found:  # in order of the coordinate, which is the only one that differs
            places = [place_of(rank, P, T) for rank in group]
            assert [getattr(place, kind) for place in places] == list(range(sizes[kind]))
            assert len({place._replace(**{kind: 0}) for place in places}) == 1


@given(SIZES, SIZES)
def test_pipelines_are_those_of_a_replicated_schedule(D, P):
    schedule = gl.replicate(gl.gpipe(P, 2), D)
    assert [tuple(range(r * P, r * P + P)) for r in range(D)] == groups(D, P)["pipeline"]
    for rank, row in enumerate(schedule.ops):
        assert {op.stage % P for op in row} == {place_of(rank, P).pipeline}


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8, 16, 32])
def test_overhead_is_that_of_each_pipeline(num_replicas):
    N, B, m = 32, 256, 2
    M = microbatches_of_a_replica(B, m, num_replicas)
    assert overhead_at(N, B, m, num_replicas) == formulas.bubble_overhead(N // num_replicas, M)
    trace = gl.simulate(gl.gpipe(N // num_replicas, M))
    idle = trace.bubble_fraction / (1 - trace.bubble_fraction)
    assert idle == pytest.approx(overhead_at(N, B, m, num_replicas))


def test_misfits_are_refused():
    with pytest.raises(gl.InputError, match="equally many whole micro-batches"):
        microbatches_of_a_replica(30, 4, 2)
    with pytest.raises(gl.InputError, match="num_stages"):
        groups(2, 0)
