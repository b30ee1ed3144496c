"""The critical path is the reason for the makespan; the bubble's parts are the idle time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_lab as gl
from gpipe_lab.plan import formulas
from gpipe_lab.plan.analysis import PARTS, sources
from gpipe_lab.plan.ops import WORDS, Kind, Op, peer
from gpipe_lab.plan.schedule import send_of
from gpipe_lab.plan.simulate import OpTimes
from gpipe_lab.plan.trace import COMM_LANE, PACED

TIMES = st.floats(0.5, 5.0)
SHAPE = ("fill", "middle", "drain")


@dataclass(frozen=True)
class WithFlights:
    """Times of operations, and how long each one's result travels."""

    times: dict[Op, float]
    flights: dict[Op, float]

    def duration_ms(self, op: Op, schedule: gl.Schedule) -> float:
        return self.times.get(op, 0.0)

    def delay_ms(self, op: Op, schedule: gl.Schedule) -> float:
        return self.flights.get(op, 0.0)


@st.composite
def schedules(draw: st.DrawFn) -> gl.Schedule:
    name = draw(st.sampled_from(sorted(gl.SCHEDULES)))
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    if name == "interleaved":
        num_microbatches = num_ranks * draw(st.integers(1, 2))
    schedule = gl.SCHEDULES[name](num_ranks, num_microbatches)
    modes = ["never", "always", "except_last"] + (["every:2"] if "zero" not in name else [])
    return gl.with_recompute(schedule, draw(st.sampled_from(modes)), draw(st.booleans()), layers_per_stage=4)


@st.composite
def traces(draw: st.DrawFn) -> gl.Trace:
    """Simulated, or as a run leaves it: each operation its own time, late and later than need be."""
    schedule = draw(schedules())
    ops = list(schedule.rank_of)
    times = {op: draw(TIMES) for op in ops}
    flights = dict.fromkeys(ops, draw(st.floats(0, 2)))
    trace = gl.simulate(schedule, WithFlights(times, flights))
    if draw(st.booleans()):
        return trace
    stretch = draw(st.floats(1.0, 1.5))  # what starts later leaves pauses before and after
    late = [
        e._replace(start_ms=3 + e.start_ms * stretch, end_ms=3 + e.start_ms * stretch + e.duration_ms)
        for e in trace.events
    ]
    return replace(trace, events=tuple(late), source=PACED)


@given(traces())
@settings(max_examples=60, deadline=None)
def test_the_path_runs_without_a_gap_from_the_start_to_the_end(trace):
    path = gl.critical_path(trace)
    assert path.steps[0].start_ms == trace.start_ms
    assert path.steps[-1].end_ms == trace.start_ms + trace.makespan_ms
    for step, following in zip(path.steps, path.steps[1:], strict=False):
        assert step.end_ms == following.start_ms
    assert all(step.length_ms >= 0 for step in path.steps)
    assert sum(path.lengths_ms.values()) == pytest.approx(trace.makespan_ms)


@given(traces())
@settings(max_examples=60, deadline=None)
def test_each_operation_of_the_path_needs_the_one_before_it(trace):
    path = gl.critical_path(trace)
    rows = trace.schedule.ops
    for earlier, later in zip(path.ops, path.ops[1:], strict=False):
        if earlier not in sources(later, trace.schedule):
            rank = trace.schedule.rank_of[later]
            assert rows[rank].index(later) == rows[rank].index(earlier) + 1


