"""Exercises that are graded: one function of the learner's, the properties it must have, hints, a solution.

An answer is never compared with the solution's text. It is called on a grid of inputs, and each
property is a claim about what it returns, so every right way to write it passes.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from ..plan.errors import require
from ..plan.schedule import Schedule

LIMIT_S, RANKS_LIMIT_S = 10.0, 120.0  # of work for one input; the latter where workers run the answer
PATIENCE = 6
PRINTED_CHARS = 10_000
Answer = Callable[..., Any]
Case = dict[str, Any]


class Mismatch(NamedTuple):
    """What a property expected and what it got; `detail` may hold a grid or a message."""

    expected: object
    got: object
    detail: str = ""


Judge = Callable[..., Mismatch | None]


@dataclass(frozen=True)
class Property:
    """A claim about an answer: `judge(answer, **case)` is None for every case, or the first mismatch."""

    name: str
    cases: tuple[Case, ...]
    judge: Judge


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One function to write. `starter` must be unfinished."""

    name: str
    statement: str
    starter: Answer
    solution: Answer
    properties: tuple[Property, ...]
    hints: tuple[str, str, str]
    imports: str = ""  # what the learner's cell imports
    on_ranks: bool = False  # graded by running the answer on worker processes, which takes seconds

    def __post_init__(self) -> None:
        require(len(self.hints) == 3, "an exercise has three hints", got=len(self.hints), where=self.name)

    @property
    def chapter(self) -> str:
        return self.name.partition("-")[0]

    @property
    def starter_source(self) -> str:
        return source_of(self.starter, self.imports)

    def is_starter(self, answer: Answer) -> bool:
        """Whether `answer` is the starter, or the cell that shows it with nothing changed."""
        if answer is self.starter:
            return True
        try:
            return source_of(answer) == source_of(self.starter)
        except (OSError, TypeError):  # no source to compare
            return False

    @property
    def solution_source(self) -> str:
        """The solution under the name that the learner's function has."""
        source = source_of(self.solution, self.imports)
        return source.replace(f"def {self.solution.__name__}(", f"def {self.starter.__name__}(")


@dataclass(frozen=True)
class Counterexample:
    """The first property that fails, and the input at which it does: `case`, to try it again with."""

    claim: str
    case: Case
    expected: str
    got: str
    detail: str = ""
    line: str = ""  # the learner's own line, where one raised

    @property
    def given(self) -> str:
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.case.items())

    def __str__(self) -> str:
        text = f"{self.claim}: fails at {self.given}\nexpected {self.expected}\ngot      {self.got}"
        return "\n".join(part for part in (text, self.line, self.detail) if part)


class NotDone(Exception):
    """The answer is still a starter."""


class NothingReturned(Exception):
    """The answer returned None, though nothing in it says that it is unfinished."""


def over(**ranges: Any) -> Callable[[Judge], Property]:
    """Turn `judge(answer, P, M)` into a property over the grid of the given ranges.

    The property's name is the judge's docstring (its own name where Python drops docstrings). Small inputs
    come first, so that the counterexample shown is a small one.
    """
    return over_cases(*_grid(ranges))


def over_cases(*cases: Case) -> Callable[[Judge], Property]:
    """Turn `judge(answer, **case)` into a property over the given cases."""

    def build(judge: Judge) -> Property:
        words = judge.__doc__ or judge.__name__.strip("_").replace("_", " ")
        return Property(words.strip(), cases, judge)

    return build


def first_counterexample(exercise: Exercise, answer: Answer) -> Counterexample | None:
    """Try every property on every case. Raises `NotDone` for a starter, `Exception`s are counterexamples.

    So is a case that takes longer than LIMIT_S; of what the answer prints the first PRINTED_CHARS are shown.
    """
    finished = _finished(answer)
    limit_s = RANKS_LIMIT_S if exercise.on_ranks else LIMIT_S
    with redirect_stdout(_Capped(sys.stdout)):
        for claim in exercise.properties:
            for case in claim.cases:
                found = _judge(claim, finished, answer, case, limit_s)
                if found is not None:
                    return found
    return None


