"""What the exercises on schedules share: refuse an answer that is no schedule, or one that cannot run."""

from __future__ import annotations

from ...plan.errors import ScheduleError
from ...plan.schedule import Schedule
from ...plan.validate import validate
from ..exercise import Mismatch


def not_runnable(answer: object, *, P: int, M: int) -> Mismatch | None:
    """None for a schedule of P stages on P ranks and M micro-batches that trains and runs to its end."""
    if not isinstance(answer, Schedule):
        return Mismatch("a Schedule", f"{type(answer).__name__}: {answer!r}"[:200])
    shape = (answer.num_stages, answer.num_ranks, answer.num_microbatches)
    if shape != (P, P, M):
        return Mismatch(
            f"{P} stages on {P} ranks and {M} micro-batches",
            "{} stages on {} ranks and {} micro-batches".format(*shape),
        )
    try:
        validate(answer)
    except ScheduleError as error:
        return Mismatch("a schedule that can run", "one that cannot", str(error))
    if not answer.trains:
        return Mismatch("a forward and a backward for every micro-batch", "no backward", answer.grid())
    return None
