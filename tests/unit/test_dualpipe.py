"""DualPipeV against its published shape: every operation once, 2P+1 half stages held, its bubble."""

from collections import Counter

import pytest
from plan_oracle import GRIDS, B, F, I, W, can_run, v_shape

import gpipe_lab as gl
from gpipe_lab import Op


@pytest.mark.parametrize("p", range(1, 9))
def test_complete_and_able_to_run_by_the_oracle_lowered_too(p):
    for m in (1, 2, p, 2 * p, 3 * p + 1):
        schedule = gl.dualpipe_v(p, m)
        assert schedule.stage_to_rank == v_shape(p)
        found = Counter(op for row in schedule.ops for op in row)
        assert set(found.values()) == {1}
        for stage in range(2 * p):
            for microbatch in range(m):
                assert Op(F, stage, microbatch) in found
                parts = {kind for kind in (B, I, W) if Op(kind, stage, microbatch) in found}
                assert parts in ({B}, {I, W})
        assert can_run(schedule)
        assert all(can_run(gl.lower(schedule, hoist=hoist)) for hoist in (0, 2))


def test_the_grid_of_two_ranks():
    rows = [list(map(schedule.label, row)) for schedule in [gl.dualpipe_v(2, 4)] for row in schedule.ops]
    assert rows[0][:8] == ["0F0", "0F1", "0F2", "3F0", "3I0", "3W0", "3F1", "0F3"]
    assert rows[1][-6:] == ["2B2", "1B2", "2I3", "1I3", "2W3", "1W3"]


def test_every_rank_holds_one_half_stage_more_than_twice_the_ranks():
    for p, m in GRIDS:
        peaks = gl.peak_in_flight(gl.dualpipe_v(p, m))
        assert max(peaks) <= 2 * p + 1
        if m >= 2 * p:
            assert peaks == (2 * p + 1,) * p


def test_its_bubble_where_the_three_times_are_equal():
    halves = gl.Costs(forward=1, backward_input=1, backward_weight=1)
    for p in range(1, 7):
        for m in (2 * p, 2 * p + 1, 3 * p + 2):
            makespan = gl.simulate(gl.dualpipe_v(p, m), halves).makespan_ms
            assert makespan == pytest.approx(2 * m * 3 + p - 1)
