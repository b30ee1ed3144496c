import itertools
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import GRIDS, LARGE, B, F, R, authored, interleaved, loop, needed, random_schedule, v_shape

import gpipe_lab as gl
from gpipe_lab import Costs, Op
from gpipe_lab.plan import formulas

times = st.floats(0.01, 100)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1), (0.3, 0.7), (10, 0.1)])
def test_the_bubble_is_the_formula_for_equal_stages(name, forward, backward):
    for p, m in GRIDS + LARGE:
        trace = gl.simulate(gl.SCHEDULES[name](p, m), Costs(forward=forward, backward=backward))
        assert trace.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12, rel=0)
        assert trace.bubble_fraction == pytest.approx(formulas.bubble_fraction(p, m), abs=1e-12, rel=0)
        assert trace.makespan_ms == pytest.approx(formulas.pipeline_ms(p, m, forward, backward), rel=1e-12)
        assert trace.useful_fraction == pytest.approx(m / (m + p - 1), abs=1e-12, rel=0)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 8), st.integers(1, 8), times, times, st.sampled_from(["gpipe", "one_f_one_b"]))
def test_the_bubble_does_not_depend_on_the_times(p, m, forward, backward, name):
    trace = gl.simulate(gl.SCHEDULES[name](p, m), Costs(forward=forward, backward=backward))
    assert trace.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12, rel=0)


def test_naive_uses_one_rank_at_a_time():
    for p, m in GRIDS:
        trace = gl.simulate(gl.naive(p, m), Costs(forward=1.5, backward=2.5))
        assert trace.makespan_ms == pytest.approx(formulas.naive_ms(p, m, 1.5, 2.5), rel=1e-12)
        for rank in range(p):
            assert trace.busy_fraction(rank) == pytest.approx(1 / p, abs=1e-12)
        assert trace.bubble_fraction == pytest.approx(1 - 1 / p, abs=1e-12)


def test_the_laundry():
    minutes = Costs(forward=30)
    assert gl.simulate(gl.forward_only(3, 4), minutes).makespan_ms == 180
    assert 4 * gl.simulate(gl.forward_only(3, 1), minutes).makespan_ms == 360
    assert gl.simulate(gl.forward_only(3, 10), minutes).makespan_ms == 360
    assert 10 * gl.simulate(gl.forward_only(3, 1), minutes).makespan_ms == 900
    full = [c for c in zip(*gl.forward_only(3, 4).cells(), strict=True) if "." not in c]
    assert len(full) == 2


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.lists(times, min_size=1, max_size=8), st.integers(1, 12))
def test_unequal_machines(machines, loads):
    trace = gl.simulate(gl.forward_only(len(machines), loads), Costs(forward=machines))
    assert trace.makespan_ms == pytest.approx(formulas.laundry_minutes(machines, loads), rel=1e-12)


def test_recompute_waiting_and_early():
    def makespan(p, m, early):
        schedule = gl.with_recompute(gl.gpipe(p, m), "always", early=early)
        return gl.simulate(schedule, Costs(forward=1, backward=2)).makespan_ms

    assert (makespan(4, 7, False), makespan(4, 7, True)) == (40, 37)
    for p, m in GRIDS:
        assert makespan(p, m, False) == 4 * (m + p - 1)
        assert makespan(p, m, True) == 4 * (m + p - 1) - (p - 1)


def test_early_recompute_lowers_the_bubble_and_the_useful_share():
    plain = gl.simulate(gl.gpipe(4, 8))
    early = gl.simulate(gl.with_recompute(gl.gpipe(4, 8), "always", early=True))
    waiting = gl.simulate(gl.with_recompute(gl.gpipe(4, 8), "always"))
    percent = [round(100 * t.bubble_fraction) for t in (plain, early, waiting)]
    assert percent == [27, 22, 27]
    useful = [round(100 * t.useful_fraction) for t in (plain, early, waiting)]
    assert useful == [73, 59, 55]


