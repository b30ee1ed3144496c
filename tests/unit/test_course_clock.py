"""What the course reads off a trace: who computes at once, what is done when, traces end to end."""

from __future__ import annotations

import pytest

from gpipe_lab.course.clock import done_ms, end_to_end, time_at_once
from gpipe_lab.plan.errors import InputError
from gpipe_lab.plan.schedules import forward_only, gpipe, naive
from gpipe_lab.plan.simulate import Costs, simulate
from gpipe_lab.plan.trace import Trace

LAUNDRY = Costs(forward=30.0)


def test_two_of_six_slots_see_all_three_machines_at_work() -> None:
    assert time_at_once(simulate(forward_only(3, 4), LAUNDRY)) == (0, 60, 60, 60)


@pytest.mark.parametrize("num_stages", range(1, 6))
@pytest.mark.parametrize("num_loads", range(1, 8))
def test_time_at_once_adds_up(num_stages: int, num_loads: int) -> None:
    trace = simulate(gpipe(num_stages, num_loads), Costs(forward=7.0, backward=11.0))
    times = time_at_once(trace)
    assert len(times) == num_stages + 1
    assert sum(times) == pytest.approx(trace.makespan_ms)
    busy = sum(trace.busy_ms(rank) for rank in range(num_stages))
    assert sum(n * time for n, time in enumerate(times)) == pytest.approx(busy)


def test_naive_has_one_rank_busy_at_a_time() -> None:
    trace = simulate(naive(4, 3))
    assert time_at_once(trace) == (0, trace.makespan_ms, 0, 0, 0)


def test_a_message_under_way_leaves_all_ranks_idle() -> None:
    assert time_at_once(simulate(naive(2), Costs(forward=1.0, backward=2.0, send=5.0)))[0] == 10.0


def test_an_operation_of_no_length_counts_nowhere() -> None:
    assert time_at_once(simulate(naive(2), Costs(forward=1.0, backward=0.0))) == (0, 2, 0)


def test_done_when() -> None:
    assert done_ms(simulate(forward_only(3, 4), LAUNDRY)) == (90, 120, 150, 180)
    assert done_ms(simulate(naive(2, 2), Costs(forward=1.0, backward=2.0))) == (6, 12)


def test_end_to_end() -> None:
    one = simulate(forward_only(3, 1), LAUNDRY)
    joined = end_to_end([one] * 4)
    assert joined.makespan_ms == 360
    assert done_ms(joined) == (90, 180, 270, 360)
    assert joined.bubble_fraction == pytest.approx(2 / 3)
    assert time_at_once(joined) == (0, 360, 0, 0)
    assert joined.schedule is not None
    assert joined.schedule.name == "one by one"
    assert joined.schedule.ops == forward_only(3, 4).ops
    assert joined.source == one.source


def test_end_to_end_of_different_sizes_and_starts() -> None:
    two, three = (simulate(forward_only(2, m), Costs(forward=[1.0, 3.0])) for m in (2, 3))
    late = Trace(
        tuple(e._replace(start_ms=e.start_ms + 50, end_ms=e.end_ms + 50) for e in three.events),
        three.source,
        three.schedule,
        overran=2,
    )
    joined = end_to_end([two, late], name="both")
    assert joined.makespan_ms == two.makespan_ms + three.makespan_ms
    assert joined.schedule is not None
    assert (joined.schedule.name, joined.schedule.num_microbatches, joined.overran) == ("both", 5, 2)
    assert len(done_ms(joined)) == 5


@pytest.mark.parametrize("traces", [[], [Trace((), "simulated")]])
def test_end_to_end_needs_traces_with_schedules(traces: list[Trace]) -> None:
    with pytest.raises(InputError, match="end_to_end"):
        end_to_end(traces)
