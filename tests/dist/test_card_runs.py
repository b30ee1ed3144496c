"""Exercise 06-beat-the-tuner on real cards: what fits runs, what does not is named, wrong choosers fail."""

import pytest

from gpipe_lab import check
from gpipe_lab.course.exercises import card_runs, ch06
from gpipe_lab.course.exercises.card_runs import TASKS, does_not_fit
from tests.mutants import MUTANTS

pytestmark = pytest.mark.dist

EXERCISE = ch06.BEST_SETTING

# Mutant -> the property that it must fail.
FAILS = {
    "max M: as many micro-batches as fit": "at least 95 %",
    "min bubble": "at least 95 %",
    "as large micro-batches as fit": "at least 95 %",
    "all the cards there are": "at least 95 %",
    "one card, whatever fits": "it fits",
    "activations alone, weights forgotten": "it fits",
}


@pytest.fixture(autouse=True)
def progress_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("GPIPE_LAB_PROGRESS", str(tmp_path / "progress.json"))


def test_the_solution_passes_and_the_starter_is_not_done():
    assert check(EXERCISE, EXERCISE.solution).status == "passed"
    assert check(EXERCISE, EXERCISE.starter).status == "not done yet"


def test_every_mutant_has_its_property():
    assert set(FAILS) == set(MUTANTS[EXERCISE.name])


@pytest.mark.parametrize("mutant", FAILS)
def test_a_wrong_chooser_fails_where_it_should(mutant):
    result = check(EXERCISE, MUTANTS[EXERCISE.name][mutant])
    assert result.status == "failed"
    assert result.counterexample.claim.startswith(FAILS[mutant])


@pytest.mark.parametrize("answer", [(0, 1, 1), (1, 1), (2, 1.5, 1), (99, 1, 1), (2, 100, 100), None, "P"])
def test_what_is_no_setting_is_said_to_be_none(answer):
    result = check(EXERCISE, lambda task: answer)
    assert result.status == "failed"
    assert "within the task's bounds" in repr(result) or "returned None" in repr(result)


def test_a_card_that_is_full_is_named():
    said = does_not_fit(TASKS[0], 1, 48, 1)
    assert "out of memory on rank 0" in said and f"limit {TASKS[0].limit_bytes:,} B" in said


@pytest.mark.parametrize("task", TASKS)
def test_the_peak_on_paper_is_that_of_a_run_or_a_little_more(task):
    """So that a chooser that keeps to the task's fields fits when it is run."""
    import torch

    import gpipe_lab as gl

    P, m, M = ch06.solution(task)
    x = torch.randn(m * M, task.width)
    with gl.Lab(P, device="cpu") as lab:
        run = lab.run(
            gl.gpipe(P, M),
            card_runs.layers_of(task),
            x,
            x[:, 0],
            loss_fn=card_runs.mean_of_outputs,
            warmup=False,
            pace=gl.Pace(forward_ms=1.0, backward_ms=1.0),
        )
    measured = max(run.memory.peak_bytes(k) for k in range(P))
    assert 0.6 * task.peak_bytes(P, m, M) <= measured <= task.peak_bytes(P, m, M)