def test_early_puts_one_recompute_ahead_of_its_gradient_at_most():
    schedule = gl.with_recompute(gl.gpipe(4, 6), "always", early=True)
    trace = gl.simulate(schedule)
    when = {e.op: e for e in trace.computations}
    for row in schedule.ops:
        for op, following in itertools.pairwise(row):
            if op.kind is R:
                assert following == Op(B, op.stage, op.microbatch)
    early = {
        op for op in when if op.kind is R and op.stage < 3
        and when[op].start_ms < when[Op(B, op.stage + 1, op.microbatch)].end_ms
    }  # fmt: skip
    assert {Op(R, stage, 5) for stage in range(3)} <= early


def test_recompute_and_segments_share_a_stage_s_time():
    schedule = gl.with_recompute(gl.gpipe(1, 1), "every:2", layers_per_stage=5)
    trace = gl.simulate(schedule, Costs(forward=1, backward=3, recompute=6))
    assert [e.duration_ms for e in trace.computations] == pytest.approx([1, 2, 1, 2, 1, 2, 1])


def test_a_message_delays_its_receiver():
    # one micro-batch through P stages passes P-1 links forward and P-1 back
    for p in range(1, 9):
        trace = gl.simulate(gl.gpipe(p, 1), Costs(forward=1, backward=2, send=0.5))
        assert trace.makespan_ms == pytest.approx(3 * p + (p - 1))
        for m in range(1, 9):
            delayed = gl.simulate(gl.gpipe(p, m), Costs(send=0.25)).makespan_ms
            assert delayed == pytest.approx(formulas.pipeline_ms(p, m, 1, 2) + 2 * (p - 1) * 0.25)


def test_stages_on_one_rank_send_nothing():
    schedule = authored("0F0 1F0 1B0 0B0", place=(0, 0))
    trace = gl.simulate(schedule, Costs(send=100))
    assert trace.makespan_ms == 6
    assert {e.lane for e in trace.events} == {"compute"}


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(0,), (0, 1), (0, 1, 2), loop(2), v_shape(2), v_shape(3), (0, 0, 1), (1, 0)]),
    st.integers(1, 4),
    st.sampled_from(["F", "B", "IW", "RB", "RB2"]),
)
def test_random_schedules_start_as_soon_as_they_can(seed, place, m, kind):
    schedule = random_schedule(random.Random(seed), place, m, kind)
    costs = Costs(forward=1.5, backward=3, recompute=1, backward_input=0.5, backward_weight=2, send=0.25)
    when = {e.op: e for e in gl.simulate(schedule, costs).computations}
    assert set(when) == {op for row in schedule.ops for op in row}
    for row in schedule.ops:
        free = 0.0
        for op in row:
            arrivals = [
                when[s].end_ms + (0.25 if place[s.stage] != place[op.stage] else 0)
                for s in needed(op, schedule)
            ]
            assert when[op].start_ms == max([free, *arrivals])
            free = when[op].end_ms


def test_interleaving_divides_the_bubble():
    for p, m in [(2, 4), (4, 4), (4, 8), (8, 16)]:
        for chunks in (1, 2, 3):
            trace = gl.simulate(interleaved(p, m, chunks), Costs(forward=1 / chunks, backward=2 / chunks))
            assert trace.makespan_ms == pytest.approx(3 * m + 3 * (p - 1) / chunks, rel=1e-12)


def test_costs_default_and_fall_back():
    split = authored("0F0 0I0 0W0")
    assert [e.duration_ms for e in gl.simulate(split).events] == [1, 1, 1]
    given_costs = Costs(forward=3, backward_input=4, backward_weight=5)
    assert [e.duration_ms for e in gl.simulate(split, given_costs).events] == [3, 4, 5]
    recomputed = gl.with_recompute(gl.gpipe(1, 1), "always")
    assert [e.duration_ms for e in gl.simulate(recomputed, Costs(forward=7)).events] == [7, 7, 2]


