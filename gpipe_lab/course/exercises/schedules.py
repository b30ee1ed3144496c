"""What the exercises on schedules share: refuse an answer that is no schedule, or one that cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...plan.errors import InputError, ScheduleError
from ...plan.ops import Op
from ...plan.schedule import Schedule
from ...plan.schedules import SCHEDULES
from ...plan.validate import validate
from ..exercise import Answer, Mismatch, over


def not_runnable(answer: object, *, P: int, M: int, any_placement: bool = False) -> Mismatch | None:
    """None for a schedule on P ranks with M micro-batches that trains and runs to its end.

    It has P stages, one a rank, or with `any_placement` as many as it likes.
    """
    if not isinstance(answer, Schedule):
        return Mismatch("a Schedule", f"{type(answer).__name__}: {answer!r}"[:200])
    num_stages = answer.num_stages if any_placement else P
    shape = (answer.num_stages, answer.num_ranks, answer.num_microbatches)
    if shape != (num_stages, P, M):
        return Mismatch(
            f"{num_stages} stages on {P} ranks and {M} micro-batches",
            "{} stages on {} ranks and {} micro-batches".format(*shape),
        )
    try:
        validate(answer)
    except ScheduleError as error:
        return Mismatch("a schedule that can run", "one that cannot", str(error))
    if not answer.trains:
        return Mismatch("a forward and a backward for every micro-batch", "no backward", answer.grid())
    return None


def with_rows(name: str, num_microbatches: int, rows: Sequence[Sequence[Op]]) -> Schedule:
    """The schedule of these rows, one stage a rank."""
    return Schedule(name, num_microbatches, tuple(range(len(rows))), tuple(map(tuple, rows)))


def renamed(make: Callable[[int, int], Schedule], num_ranks: int, num_microbatches: int) -> Schedule:
    return replace(make(num_ranks, num_microbatches), name="my own")


def is_built_in(schedule: Schedule) -> str | None:
    """The name of the built-in schedule with this placement and order, if there is one."""
    for name, make in SCHEDULES.items():
        try:
            other = make(schedule.num_ranks, schedule.num_microbatches)
        except InputError:  # interleaved wants M a multiple of P
            continue
        if (other.stage_to_rank, other.ops) == (schedule.stage_to_rank, schedule.ops):
            return name
    return None


@over(P=range(1, 5), M=range(1, 7))
def it_runs(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every stage runs every micro-batch forward and backward, in an order that can run"""
    return not_runnable(answer(P, M), P=P, M=M)