class TookTooLong(Exception):
    """The answer did not end in time."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` within, after `seconds` of work, or PATIENCE times as long on a busy machine.

    Only a main thread can be interrupted like that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise TookTooLong(f"no end after {seconds:g} s")

    timers = ((signal.ITIMER_VIRTUAL, signal.SIGVTALRM, 1), (signal.ITIMER_REAL, signal.SIGALRM, PATIENCE))
    before = [signal.signal(number, give_up) for _, number, _ in timers]
    for timer, _, times in timers:
        signal.setitimer(timer, times * seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class _Capped(io.TextIOBase):
    """Passes on what is printed, up to PRINTED_CHARS, and then says once that there was more."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._left = PRINTED_CHARS

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            self._target.write(text[: self._left])
            if len(text) >= self._left:
                self._target.write("\n… what else the answer prints is left out\n")
        self._left -= len(text)
        return len(text)


def _judge(
    claim: Property, finished: Answer, answer: Answer, case: Case, limit_s: float
) -> Counterexample | None:
    try:
        with _time_limit(limit_s):
            mismatch = claim.judge(finished, **case)
    except NotDone:
        raise
    except NothingReturned:
        got = "your function returned None; is a `return` missing?"
        return Counterexample(claim.name, case, "an answer", got)
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        line = _own_line(error, answer)
        return Counterexample(claim.name, case, "an answer", got, line=line)
    if mismatch is None:
        return None
    return Counterexample(claim.name, case, str(mismatch.expected), str(mismatch.got), mismatch.detail)


def _shown(value: object) -> str:
    """A value as a counterexample names it: a schedule by its name, its grid is shown apart."""
    return repr(value.name) if isinstance(value, Schedule) else repr(value)


def _finished(answer: Answer) -> Answer:
    """The answer, or `NotDone` as soon as it shows that it is still a starter.

    None is no answer either: of an unfinished function because it is unfinished, else a forgotten `return`.
    """

    @wraps(answer)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = answer(*args, **kwargs)
        except NotImplementedError as error:
            raise NotDone from error
        if result is NotImplemented or result is Ellipsis:
            raise NotDone
        if result is None:
            raise NotDone if _has_marker(answer) else NothingReturned
        return result

    return call


def _has_marker(answer: Answer) -> bool:
    """Whether the source leaves something open: `...` in place of a value, or NotImplementedError."""
    try:
        tree = ast.parse(source_of(answer))
    except (OSError, TypeError, SyntaxError):  # no source, or a part of a line: nothing to find a marker in
        return False
    return any(
        (isinstance(node, ast.Name) and node.id in ("NotImplementedError", "NotImplemented"))
        or (
            isinstance(node, ast.Expr | ast.Return | ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Constant)
            and node.value.value is Ellipsis
        )
        for node in ast.walk(tree)
    )


def _own_line(error: BaseException, answer: Answer) -> str:
    """The innermost line of the learner's own file (a cell is one) that the error went through."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    own = [
        line for frame, line in frames if code is not None and frame.f_code.co_filename == code.co_filename
    ]
    if not own:
        return ""
    text = linecache.getline(code.co_filename, own[-1]).strip() if code is not None else ""
    return f"your line {own[-1]}: {text}".rstrip(": ")


def source_of(function: Answer, imports: str = "") -> str:
    source = textwrap.dedent(inspect.getsource(function)).strip()
    return f"{imports}\n\n\n{source}" if imports else source


def _grid(ranges: dict[str, Any]) -> Iterator[Case]:
    cases: list[Case] = [{}]
    for name, values in ranges.items():
        cases = [case | {name: value} for case in cases for value in values]
    return iter(sorted(cases, key=lambda case: sum(v for v in case.values() if isinstance(v, int | float))))