@pytest.mark.parametrize(
    "bad",
    [True, "a", "1", [], (), -1, -0.5, math.nan, math.inf, [1, math.nan], [1, None], [[1], [2]], [True, 1],
     {0: 1}, {1, 2}, 1j, np.array([1, np.nan]), np.array([[1, 2]]), np.array("x"), np.bool_(True)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("name", ["forward", "recompute", "send"])
def test_costs_that_are_no_times_are_refused(bad, name):
    with pytest.raises(gl.InputError, match="a cost is a finite number") as caught:
        Costs(**{name: bad})
    assert caught.value.got == f"{name}={bad!r}"


def test_forward_and_backward_always_cost_something_stated():
    for name in ("forward", "backward", "send"):
        with pytest.raises(gl.InputError, match="a cost is"):
            Costs(**{name: None})


@pytest.mark.parametrize("name", ["forward", "backward", "recompute", "backward_input", "send"])
@pytest.mark.parametrize("count", [1, 3])
def test_costs_per_stage_have_one_entry_a_stage(name, count):
    schedule = gl.with_recompute(gl.gpipe(2, 2), "always")
    if name == "backward_input":
        schedule = authored("0F0 0I0 0W0", "1F0 1I0 1W0")
    with pytest.raises(gl.InputError, match="one entry per stage"):
        gl.simulate(schedule, Costs(**{name: [1.0] * count}))


def test_costs_take_numpy_and_plain_numbers_alike():
    for one in (2, 2.0, np.int64(2), np.float32(2), np.float64(2), np.array(2.0)):
        assert Costs(forward=one) == Costs(forward=2.0)
    for many in ([1, 2], (1, 2.0), np.array([1, 2]), np.array([1.0, 2.0]), range(1, 3)):
        assert Costs(forward=many) == Costs(forward=[1.0, 2.0])
    assert len({Costs(forward=[1, 2]), Costs(forward=np.array([1, 2]))}) == 1


def test_zero_costs_give_a_trace():
    trace = gl.simulate(gl.gpipe(2, 2), Costs(forward=0, backward=0))
    assert trace.makespan_ms == 0
    assert len(trace.computations) == 8


def test_costs_of_a_trace_reproduce_it():
    costs = Costs(forward=[1, 2, 3], backward=[2, 5, 4], recompute=[1, 1, 2])
    for schedule in [gl.gpipe(3, 4), gl.with_recompute(gl.one_f_one_b(3, 4), "always")]:
        trace = gl.simulate(schedule, costs)
        again = gl.simulate(schedule, gl.costs_of(trace))
        assert again.makespan_ms == pytest.approx(trace.makespan_ms, rel=1e-12)
        assert gl.replay(trace).makespan_ms == pytest.approx(trace.makespan_ms, rel=1e-12)
    segments = gl.with_recompute(gl.gpipe(3, 4), "every:2", layers_per_stage=5)
    trace = gl.simulate(segments, costs)
    assert gl.costs_of(trace).backward == pytest.approx((2, 5, 4))
    assert gl.simulate(segments, gl.costs_of(trace)).makespan_ms == pytest.approx(trace.makespan_ms)


def test_costs_of_split_backwards_know_what_a_whole_one_takes():
    costs = Costs(forward=[1, 2], backward_input=[2, 5], backward_weight=[1, 3])
    found = gl.costs_of(gl.simulate(gl.zero_bubble_h1(2, 3), costs))
    assert (found.backward_input, found.backward_weight) == ((2, 5), (1, 3))
    assert found.backward == (3, 8)


def test_replay_drops_the_messages():
    trace = gl.simulate(gl.gpipe(3, 4), Costs(send=1.0))
    assert gl.replay(trace).makespan_ms == pytest.approx(18)


@pytest.mark.alone
def test_a_large_schedule_is_simulated_quickly():
    schedule = gl.gpipe(32, 512)
    start = time.perf_counter()
    trace = gl.simulate(schedule, Costs(forward=1, backward=2))
    elapsed = time.perf_counter() - start
    assert trace.bubble_fraction == pytest.approx(31 / 543, abs=1e-12)
    assert elapsed < 10, f"32768 operations took {elapsed:.2f} s"


@pytest.mark.alone
def test_a_slider_s_schedule_is_simulated_within_a_frame():
    start = time.perf_counter()
    for _ in range(5):
        gl.simulate(gl.gpipe(8, 32))
    assert (time.perf_counter() - start) / 5 < 0.1


def test_forwards_only_are_useful_time():
    trace = gl.simulate(gl.forward_only(3, 4))
    assert trace.useful_fraction == pytest.approx(4 / 6)
    assert all(e.op.kind is F for e in trace.computations)
