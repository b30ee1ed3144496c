"""What a learner calls on an exercise: check, hint, solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from ..plan.errors import require
from .exercise import Counterexample, Exercise, NotDone, first_counterexample
from .kept import PASSED as DONE
from .kept import record

NOT_DONE, FAILED, PASSED = "not done yet", "failed", "passed"
_COLORS = {NOT_DONE: "#666666", FAILED: "#a33c00", PASSED: "#00694e"}
_hints_given: dict[str, int] = {}


@dataclass(frozen=True)
class Result:
    """What a check found. `status` is "not done yet", "failed" or "passed"; true only when passed."""

    exercise: str
    status: str
    counterexample: Counterexample | None = None
    num_cases: int = 0
    note: str = ""

    def __bool__(self) -> bool:
        return self.status == PASSED

    @property
    def detail(self) -> str:
        if self.status == FAILED:
            return str(self.counterexample)
        if self.counterexample is not None:  # a starter that is a whole, faulty program
            return f"this is the starter as given; what fails first:\n{self.counterexample}"
        if self.status == PASSED:
            return "\n".join(
                part for part in (f"every property holds on {self.num_cases} inputs", self.note) if part
            )
        return f"write the function, then run this cell again; gl.hint({self.exercise!r}) helps"

    def __repr__(self) -> str:
        return f"{self.exercise}: {self.status}\n{self.detail}"

    def _repr_html_(self) -> str:
        color = _COLORS[self.status]
        paper = "background:#ffffff;color:#000000"  # readable in a dark theme too
        return (
            f'<div style="border-left:4px solid {color};padding:0.3em 0.8em;{paper}">'
            f'<b style="color:{color}">{escape(self.exercise)}: {self.status}</b>'
            f'<pre style="{paper};margin:0.3em 0 0 0">{escape(self.detail)}</pre></div>'
        )


@dataclass(frozen=True)
class Hint:
    exercise: str
    number: int
    text: str

    def __repr__(self) -> str:
        left = 3 - self.number
        more = f"{left} more" if left else f"no more; gl.solution({self.exercise!r}) is next"
        return f"Hint {self.number} of 3: {self.text} ({more})"


@dataclass(frozen=True)
class Folded:
    """A solution that is shown only when unfolded; `.source` is its text."""

    exercise: str
    source: str

    def __repr__(self) -> str:
        return f"Solution of {self.exercise}, folded: print(gl.solution({self.exercise!r}).source)"

    def _repr_html_(self) -> str:
        summary = f"Solution of {escape(self.exercise)}"
        return f"<details><summary>{summary}</summary><pre>{escape(self.source)}</pre></details>"


def check(exercise: str | Exercise, answer: Callable) -> Result:
    """Try an answer. Shows the first property that fails and at which input, or that all hold.

    A starter is "not done yet"; nothing is raised for it or for a wrong answer, so that a whole notebook
    can run. What passes is recorded. Raises `InputError` for an unknown exercise, or an answer that
    cannot be called.
    """
    exercise = _find(exercise)
    require(
        callable(answer),
        "an answer is a function",
        got=f"{answer!r}",
        where=f"check({exercise.name!r}, ...)",
        remedy=f"gl.check({exercise.name!r}, {exercise.starter.__name__})",
    )
    try:
        found = first_counterexample(exercise, answer)
    except NotDone:
        return Result(exercise.name, NOT_DONE)
    if found is not None:
        return Result(exercise.name, NOT_DONE if exercise.is_starter(answer) else FAILED, found)
    num_cases = sum(len(claim.cases) for claim in exercise.properties)
    return Result(exercise.name, PASSED, num_cases=num_cases, note=record(DONE, exercise.name))


def hint(exercise: str | Exercise, number: int | None = None) -> Hint:
    """The next of three hints, or the one with this number."""
    exercise = _find(exercise)
    require(
        number in (None, 1, 2, 3),
        "an exercise has hints 1, 2 and 3",
        got=f"number={number!r}",
        where=f"hint({exercise.name!r}, ...)",
        remedy=f"gl.hint({exercise.name!r})",
    )
    if number is None:
        number = min(3, _hints_given.get(exercise.name, 0) + 1)
    _hints_given[exercise.name] = number
    return Hint(exercise.name, number, exercise.hints[number - 1])


def solution(exercise: str | Exercise) -> Folded:
    """The solution, folded away until opened."""
    exercise = _find(exercise)
    return Folded(exercise.name, exercise.solution_source)


def _find(exercise: str | Exercise) -> Exercise:
    if isinstance(exercise, Exercise):
        return exercise
    from .exercises import find

    return find(exercise)
