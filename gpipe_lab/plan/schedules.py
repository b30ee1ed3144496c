"""The schedules themselves. Each is a few lines that say which operations a rank runs in which order."""

from __future__ import annotations

from collections.abc import Callable

from .errors import require_count
from .ops import Kind, Op
from .schedule import Schedule


def _one_stage_per_rank(
    name: str, num_stages: int, num_microbatches: int, rows: Callable[[int], list[Op]]
) -> Schedule:
    """A schedule whose rank k holds stage k and runs rows(k)."""
    ops = tuple(tuple(rows(stage)) for stage in range(num_stages))
    return Schedule(name, int(num_microbatches), tuple(range(num_stages)), ops)


def _check(name: str, num_stages: int, num_microbatches: int) -> None:
    require_count(num_stages, "num_stages", where=f"{name}(num_stages, num_microbatches)")
    require_count(num_microbatches, "num_microbatches", where=f"{name}(num_stages, num_microbatches)")


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Inference, and the laundry: every micro-batch goes down the pipeline, nothing comes back."""
    _check("forward_only", num_stages, num_microbatches)

    def rows(stage: int) -> list[Op]:
        return [Op(Kind.F, stage, m) for m in range(num_microbatches)]

    return _one_stage_per_rank("forward_only", num_stages, num_microbatches, rows)


def naive(num_stages: int, num_microbatches: int = 1) -> Schedule:
    """One micro-batch in the pipeline at a time: never two ranks busy (GPipe §1, the baseline)."""
    _check("naive", num_stages, num_microbatches)

    def rows(stage: int) -> list[Op]:
        return [Op(kind, stage, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.B)]

    return _one_stage_per_rank("naive", num_stages, num_microbatches, rows)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in reverse order (GPipe §2.3, figure 2c)."""
    _check("gpipe", num_stages, num_microbatches)

    def rows(stage: int) -> list[Op]:
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [Op(Kind.B, stage, m) for m in reversed(range(num_microbatches))]
        return forwards + backwards

    return _one_stage_per_rank("gpipe", num_stages, num_microbatches, rows)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Each backward as early as possible (PipeDream-Flush; Megatron-LM, arXiv 2104.04473 §2.2.1).

    Warmup: as many forwards as there are stages behind. Steady: one forward, one backward. Cooldown:
    the backwards that are left. Stage k holds at most min(P - k, M) micro-batches.
    """
    _check("one_f_one_b", num_stages, num_microbatches)

    def rows(stage: int) -> list[Op]:
        num_warmup = min(num_stages - 1 - stage, num_microbatches)
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [Op(Kind.B, stage, m) for m in range(num_microbatches)]
        num_steady = num_microbatches - num_warmup
        steady = [op for pair in zip(forwards[num_warmup:], backwards, strict=False) for op in pair]
        return forwards[:num_warmup] + steady + backwards[num_steady:]

    return _one_stage_per_rank("one_f_one_b", num_stages, num_microbatches, rows)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "forward_only": forward_only,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}
