"""The clock: one walk a schedule, any costs after that, the same to the last bit as laying out one by one."""

import pickle
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import allowed, laid_out, loop, random_schedule, v_shape

import gpipe_lab as gl
from gpipe_lab import Costs
from gpipe_lab.plan.trace import Trace
from gpipe_lab.plan.walk import walk

PLACES = [(0,), (0, 1), (0, 1, 2), loop(2), v_shape(2), v_shape(3), (0, 0, 1), (1, 0)]


def costs_from(rng, num_stages):
    def each():
        return [rng.random() * rng.choice([0, 1, 1, 3]) for _ in range(num_stages)]

    return Costs(
        forward=each(), backward=each(), recompute=each(), backward_input=each(), backward_weight=each(),
        send=each(),
    )  # fmt: skip


def assert_laid_out(schedule, costs):
    expected = laid_out(schedule, costs)
    trace = gl.simulate(schedule, costs)
    placed = {e.op: (e.start_ms, e.end_ms) for e in trace.events if e.op in schedule.rank_of}
    assert placed == expected  # floats, and equal
    assert list(trace.events) == sorted(trace.events, key=lambda e: (e.start_ms, e.rank))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.integers(0, 10**6), st.sampled_from(PLACES), st.integers(1, 4),
    st.sampled_from(["F", "B", "IW", "RB", "RB2"]), st.sampled_from([None, 0, 2, 9]),
)  # fmt: skip
def test_random_schedules_are_laid_out_as_their_graph_says(seed, place, m, kind, hoist):
    rng = random.Random(seed)
    schedule = random_schedule(rng, place, m, kind)
    costs = costs_from(rng, len(place))
    assert_laid_out(schedule if hoist is None else gl.lower(schedule, hoist=hoist, costs=costs), costs)


@pytest.mark.parametrize("name", list(gl.SCHEDULES))
def test_built_in_schedules_are_laid_out_as_their_graph_says(name):
    rng = random.Random(0)
    for p, m in allowed(name, [(1, 1), (2, 4), (3, 3), (4, 8), (5, 10)]):
        schedule = gl.SCHEDULES[name](p, m)
        for variant in (schedule, gl.with_recompute(schedule, "always"), gl.replicate(schedule, 2)):
            assert_laid_out(variant, costs_from(rng, schedule.num_stages))
            assert_laid_out(gl.lower(variant), costs_from(rng, schedule.num_stages))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(PLACES), st.integers(1, 4), st.sampled_from(["F", "B", "IW"]))
def test_a_trace_s_figures_are_those_of_its_events(seed, place, m, kind):
    rng = random.Random(seed)
    schedule = random_schedule(rng, place, m, kind)
    late = gl.simulate(schedule, costs_from(rng, len(place)))
    whole = Trace(late.events, late.source, schedule)
    assert late == whole
    for figure in ("start_ms", "makespan_ms", "bubble_fraction", "useful_fraction"):
        assert getattr(late, figure) == getattr(whole, figure)
    for rank in range(schedule.num_ranks):
        assert late.busy_ms(rank) == sum(e.duration_ms for e in whole.computations if e.rank == rank)
        assert whole.busy_ms(rank) == late.busy_ms(rank)


def test_figures_need_no_events_and_a_pickle_brings_them():
    trace = gl.simulate(gl.gpipe(4, 8))
    assert (trace.makespan_ms, round(trace.bubble_fraction, 6)) == (33, round(3 / 11, 6))
    assert "events" not in vars(trace)
    again = pickle.loads(pickle.dumps(trace))
    assert again == trace and again.events and again.bubble_fraction == trace.bubble_fraction


def test_one_schedule_takes_other_costs_each_time():
    schedule = gl.one_f_one_b(3, 5)
    for forward in (1.0, 2.0, 0.5):
        assert gl.simulate(schedule, Costs(forward=forward, backward=2)).makespan_ms == 7 * (forward + 2)


def test_a_walk_is_a_stuck_one_where_ranks_wait_in_a_circle():
    ops = (gl.gpipe(2, 1).ops[0][::-1], gl.gpipe(2, 1).ops[1])
    schedule = gl.Schedule("stuck", 1, (0, 1), ops)
    assert schedule.walked.is_stuck and str(schedule).splitlines()[0] == "B0 F0"
    with pytest.raises(gl.ScheduleError):
        gl.simulate(schedule)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(PLACES), st.integers(1, 4), st.sampled_from(["F", "B", "IW"]))
def test_other_orders_of_the_same_operations_are_walked_by_number(seed, place, m, kind):
    rng = random.Random(seed)
    basis, other = (random_schedule(rng, place, m, kind) for _ in range(2))
    graph, costs = basis.graph, costs_from(rng, len(place))
    number = {op: i for i, op in enumerate(graph.ops)}
    walked = walk(graph, [[number[op] for op in row] for row in other.ops])
    assert not walked.is_stuck and sorted(walked.order) == list(range(len(graph.ops)))
    work_ms, travel_ms = (
        [price(op, basis) for op in graph.ops] for price in (costs.duration_ms, costs.delay_ms)
    )
    starts, ends = walked.times(work_ms, travel_ms)
    for event in gl.simulate(other, costs).computations:
        assert (starts[number[event.op]], ends[number[event.op]]) == (event.start_ms, event.end_ms)


def fastest(action, times=5):
    def seconds():
        start = time.process_time()
        action()
        return time.process_time() - start

    return min(seconds() for _ in range(times))


def loop_of(size):
    """A sum and a maximum for each of so many operations."""
    numbers = [0.5] * size

    def run():
        total = 0.0
        for number in numbers:
            total = max(total, number) + number

    return run


@pytest.mark.alone
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1"])
def test_an_operation_is_laid_out_in_the_time_of_a_few_sums(name):
    """About 4 times a sum and a maximum in a loop; a million operations a second allow about 12."""
    schedule = gl.SCHEDULES[name](16, 64)

    def simulated():
        for scale in (1.0, 2.0):
            trace = gl.simulate(schedule, Costs(forward=[scale] * schedule.num_stages, send=0.1))
            assert trace.makespan_ms > 0 and 0 < trace.bubble_fraction < 1

    simulated()  # works out what is kept with the schedule
    assert fastest(simulated) / 2 < 12 * fastest(loop_of(len(schedule.rank_of)))


@pytest.mark.alone
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved"])
def test_a_schedule_is_checked_lowered_and_simulated_for_the_first_time_as_quickly(name):
    """About 35 times a sum and a maximum in a loop; a quarter of a million operations a second allow 48."""
    schedules = [gl.SCHEDULES[name](16, 128) for _ in range(5)]
    size = sum(map(len, schedules[0].ops))

    def seen_first():
        schedule = schedules.pop()
        gl.validate(schedule)
        gl.lower(schedule)
        assert gl.simulate(schedule).makespan_ms > 0

    assert fastest(seen_first) < 48 * fastest(loop_of(size))
