"""Schedules of one and of several stages a rank, really run on the same ranks and ranked."""

import gpipe_lab as gl
from gpipe_lab.course.race import RankPace, race


def test_a_race_ranks_by_the_measured_makespan(lab_of):
    field = {"naive": gl.naive(2, 4), "zb-v": gl.zero_bubble_v(2, 4), "1f1b": gl.one_f_one_b(2, 4)}
    pace = RankPace(forward_ms=10, backward_input_ms=10, backward_weight_ms=10)
    model, batch = gl.tiny_gpt(2), gl.tiny_batch(4)
    found = race(lab_of(2), field, model, *batch, loss_fn=gl.next_token_loss, pace=pace)
    assert list(found.runs) == list(found.simulated) and set(found.runs) == set(field)
    table = found.frame()
    assert table["measured, paced (ms)"].is_monotonic_increasing
    assert (table["measured, paced (ms)"] >= table["simulated (ms)"]).all()
    assert table.messages.to_dict() == {"naive": 8, "1f1b": 8, "zb-v": 16}
    assert table["in flight"].to_dict() == {"naive": 1, "1f1b": 2, "zb-v": 2}
    losses = [run.loss for run in found.runs.values()]
    assert max(losses) - min(losses) < 1e-5
