"""Transfers in the order in which one first writes them down."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_lab as gl
from gpipe_lab.plan.lowering import as_written
from gpipe_lab.plan.ops import RECEIVES, SENDS, TRANSFERS
from gpipe_lab.view.waiting import plot_waiting

MAKERS = (gl.naive, gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1, gl.zero_bubble_v, gl.forward_only)
schedules = st.builds(
    lambda make, p, m: make(p, m), st.sampled_from(MAKERS), st.integers(1, 5), st.integers(1, 8)
)


@settings(deadline=None, derandomize=True)
@given(schedules)
def test_the_same_transfers_as_lowering_beside_what_they_serve(schedule):
    written = as_written(schedule)
    assert written.rank_of == gl.lower(schedule).rank_of
    assert tuple(tuple(op for op in row if op.kind not in TRANSFERS) for row in written.ops) == schedule.ops
    for row in written.ops:
        for place, op in enumerate(row):
            if op.kind in SENDS:
                assert row[place - 1] in gl.dependencies(op, written)
            if op.kind in RECEIVES:
                assert op in gl.dependencies(row[place + 1], written)


@settings(deadline=None, derandomize=True)
@given(schedules)
def test_hangs_is_what_the_validator_refuses(schedule):
    written = as_written(schedule)
    if written.walked.is_stuck:
        with pytest.raises(gl.ScheduleError, match="a circle"):
            gl.validate(written)
    else:
        gl.validate(written)
    assert not gl.lower(schedule).walked.is_stuck


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 8))
def test_gpipe_never_hangs_and_1f1b_does_from_two_on(p, m):
    assert not as_written(gl.gpipe(p, m)).walked.is_stuck
    assert not as_written(gl.naive(p, m)).walked.is_stuck
    assert as_written(gl.one_f_one_b(p, m)).walked.is_stuck == (p >= 2 and m >= 2)


def test_the_picture_names_the_circle():
    picture = plot_waiting(as_written(gl.one_f_one_b(2, 2)))
    assert "6 of 16 operations run" in picture.alt
    assert "rank 0 stands at 0SEND_F1 and waits for 1SEND_B0 of rank 1" in picture.alt
    assert picture.png()[:4] == b"\x89PNG"
    assert "Every rank ends" in plot_waiting(gl.lower(gl.one_f_one_b(3, 8))).alt
