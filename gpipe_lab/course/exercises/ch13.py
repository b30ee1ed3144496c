"""Bugs that shipped: write the checks that tell five of them apart, and a program without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..bugs import BUGS, DRIFT, NONE, TIMES_M, Program, batch
from ..exercise import Answer, Case, Exercise, Mismatch, over_cases

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
    mutants={
        "the loss alone": by_the_loss_alone,
        "always suspicious": always_suspicious,
        **{f"blind to: {bug}": partial(blind_to, bug) for bug in BUGS},
    },
    imports=IMPORTS,
)

EXERCISES = (FIND_BUG,)
