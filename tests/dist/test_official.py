"""Chapter 09's exercise on real ranks, and torch's listings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpipe_lab as gl
from gpipe_lab import check
from gpipe_lab.course.exercises.ch09 import PORT
from gpipe_lab.course.official import torch_listing
from gpipe_lab.tools.bench import paced, real
from gpipe_lab.tools.record import LONGER
from gpipe_lab.tools.torch_pipeline import TORCH_SCHEDULES, their_traces
from tests.mutants import MUTANTS

pytestmark = pytest.mark.dist


def test_solution_passes():
    result = check("09-port", PORT.solution)
    assert result, repr(result)


def test_starter_is_not_done():
    assert check("09-port", PORT.starter).status == "not done yet"


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        ("gradients not scaled", "4 × as large"),
        ("losses added up", "the batch's loss"),
        ("stepped twice", "1.25 × as large"),
        ("stages numbered from the end", "an end on every rank"),
    ],
)
def test_mutant_fails(mutant, said):
    result = check("09-port", MUTANTS["09-port"][mutant])
    assert result.status == "failed"
    assert said in repr(result)


def test_every_mutant_is_tried():
    assert len(MUTANTS["09-port"]) == 4


def test_torch_lists_its_schedules_without_a_process():
    assert gl.from_csv(torch_listing("GPipe", 3, 4)).ops == gl.gpipe(3, 4, backward="fifo").ops
    assert gl.from_csv(torch_listing("Interleaved1F1B", 2, 4, 2)).ops == gl.interleaved(2, 4, 2).ops
    with pytest.raises(gl.ScheduleError, match="no 1F0, but 1F2"):
        gl.from_csv(torch_listing("1F1B", 2, 2))
    with pytest.raises(gl.InputError, match="one stage a rank"):
        torch_listing("GPipe", 2, 4, 2)


def test_torch_s_run_is_a_trace_in_torch_s_order(lab_of):
    stages = [nn.Linear(16, 16) for _ in range(2)]
    pace = gl.Pace(forward_ms=2, backward_ms=4)
    (trace,), peak = their_traces(lab_of(2), stages, "gpipe", 4, torch.randn(8, 16), 1, pace=pace)
    listed = gl.from_csv(torch_listing("GPipe", 2, 4))
    assert trace.schedule.ops == listed.ops and trace.source == "measured, paced"
    assert trace.makespan_ms >= gl.simulate(listed, pace.costs()).makespan_ms and peak > 0
    assert "communication and launch" in str(gl.explain_error(trace, gl.simulate(listed, pace.costs())))


def test_the_benchmark_sets_every_schedule_of_torchs_beside_ours(lab_of):
    found = list(paced(lab_of(2), 2, 4, 1.0, repeats=1)) + list(real(lab_of(2), 1, width=8))
    for name in TORCH_SCHEDULES:
        mine = [f for f in found if name in f.what.replace(":", ",").split(", ")]
        assert [f.unit for f in mine if f.engine == LONGER] == ["ratio"] * 3
        assert all(0.0 < f.least <= f.value <= f.most for f in mine)
        assert {f.unit for f in mine} == {"ratio", "x", "MiB"}
