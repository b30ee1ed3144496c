"""Paced runs: true computation, set times."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl

pytestmark = pytest.mark.alone


def make_model(num_layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)])


def durations(run, kind):
    return [e.duration_ms for e in run.trace.computations if e.op.kind is kind]


def run_paced(lab, schedule, pace, rows=16, **options):
    x = torch.randn(rows, 8)
    return lab.run(schedule, make_model(), x, x, loss_fn=F.mse_loss, pace=pace, **options)


def test_operations_last_as_long_as_set(lab_of):
    run = run_paced(lab_of(4), gl.gpipe(4, 4), gl.Pace(forward_ms=10, backward_ms=20))
    assert run.trace.source == "measured, paced"
    assert min(durations(run, gl.Kind.F)) >= 10 and min(durations(run, gl.Kind.B)) >= 20
    assert sorted(durations(run, gl.Kind.F))[8] < 12  # the middle one


def test_times_scale_with_the_size_of_the_microbatch(lab_of):
    pace = gl.Pace(forward_ms=20, backward_ms=20, rows=4)
    run = run_paced(lab_of(2), gl.gpipe(2, 4), pace, rows=10)  # sizes 3 3 2 2 of 4 rows
    for event in run.trace.computations:
        expected = 20 * (3 if event.op.microbatch < 2 else 2) / 4
        assert expected <= event.duration_ms < expected + 8


def test_recompute_and_segments_share_the_pace(lab_of):
    pace = gl.Pace(forward_ms=8, backward_ms=16)
    run = run_paced(lab_of(2), gl.gpipe(2, 2), pace, checkpoint="every:1")
    for event in run.trace.computations:
        expected = {gl.Kind.F: 8, gl.Kind.R: 4, gl.Kind.B: 8}[event.op.kind]  # two segments a stage
        assert expected <= event.duration_ms < expected + 8


def test_a_stage_may_be_slower(lab_of):
    run = run_paced(lab_of(2), gl.gpipe(2, 2), gl.Pace(forward_ms=(5, 15), backward_ms=10))
    by_stage = {e.op.stage: e.duration_ms for e in run.trace.computations if e.op.kind is gl.Kind.F}
    assert by_stage[0] < 12 < 15 <= by_stage[1]


def test_a_rate_paces_by_counted_operations(lab_of):
    flops = 2 * 4 * 8 * 8 * 2  # a stage of two Linear(8, 8) on 4 rows
    run = run_paced(lab_of(2), gl.gpipe(2, 4), gl.Pace(flops_per_ms=flops / 10))
    assert min(durations(run, gl.Kind.F)) >= 10
    assert max(durations(run, gl.Kind.B)) >= 20  # twice a forward where the input needs a gradient


def test_operations_that_overrun_are_counted(lab_of):
    run = run_paced(lab_of(2), gl.gpipe(2, 2), gl.Pace(forward_ms=0, backward_ms=0))
    assert run.trace.overran == 8
    assert run_paced(lab_of(2), gl.gpipe(2, 2), gl.Pace(forward_ms=50, backward_ms=50)).trace.overran == 0


def test_a_link_holds_every_message(lab_of):
    """A delay c costs GPipe 2(P-1)c a step, whatever M: on the clock of the simulator and in a run."""
    pace = gl.Pace(forward_ms=20, backward_ms=20)
    held = gl.Pace(forward_ms=20, backward_ms=20, link_ms=15)
    for num_microbatches in (2, 4):
        schedule = gl.gpipe(3, num_microbatches)
        simulated = gl.simulate(gl.lower(schedule), held.costs()).makespan_ms
        assert simulated - gl.simulate(schedule, pace.costs()).makespan_ms == 2 * 2 * 15
        plain = run_paced(lab_of(3), schedule, pace, repeats=3).trace.makespan_ms
        slowed = run_paced(lab_of(3), schedule, held, repeats=3).trace.makespan_ms
        assert slowed - plain == pytest.approx(2 * 2 * 15, abs=15)


def test_a_receive_posted_when_it_is_needed_waits_for_the_whole_delay(lab_of):
    """However long an operation is held: where none is to be posted ahead, none is posted in that time."""
    pace = gl.Pace(forward_ms=20, backward_ms=20, link_ms=15)
    schedule = gl.gpipe(2, 4)
    measured, simulated = [], []
    for hoist in (0, 2):
        lowered = gl.lower(schedule, hoist=hoist, costs=pace.costs())
        simulated.append(gl.simulate(lowered, pace.costs()).makespan_ms)
        measured.append(run_paced(lab_of(2), schedule, pace, repeats=3, hoist=hoist).trace.makespan_ms)
    assert simulated[0] - simulated[1] > 50
    assert measured[0] - measured[1] == pytest.approx(simulated[0] - simulated[1], abs=15)


def test_paced_shape_is_the_simulated_one(lab_of):
    """Order and waiting, not speed: the paced makespan is the simulated one plus a few per cent."""
    for make in (gl.naive, gl.gpipe, gl.one_f_one_b):
        schedule = make(4, 4)
        pace = gl.Pace(forward_ms=10, backward_ms=20)
        run = run_paced(lab_of(4), schedule, pace, repeats=3)
        ideal = gl.simulate(schedule, pace.costs()).makespan_ms
        assert 1.0 <= run.trace.makespan_ms / ideal < 1.25


def test_gradients_do_not_depend_on_the_pace(lab_of):
    x = torch.randn(8, 8)
    plain = lab_of(4).run(gl.gpipe(4, 4), make_model(), x, x, loss_fn=F.mse_loss)
    paced = lab_of(4).run(
        gl.gpipe(4, 4), make_model(), x, x, loss_fn=F.mse_loss, pace=gl.Pace(forward_ms=1, backward_ms=2)
    )
    assert plain.loss == paced.loss
    assert all(torch.equal(plain.gradients()[name], g) for name, g in paced.gradients().items())
