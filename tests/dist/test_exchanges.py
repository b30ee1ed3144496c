"""Messages really sent in a written order: what ends, what hangs, what arrives in the wrong place."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gpipe_lab as gl
from gpipe_lab import check
from gpipe_lab.course.exchanges import play
from gpipe_lab.course.exercises import find
from gpipe_lab.course.exercises.ch08 import EXCHANGES, it_really_ends
from gpipe_lab.plan.lowering import as_written, hangs
from gpipe_lab.plan.ops import SENDS, Kind, Op, peer
from tests.mutants import MUTANTS

pytestmark = pytest.mark.dist


def arrivals(received):
    return {receive: sent for row in received for receive, sent in row}


@pytest.mark.parametrize(
    "schedule",
    [
        as_written(gl.gpipe(3, 4)),
        gl.lower(gl.one_f_one_b(3, 4)),
        gl.lower(gl.one_f_one_b(3, 4), hoist=0),
        gl.lower(gl.interleaved(2, 4)),
        EXCHANGES.solution(3, 6),
    ],
    ids=lambda s: s.name,
)
def test_every_message_arrives_where_it_belongs(lab_of, schedule):
    found = arrivals(play(lab_of(schedule.num_ranks), schedule))
    sends = {op for op in schedule.rank_of if op.kind in SENDS}
    assert found == {peer(send): send for send in sends}


def test_what_the_validator_refuses_really_hangs_and_the_lab_goes_on(lab_of):
    lab = lab_of(2)
    schedule = as_written(gl.one_f_one_b(2, 2))
    assert hangs(schedule)
    with pytest.raises(gl.RankFailed, match="it hangs: no rank has moved") as caught:
        play(lab, schedule, hangs_after_s=1.0)
    assert caught.value.op == Op(Kind.RECV_B, 0, 0)
    assert arrivals(play(lab, gl.lower(gl.one_f_one_b(2, 2))))


def test_two_ranks_that_both_receive_hang(lab_of):
    rows = "0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"
    both = replace(gl.gpipe(2, 1), ops=tuple(tuple(map(Op.parse, row.split())) for row in rows))
    assert hangs(both)
    with pytest.raises(gl.RankFailed, match="it hangs"):
        play(lab_of(2), both, hangs_after_s=1.0)


def test_messages_are_matched_by_order_alone(lab_of):
    """Both ends have both messages, in another order: nothing hangs, and each lies in the other's place."""
    schedule = gl.lower(gl.forward_only(2, 2), hoist=9)
    above, below = schedule.ops
    swapped = [op for op in below if op.kind is Kind.RECV_F][::-1] + [op for op in below if op.kind is Kind.F]
    crossed = replace(schedule, ops=(above, tuple(swapped)))
    found = arrivals(play(lab_of(2), crossed))
    assert found == {
        Op(Kind.RECV_F, 1, 0): Op(Kind.SEND_F, 0, 1),
        Op(Kind.RECV_F, 1, 1): Op(Kind.SEND_F, 0, 0),
    }


def test_ranks_beyond_the_schedule_have_nothing_to_do(lab_of):
    assert play(lab_of(3), gl.lower(gl.gpipe(2, 1)))[2] == []


# The exercise.


def test_solution_passes():
    result = check("08-exchanges", EXCHANGES.solution)
    assert result, repr(result)


def test_starter_is_not_done_and_shows_the_circle():
    result = check("08-exchanges", EXCHANGES.starter)
    assert result.status == "not done yet"
    assert "a circle" in repr(result) and "P=2, M=2" in repr(result)


@pytest.mark.parametrize("mutant", MUTANTS["08-exchanges"])
def test_mutant_fails(mutant):
    result = check("08-exchanges", MUTANTS["08-exchanges"][mutant])
    assert result.status == "failed", repr(result)


@pytest.mark.parametrize("make", [gl.lower, lambda s: gl.lower(s, hoist=0)], ids=["hoisted", "late"])
def test_other_right_answers_pass(make):
    assert check("08-exchanges", lambda P, M: make(gl.one_f_one_b(P, M)))


def test_the_run_on_ranks_fails_what_hangs_and_what_arrives_wrongly():
    assert it_really_ends.judge(EXCHANGES.starter, P=3, M=5) is not None
    namespace = {}
    exec(find("08-exchanges").solution_source, namespace)
    assert it_really_ends.judge(namespace["exchanges"], P=2, M=3) is None
