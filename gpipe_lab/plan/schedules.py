"""The schedules themselves. Each is a few lines that say which operations a rank runs in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .build import alternate, build, check_counts, each, loop_placement
from .dualpipe import dualpipe_v
from .errors import require
from .interleaved import interleaved
from .ops import Kind, Op
from .schedule import Schedule
from .zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v


def forward_only(
    num_stages: int, num_microbatches: int, *, stage_to_rank: Sequence[int] | None = None
) -> Schedule:
    """Inference, and the laundry: every micro-batch goes down the pipeline, nothing comes back.

    stage_to_rank: where the stages are; one on each rank unless given. A rank with several takes its forwards
    by micro-batch + stage, the slot that each would have if every stage had a rank of its own.
    """
    check_counts("forward_only", num_stages=num_stages, num_microbatches=num_microbatches)
    place = loop_placement(num_stages) if stage_to_rank is None else stage_to_rank

    def row(rank: int) -> list[Op]:
        here = [each(Kind.F, stage, num_microbatches) for stage in range(num_stages) if place[stage] == rank]
        return sorted((op for ops in here for op in ops), key=lambda op: (op.microbatch + op.stage, op.stage))

    return build("forward_only", num_microbatches, place, row)


def naive(num_stages: int, num_microbatches: int = 1) -> Schedule:
    """One micro-batch in the pipeline at a time: never two ranks busy (GPipe §1, the baseline)."""
    check_counts("naive", num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        return [Op(kind, stage, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.B)]

    return build("naive", num_microbatches, loop_placement(num_stages), row)


def gpipe(num_stages: int, num_microbatches: int, *, backward: str = "reversed") -> Schedule:
    """All forwards, then all backwards in reverse order (GPipe §2.3, figure 2c).

    backward="fifo" runs the backwards first in, first out, in the order of the forwards, as torch's
    ScheduleGPipe does: the same peak and, for equal stages, the same makespan.
    """
    check_counts("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)
    require(
        backward in ("reversed", "fifo"),
        'gpipe\'s backwards run "reversed" or "fifo": first in, first out',
        got=f"backward={backward!r}",
        where="gpipe(num_stages, num_microbatches, backward=...)",
        remedy='backward="reversed"',
    )

    def row(stage: int) -> list[Op]:
        backwards = each(Kind.B, stage, num_microbatches)
        if backward == "reversed":
            backwards.reverse()
        return each(Kind.F, stage, num_microbatches) + backwards

    return build("gpipe", num_microbatches, loop_placement(num_stages), row)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Each backward as early as possible (PipeDream-Flush; Megatron-LM, arXiv 2104.04473 §2.2.1).

    Warmup: as many forwards as there are stages behind. Steady: one forward, one backward. Cooldown:
    the backwards that are left. Stage k holds at most min(P - k, M) micro-batches.
    """
    check_counts("one_f_one_b", num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        forwards = each(Kind.F, stage, num_microbatches)
        backwards = each(Kind.B, stage, num_microbatches)
        return alternate(forwards, backwards, num_warmup=num_stages - 1 - stage)

    return build("one_f_one_b", num_microbatches, loop_placement(num_stages), row)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "forward_only": forward_only,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_h2": zero_bubble_h2,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
}
