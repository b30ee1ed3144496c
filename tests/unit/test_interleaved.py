"""Several stages a rank (Megatron-LM §2.2.2)."""

import plan_oracle
import pytest
from plan_oracle import GRIDS, loop

import gpipe_lab as gl
from gpipe_lab import Costs
from gpipe_lab.plan import formulas

SHAPES = [(p, m, v) for p in range(1, 9) for m in range(p, 9, p) for v in (1, 2, 3, 4)]
MORE = [(2, 12, 2), (3, 9, 5), (4, 16, 3), (8, 24, 2)]


def test_the_grid_of_two_by_two():
    assert str(gl.interleaved(2, 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 . 2B0 . 2B1 0B0 0B1",
        ". 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .",
    ]


def test_the_order_of_megatron():
    for p, m, v in SHAPES + MORE:
        schedule = gl.interleaved(p, m, v)
        expected = plan_oracle.interleaved(p, m, v)
        assert (schedule.ops, schedule.stage_to_rank) == (expected.ops, expected.stage_to_rank)
    assert gl.interleaved(3, 6) == gl.interleaved(3, 6, num_chunks=2)
    assert gl.interleaved(3, 6).stage_to_rank == loop(3)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (2, 1), (0.3, 0.7)])
def test_the_bubble_falls_by_the_number_of_chunks(forward, backward):
    for p, m, v in SHAPES + MORE:
        costs = Costs(forward=forward / v, backward=backward / v)
        trace = gl.simulate(gl.interleaved(p, m, v), costs)
        assert trace.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
        assert trace.bubble_fraction == pytest.approx(
            formulas.interleaved_bubble_fraction(p, m, v), abs=1e-12
        )
        closed = formulas.interleaved_ms(p, m, v, forward / v, backward / v)
        assert trace.makespan_ms == pytest.approx(closed, rel=1e-12)
        bubble_ms = trace.makespan_ms - m * (forward + backward)
        assert bubble_ms == pytest.approx((p - 1) * (forward + backward) / v)


def test_eight_by_eight():
    one, two = gl.simulate(gl.one_f_one_b(8, 8)), gl.simulate(gl.interleaved(8, 8))
    assert round(100 * one.bubble_fraction, 1) == 46.7
    assert round(100 * two.bubble_fraction, 1) == 30.4


def test_peak_and_messages():
    for p, m, v in SHAPES + MORE:
        schedule = gl.interleaved(p, m, v)
        peaks = gl.peak_in_flight(schedule)
        assert peaks == tuple(formulas.interleaved_peak(p, m, v, k) for k in range(p))
        if m > p:  # Megatron's factor over 1F1B, whose rank 0 holds P stages of v chunks each
            assert max(peaks) / v == pytest.approx((1 + (p - 1) / (p * v)) * p)
        sends = [op for row in gl.lower(schedule).ops for op in row if op.kind.value.startswith("SEND")]
        assert len(sends) == formulas.num_messages(p, m, v) == (2 * m * (v * p - 1) if p > 1 else 0)


def test_micro_batches_come_in_groups_of_one_per_rank():
    for p, m in GRIDS:
        if m % p == 0:
            continue
        with pytest.raises(gl.InputError, match="multiple of num_ranks") as caught:
            gl.interleaved(p, m)
        remedy = int(caught.value.remedy.split("=")[1])
        assert remedy >= m
        gl.validate(gl.interleaved(p, remedy))
    for bad in (0, -1, True, 1.5, None, "2"):
        with pytest.raises(gl.InputError, match="num_chunks is a whole number"):
            gl.interleaved(2, 2, bad)
