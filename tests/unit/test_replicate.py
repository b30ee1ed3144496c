"""Replicas of a pipeline as one schedule."""

from dataclasses import replace

import pytest

import gpipe_lab as gl

MAKERS = [gl.naive, gl.gpipe, gl.one_f_one_b, gl.forward_only]


def test_replicas_have_ranks_and_microbatches_of_their_own():
    schedule = gl.replicate(gl.gpipe(2, 2), 2)
    assert str(schedule) == "F0 F1 . . B1 B0\n. F0 F1 B1 B0 .\nF2 F3 . . B3 B2\n. F2 F3 B3 B2 ."
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (4, 2, 4)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    assert [schedule.home(1, m) for m in range(4)] == [1, 1, 3, 3]


@pytest.mark.parametrize("make", MAKERS)
def test_replicating_goes_before_or_after_everything_else(make):
    one = make(3, 4)
    two = gl.replicate(one, 2)
    gl.validate(two)
    assert gl.lower(two) == gl.replicate(gl.lower(one), 2)
    gl.validate(gl.lower(two))
    for mode in ("always", "except_last", "every:2"):
        cut = gl.with_recompute(two, mode, layers_per_stage=4)
        assert cut == gl.replicate(gl.with_recompute(one, mode, layers_per_stage=4), 2)
    costs = gl.Costs(send=0.25)
    alone, together = gl.simulate(one, costs), gl.simulate(two, costs)
    assert together.makespan_ms == alone.makespan_ms
    assert together.bubble_fraction == pytest.approx(alone.bubble_fraction)
    assert gl.peak_in_flight(two) == gl.peak_in_flight(one) * 2
    assert {e.rank for e in together.events} == set(range(6))


def test_one_replica_is_the_pipeline_itself():
    schedule = gl.gpipe(2, 2)
    assert gl.replicate(schedule, 1) is schedule


@pytest.mark.parametrize("num", [0, -1, 1.5, True])
def test_the_number_of_replicas_is_a_whole_number(num):
    with pytest.raises(gl.InputError, match="num_replicas"):
        gl.replicate(gl.gpipe(2, 2), num)


def test_what_cannot_be_replicated_is_refused():
    for given in (gl.replicate(gl.gpipe(2, 2), 2), "gpipe"):
        with pytest.raises(gl.InputError, match="a schedule of one pipeline"):
            gl.replicate(given, 2)


def test_uneven_shares_are_refused():
    good = gl.replicate(gl.gpipe(2, 2), 2)
    for bad in (
        replace(good, num_replicas=3),
        replace(good, num_replicas=0),
        replace(good, num_microbatches=5),
        replace(good, ops=good.ops[:3]),
        replace(good, ops=(*good.ops[2:], *good.ops[:2])),
        replace(good, num_replicas=1.0),
    ):
        with pytest.raises(gl.ScheduleError):
            gl.validate(bad)
