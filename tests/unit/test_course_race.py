"""What chapter 11 races and counts: equal work for every schedule, and the two halves of a backward."""

import pytest
import torch
from torch import nn

import gpipe_lab as gl
from gpipe_lab.course.measure import count_halves
from gpipe_lab.course.race import RankPace, held_at_the_peak, share_of_a_rank
from gpipe_lab.engine.models import Block

PACE = RankPace(forward_ms=8, backward_input_ms=6, backward_weight_ms=4, link_ms=0)


@pytest.mark.parametrize("name", [name for name in gl.SCHEDULES if name != "forward_only"])
def test_every_rank_has_the_same_work_whatever_the_schedule(name):
    trace = PACE.simulate(gl.SCHEDULES[name](3, 6))
    assert [trace.busy_ms(rank) for rank in range(3)] == pytest.approx([6 * 18] * 3)


def test_the_peak_counts_in_a_ranks_whole_share():
    assert share_of_a_rank(gl.interleaved(4, 8, num_chunks=2)) == 0.5
    assert held_at_the_peak(gl.one_f_one_b(4, 8)) == held_at_the_peak(gl.zero_bubble_v(4, 8)) == 4
    assert held_at_the_peak(gl.interleaved(4, 8, num_chunks=2)) == 4 * (1 + 3 / (4 * 2))


def test_a_linear_layer_has_equal_halves():
    assert set(count_halves(nn.Linear(16, 24), torch.randn(5, 16))) == {2 * 5 * 16 * 24}


@pytest.mark.parametrize("tokens", [8, 32, 96])
def test_attention_has_no_backward_weight(tokens):
    halves = count_halves(Block(16, 2), torch.randn(3, tokens, 16))
    products, attention = 3 * 24 * tokens * 16**2, 3 * 4 * tokens**2 * 16
    assert halves == (products + attention, products + 2 * attention, products)
    assert halves.backward_input / halves.backward_weight == pytest.approx(1 + tokens / (3 * 16))
