"""Wrong answers to the exercises of chapter 13, which each of them must refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpipe_lab.course.bugs import BUGS, DRIFT, NONE, TIMES_M, Program, batch
from gpipe_lab.course.exercises.ch13 import after_step_solution, solution


def added_up(before: float, parts: list[float], rows: list[int]) -> float:
    """Nothing is divided: M times too large."""
    return before + sum(parts)


def plain_mean(before: float, parts: list[float], rows: list[int]) -> float:
    """Every micro-batch counts alike, however many rows it has."""
    return before + sum(parts) / len(parts)


def weighted_and_divided(before: float, parts: list[float], rows: list[int]) -> float:
    """By rows, and what was there is divided as well."""
    return before / len(parts) + after_step_solution(0.0, parts, rows)


def forgetful(before: float, parts: list[float], rows: list[int]) -> float:
    """The batch's gradient, and what was there is gone."""
    return after_step_solution(0.0, parts, rows)


def blind_to(bug: str, make: Callable[..., Program]) -> str:
    """A wrong answer: everything but this one is found."""
    found = solution(make)
    return NONE if found == bug else found


def always_suspicious(make: Callable[..., Program]) -> str:
    """A wrong answer: what has no other bug is said to drift."""
    found = solution(make)
    return DRIFT if found == NONE else found


def by_the_loss_alone(make: Callable[..., Program]) -> str:
    """A wrong answer: the loss is right in most of these programs."""
    x, y = batch(8)
    return NONE if abs(make().step(x, y, 4) - make().step(x, y, 1)) < 1e-9 else TIMES_M


MUTANTS = {
    "13-mend": {
        "added up, M times too large": added_up,
        "every micro-batch counts alike": plain_mean,
        "what was there is divided too": weighted_and_divided,
        "what was there is gone": forgetful,
    },
    "13-find-bug": {
        "the loss alone": by_the_loss_alone,
        "always suspicious": always_suspicious,
        **{f"blind to: {bug}": partial(blind_to, bug) for bug in BUGS},
    },
}