@given(schedules(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_longer_step_of_a_simulated_path_makes_the_whole_step_longer(schedule, data):
    ops = list(schedule.rank_of)
    times = {op: data.draw(TIMES) for op in ops}
    flights = dict.fromkeys(ops, data.draw(st.floats(0, 2)))
    trace = gl.simulate(schedule, WithFlights(times, flights))
    path = gl.critical_path(trace)
    assert {step.kind for step in path.steps} <= {"compute", "message"}, "nothing pauses in a simulation"
    op = data.draw(st.sampled_from(path.ops))
    longer = gl.simulate(schedule, WithFlights(times | {op: times[op] + 1}, flights))
    assert longer.makespan_ms == pytest.approx(trace.makespan_ms + 1)
    crossing = [step for step in path.steps if step.kind == "message"]
    if crossing:
        message = data.draw(st.sampled_from(crossing))
        before = path.steps[path.steps.index(message) - 1].op
        assert message.length_ms == pytest.approx(flights[before])
        slower = gl.simulate(schedule, WithFlights(times, flights | {before: flights[before] + 1}))
        assert slower.makespan_ms == pytest.approx(trace.makespan_ms + 1)


def test_the_path_of_a_uniform_gpipe_goes_down_along_and_up():
    path = gl.critical_path(gl.simulate(gl.gpipe(3, 2)))
    assert " ".join(map(str, path.ops)) == "0F0 1F0 2F0 2F1 2B1 1B1 0B1 0B0"
    assert path.lengths_ms == {"F": 4.0, "B": 8.0}
    said = "rank 0: 0F0 → rank 1: 1F0 → rank 2: 2F0 to 2B1 → rank 1: 1B1 → rank 0: 0B1 to 0B0; F 4 ms, B 8 ms"
    assert str(path) == said
    assert path.frame()["length_ms"].sum() == 12.0


def test_a_slow_stage_and_slow_messages_show_on_the_path():
    slow = gl.critical_path(gl.simulate(gl.gpipe(4, 16), gl.Costs(forward=[1, 1, 5, 1], backward=2)))
    assert sum(op.stage == 2 and op.kind is Kind.F for op in slow.ops) == 16
    far = gl.critical_path(gl.simulate(gl.gpipe(4, 2), gl.Costs(send=10)))
    assert far.lengths_ms["message"] == 60


def test_a_lowered_schedule_has_the_same_path_and_a_message_that_waited_to_be_taken_is_no_reason():
    schedule = gl.one_f_one_b(4, 6)
    costs = gl.Costs(send=0.25)
    plain = gl.simulate(schedule, costs)
    lowered = gl.simulate(gl.lower(schedule, costs=costs), costs)
    path = gl.critical_path(lowered)
    assert sum(path.lengths_ms.values()) == pytest.approx(lowered.makespan_ms)
    taken = {}
    for e in plain.computations:
        sends = filter(None, (send_of(op, schedule) for op in sources(e.op, schedule)))
        taken |= {peer(send): e for send in sends if peer(send).stage == e.op.stage}
    measured = [
        e._replace(start_ms=taken[e.op].start_ms, end_ms=taken[e.op].start_ms)
        if e.lane == COMM_LANE and e.op in taken
        else e
        for e in plain.events
    ]
    late = replace(plain, events=tuple(measured), source=PACED)
    assert gl.critical_path(late).ops == gl.critical_path(plain).ops


@given(traces())
@settings(max_examples=60, deadline=None)
def test_the_parts_of_the_bubble_are_its_idle_time(trace):
    bubble = gl.take_apart(trace)
    assert list(bubble.parts_ms) == list(PARTS)
    assert all(ms >= -1e-9 for ms in bubble.parts_ms.values())
    assert sum(bubble.parts_ms.values()) == pytest.approx(bubble.idle_ms, abs=1e-6)
    assert bubble.share == pytest.approx(trace.bubble_fraction)
    assert bubble.within <= bubble.share + 1e-9 <= bubble.overhead + 2e-9


@given(st.integers(1, 8), st.integers(1, 12), TIMES, TIMES)
@settings(max_examples=40, deadline=None)
def test_equal_stages_leave_fill_middle_and_drain_only(p, m, forward, backward):
    bubble = gl.take_apart(gl.simulate(gl.gpipe(p, m), gl.Costs(forward=forward, backward=backward)))
    assert all(bubble.parts_ms[name] == 0 for name in PARTS if name not in SHAPE)
    one_end = sum(range(p))
    assert bubble.parts_ms["fill"] == pytest.approx(one_end * forward)
    assert bubble.parts_ms["drain"] == pytest.approx(one_end * backward)
    assert bubble.parts_ms["middle"] == pytest.approx(one_end * (forward + backward))
    assert bubble.share == pytest.approx(formulas.bubble_fraction(p, m))
    assert bubble.overhead == pytest.approx(formulas.bubble_overhead(p, m))


def test_each_cause_alone_is_found_by_what_taking_it_away_saves():
    plain = gl.simulate(gl.gpipe(4, 8))
    base = gl.take_apart(plain)
    for trace, cause in (
        (gl.simulate(gl.gpipe(4, 8), gl.Costs(send=0.5)), "communication"),
        (gl.simulate(gl.gpipe(4, 8), gl.Costs(forward=[1.5, 1, 1, 0.5])), "imbalance"),
        (gl.simulate(gl.with_recompute(gl.gpipe(4, 8), "always")), "recompute"),
    ):
        bubble = gl.take_apart(trace)
        assert bubble.parts_ms[cause] == pytest.approx(bubble.idle_ms - base.idle_ms)
        assert [bubble.parts_ms[name] for name in SHAPE] == pytest.approx(
            [base.parts_ms[name] for name in SHAPE]
        )
        assert cause in str(bubble) and "middle" in str(bubble)
    recomputed = gl.simulate(gl.with_recompute(gl.gpipe(4, 8), "always"))
    assert gl.take_apart(recomputed).parts_ms["recompute"] == 12.0, "P (P-1) R"


def test_a_cause_whose_removal_would_add_idle_time_counts_as_nothing():
    schedule = gl.one_f_one_b(2, 2)
    unequal, equal = gl.Costs(forward=1, backward=[2, 1]), gl.Costs(forward=1, backward=1.5)
    bubble, evened = (gl.take_apart(gl.simulate(schedule, costs)) for costs in (unequal, equal))
    assert evened.idle_ms == 5 > bubble.idle_ms == 4
    assert bubble.parts_ms["imbalance"] == 0
    assert sum(bubble.parts_ms[name] for name in SHAPE) == 4


def test_the_three_meanings_of_bubble_differ():
    """Zero Bubble counts from each rank's own first operation: with 2P-1 in flight nothing is left."""
    costs = gl.Costs(forward=1, backward_input=1, backward_weight=1)
    bubble = gl.take_apart(gl.simulate(gl.zero_bubble_h2(4, 8), costs))
    assert bubble.within == pytest.approx(0)
    assert bubble.share == pytest.approx(1 - 24 / 27)
    assert bubble.overhead == pytest.approx(3 / 24)
    frame = bubble.frame()
    assert frame.loc["total", "ms"] == pytest.approx(12) and list(frame.index) == [*PARTS, "total"]


def test_a_trace_without_its_schedule_is_refused():
    trace = replace(gl.simulate(gl.gpipe(2, 2)), schedule=None)
    for question in (gl.critical_path, gl.take_apart):
        with pytest.raises(gl.InputError, match="schedule"):
            question(trace)


@given(traces())
@settings(max_examples=40, deadline=None)
def test_what_is_gained_is_what_the_simulation_says_with_those_operations_quicker(trace):
    found = trace.speed_ups(faster=0.25)
    assert set(zip(found["stage"], found["what"], strict=True)) == {
        (e.op.stage, WORDS[e.op.kind]) for e in trace.computations
    }
    assert list(found["gain (ms)"]) == sorted(found["gain (ms)"], reverse=True)
    first = found.iloc[0]
    times = {
        e.op: e.duration_ms
        * (0.75 if (e.op.stage, WORDS[e.op.kind]) == (first["stage"], first["what"]) else 1.0)
        for e in trace.computations
    }
    assert first["gain (ms)"] == pytest.approx(
        gl.replay(trace).makespan_ms - gl.simulate(trace.schedule, OpTimes(times)).makespan_ms, abs=1e-9
    )


@pytest.mark.parametrize("faster", [0, 1, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(faster):
    with pytest.raises(gl.InputError, match="a share less"):
        gl.simulate(gl.gpipe(2, 2)).speed_ups(faster=faster)
