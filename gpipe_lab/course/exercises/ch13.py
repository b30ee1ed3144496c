"""Bugs that shipped: mend one line, then write the checks that tell five bugs apart, and a right program."""

from __future__ import annotations

from functools import partial

from ..bugs import BUGS, NONE, Program
from ..exercise import Answer, Case, Exercise, Mismatch, over_cases

# What a gradient holds after a step.


def after_step(before, parts, rows):
    """A parameter's .grad after a step; before: what it held before the step.

    parts: for each micro-batch the gradient of the mean loss over its own rows; rows: how many it has.
    Numbers here, so that you can follow them; tensors would do as well.
    """
    return (before + sum(parts)) / len(parts)  # torch's line: change it


def after_step_solution(before, parts, rows):
    return before + sum(n * part for n, part in zip(rows, parts, strict=True)) / sum(rows)


def _near(expected: float, got: float) -> bool:
    return abs(got - expected) <= 1e-9 * max(1.0, abs(expected))


@over_cases(
    *[{"parts": parts, "rows": [2] * len(parts)} for parts in ([3.0], [1.0, 2.0], [1.0, 2.0, 3.0, 6.0])]
)
def is_the_mean_over_the_batch(answer: Answer, parts: list[float], rows: list[int]) -> Mismatch | None:
    """after one step from an empty .grad it is the gradient of the batch's mean loss, for every M"""
    expected, got = sum(parts) / len(parts), answer(0.0, parts, rows)
    return None if _near(expected, got) else Mismatch(f"{expected:g}", f"{got:g}")


@over_cases(*[{"parts": parts, "steps": steps} for parts in ([4.0], [1.0, 3.0]) for steps in (2, 3)])
def steps_add_up(answer: Answer, parts: list[float], steps: int) -> Mismatch | None:
    """equal steps without zeroing count as so many"""
    held = 0.0
    for _ in range(steps):
        held = answer(held, parts, [2] * len(parts))
    expected = steps * sum(parts) / len(parts)
    return None if _near(expected, held) else Mismatch(f"{expected:g}", f"{held:g}")


@over_cases({"parts": [1.0, 4.0], "rows": [2, 1]}, {"parts": [1.0, 2.0, 6.0], "rows": [3, 3, 2]})
def rows_count(answer: Answer, parts: list[float], rows: list[int]) -> Mismatch | None:
    """micro-batches of unequal sizes count by their rows"""
    expected = sum(n * part for n, part in zip(rows, parts, strict=True)) / sum(rows)
    got = answer(0.0, parts, rows)
    return None if _near(expected, got) else Mismatch(f"{expected:g}", f"{got:g}")


MEND = Exercise(
    name="13-mend",
    statement=(
        "Change one line, so that a step adds the gradient of its batch's mean loss to what .grad held, "
        "whatever M is and however many rows each micro-batch has."
    ),
    starter=after_step,
    solution=after_step_solution,
    properties=(is_the_mean_over_the_batch, steps_add_up, rows_count),
    hints=(
        "What was there before the step is right as it is. What may be divided is only what the step adds.",
        "A batch's mean loss is a mean over rows. A micro-batch with twice the rows counts twice.",
        "before + (sum of rows × part) / (sum of rows).",
    ),
)


# Which bug is it?

IMPORTS = "import torch\n\nfrom gpipe_lab.course import bugs"


def find_bug(make):
    """The bug of a training program: one of bugs.BUGS, or bugs.NONE.

    make() is a fresh program, always from the same weights; make(batch_norm=True) has batch norm in stage 0.
    A program has step(x, y, num_microbatches), gradients(), zero_grad(), update() and state();
    bugs.batch(rows) gives x and y.
    """
    program = make()
    raise NotImplementedError("measure, compare, and name the bug")
    return program


def solution(make):
    import torch

    from gpipe_lab.course import bugs

    def gradients(rows, num_microbatches, steps=1):
        program = make()
        for _ in range(steps):
            program.step(*bugs.batch(rows), num_microbatches)
        return torch.cat([g.flatten() for g in program.gradients().values()])

    if not torch.allclose(gradients(8, 4), gradients(8, 1)):
        return bugs.TIMES_M
    if not torch.allclose(gradients(8, 4, steps=2), 2 * gradients(8, 4)):
        return bugs.LOST_STEP
    program = make()
    program.step(*bugs.batch(8), 4)
    program.update()
    state = program.state()
    if not torch.equal(state["0.weight"], state["3.weight"]):
        return bugs.DRIFT
    program.zero_grad()
    again = make()
    again.step(*bugs.batch(8), 4)
    again.zero_grad()
    fresh = make()
    if abs(again.step(*bugs.batch(4), 4) - fresh.step(*bugs.batch(4), 4)) > 1e-9:
        return bugs.BROADCAST
    program = make(batch_norm=True)
    program.step(*bugs.batch(8), 4)
    if program.state()["1.num_batches_tracked"] != 1:
        return bugs.COUNTED
    return bugs.NONE


def _cases(bugs: tuple[str, ...]) -> list[Case]:
    return [{"bug": bug} for bug in bugs]


@over_cases(*_cases(BUGS))
def names_the_bug(answer: Answer, bug: str) -> Mismatch | None:
    """a program with a bug is told by its name"""
    got = answer(partial(Program, bug))
    return None if got == bug else Mismatch(bug, got)


@over_cases(*_cases((NONE,)))
def accuses_nobody_wrongly(answer: Answer, bug: str) -> Mismatch | None:
    """a program that is right is called so"""
    got = answer(partial(Program, bug))
    return None if got == bug else Mismatch(bug, got)


FIND_BUG = Exercise(
    name="13-find-bug",
    statement=(
        "Write find_bug(make): run the program that make() gives, compare what should be equal, and return "
        "the name of its bug (bugs.TIMES_M, LOST_STEP, DRIFT, BROADCAST, COUNTED), or bugs.NONE."
    ),
    starter=find_bug,
    solution=solution,
    properties=(names_the_bug, accuses_nobody_wrongly),
    hints=(
        "No bug shows in the loss of one step. What must be equal for M = 1 and 4? After one step and two?",
        "Gradients for M = 1 and 4; gradients of two steps against twice one; the two copies of the tied "
        "weight after an update; a batch of 4 rows after one of 8 against the same batch in a fresh program.",
        "With batch_norm=True, state()['1.num_batches_tracked'] after one step is 1 where statistics are "
        "counted once. Compare with torch.allclose; the order of sums differs in the last digits.",
    ),
    imports=IMPORTS,
)

EXERCISES = (MEND, FIND_BUG)
