"""Split backwards: ZB-H1, ZB-H2, ZB-V and DualPipeV against their published properties."""

import itertools

import pytest
from plan_oracle import GRIDS, I, R, can_run, v_shape

import gpipe_lab as gl
from gpipe_lab import Costs, Op
from gpipe_lab.plan import formulas

NAMES = ["zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v"]
TIMES = list(itertools.product((1, 2, 3), repeat=3))  # F, I, W


def costs_of(forward, inputs, weights, **other):
    return Costs(forward=forward, backward_input=inputs, backward_weight=weights, **other)


def longest_span(trace):
    """The longest time from a rank's first computation to its last."""
    rows = [[e for e in trace.computations if e.rank == rank] for rank in range(trace.num_ranks)]
    return max(max(e.end_ms for e in row) - min(e.start_ms for e in row) for row in rows)


def test_grids_with_fewer_micro_batches_than_ranks():
    assert str(gl.zero_bubble_h1(4, 2)).splitlines() == [
        "F0 F1 . . . . . I0 W0 I1 W1",
        ". F0 F1 . . . I0 . I1 W0 W1",
        ". . F0 F1 . I0 . I1 W0 W1 .",
        ". . . F0 I0 F1 I1 W0 W1 . .",
    ]
    assert str(gl.zero_bubble_v(2, 1)).splitlines() == [
        "0F0 . . 3F0 3I0 3W0 . . 0I0 0W0",
        ". 1F0 2F0 . . 2I0 2W0 1I0 1W0 .",
    ]


def test_h1_meets_its_bubble_for_every_ratio_of_the_times():
    for p, m in GRIDS:
        if m < p:
            continue
        schedule = gl.zero_bubble_h1(p, m)
        for forward, inputs, weights in TIMES:
            trace = gl.simulate(schedule, costs_of(forward, inputs, weights))
            bubble = trace.makespan_ms - m * (forward + inputs + weights)
            closed = formulas.zero_bubble_h1_bubble_ms(p, forward, inputs, weights)
            assert bubble == pytest.approx(closed, abs=1e-9)
            if weights <= min(forward, inputs):
                assert bubble == pytest.approx((p - 1) * (forward + inputs - weights), abs=1e-9)


def test_h1_never_takes_longer_than_one_f_one_b():
    for p, m in GRIDS[::3]:
        for forward, inputs, weights in TIMES[::2]:
            costs = costs_of(forward, inputs, weights, backward=inputs + weights)
            split_ms = gl.simulate(gl.zero_bubble_h1(p, m), costs).makespan_ms
            assert split_ms <= gl.simulate(gl.one_f_one_b(p, m), costs).makespan_ms + 1e-9


def test_h2_meets_its_bubble():
    for p in range(1, 7):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            schedule = gl.zero_bubble_h2(p, m)
            for forward, inputs, weights in TIMES:
                trace = gl.simulate(schedule, costs_of(forward, inputs, weights))
                bubble = longest_span(trace) - m * (forward + inputs + weights)
                closed = formulas.zero_bubble_h2_bubble_ms(p, forward, inputs, weights)
                assert bubble == pytest.approx(closed, abs=1e-9)
                if weights <= min(forward, (forward + inputs) / 2):
                    assert bubble == pytest.approx((p - 1) * (forward + inputs - 2 * weights), abs=1e-9)


def test_h2_and_v_have_no_bubble_where_the_three_times_are_equal():
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p + 3):
            halves = costs_of(0.5, 0.5, 0.5)
            for schedule, costs, start in [
                (gl.zero_bubble_h2(p, m), costs_of(1, 1, 1), p - 1),
                (gl.zero_bubble_v(p, m), halves, (p - 1) / 2),
            ]:
                trace = gl.simulate(schedule, costs)
                assert longest_span(trace) == pytest.approx(3 * m)
                assert trace.makespan_ms == pytest.approx(3 * m + start)  # the last rank starts so much later


def test_the_papers_order_of_bubbles():
    """Zero Bubble's README: 1F1B B, ZB1P B/3, ZBV and ZB2P 0, for F = I = W."""
    p, m = 4, 8
    makers = (gl.one_f_one_b, gl.zero_bubble_h1, gl.zero_bubble_h2)
    spans = [longest_span(gl.simulate(make(p, m), costs_of(1, 1, 1))) for make in makers]
    assert [span - 3 * m for span in spans] == [9, 3, 0]


def test_in_flight_until_the_weights():
    for p, m in [*GRIDS, (4, 20), (8, 40)]:
        assert gl.peak_in_flight(gl.zero_bubble_h1(p, m)) == (min(p, m),) * p
        assert gl.peak_in_flight(gl.zero_bubble_h2(p, m)) == (min(2 * p - 1, m),) * p
        v = gl.peak_in_flight(gl.zero_bubble_v(p, m))
        assert v == tuple(formulas.zero_bubble_v_peak(p, m, k) for k in range(p))
        assert max(v) == min(2 * p, 2 * m)
        for name in NAMES[:2]:
            closed = tuple(formulas.peak_in_flight(name, p, m, k) for k in range(p))
            assert closed == gl.peak_in_flight(gl.SCHEDULES[name](p, m))


def test_the_v_turns_round_without_a_message():
    for p, m in GRIDS[::5]:
        schedule = gl.zero_bubble_v(p, m)
        assert schedule.stage_to_rank == v_shape(p)
        sends = [op for row in gl.lower(schedule).ops for op in row if op.kind.value.startswith("SEND")]
        assert len(sends) == 2 * m * (2 * p - 2)
        assert not any(op.stage == p - 1 and op.kind is gl.Kind.SEND_F for op in sends)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["always", "except_last", "every:2"])
def test_a_split_backward_is_recomputed_right_before_its_input_half(name, mode):
    for p, m in [(1, 1), (2, 3), (3, 5), (4, 4)]:
        for early in (False, True):
            schedule = gl.with_recompute(gl.SCHEDULES[name](p, m), mode, early, layers_per_stage=4)
            for row in schedule.ops:
                for here, after in itertools.pairwise(row):
                    assert (after.kind is I) <= (here.kind is R) or after.microbatch == m - 1
                    if here.kind is R:
                        assert after == Op(I, here.stage, here.microbatch)
            assert can_run(schedule)
            assert all(can_run(gl.lower(schedule, hoist=hoist)) for hoist in (0, 2))


def test_recompute_keeps_the_peaks_in_flight():
    for name in NAMES:
        schedule = gl.SCHEDULES[name](3, 6)
        assert gl.peak_in_flight(gl.with_recompute(schedule, "always")) == gl.peak_in_flight(schedule)


def test_dualpipe_holds_one_half_stage_more_than_twice_the_ranks():
    for p, m in GRIDS:
        peaks = gl.peak_in_flight(gl.dualpipe_v(p, m))
        assert max(peaks) <= 2 * p + 1
        if m >= 2 * p:
            assert peaks == (2 * p + 1,) * p


def test_the_bubble_of_dualpipe_where_the_three_times_are_equal():
    halves = gl.Costs(forward=1, backward_input=1, backward_weight=1)
    for p in range(1, 7):
        for m in (2 * p, 2 * p + 1, 3 * p + 2):
            makespan = gl.simulate(gl.dualpipe_v(p, m), halves).makespan_ms
            assert makespan == pytest.approx(2 * m * 3 + p - 1)
