"""Activation checkpointing as operations: which backwards get a recompute ahead of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .errors import is_count, require
from .ops import Kind, Op
from .schedule import Schedule

MODES = ("never", "always", "except_last", "every:k")


def parse_mode(mode: object) -> int | None:
    """The k of "every:k", or None for the other modes; `InputError` for anything else."""
    every = re.fullmatch(r"every:([1-9]\d*)", mode) if isinstance(mode, str) else None
    require(
        every is not None or mode in MODES[:3],
        "checkpoint is " + ", ".join(f'"{m}"' for m in MODES) + " with k a whole number of at least 1",
        got=f"{mode!r}",
        where="checkpoint",
        remedy='checkpoint="always"',
    )
    return int(every.group(1)) if every else None


def with_recompute(
    schedule: Schedule,
    mode: str,
    early: bool = False,
    *,
    layers_per_stage: int | Sequence[int] | None = None,
) -> Schedule:
    """Put a recompute (R) ahead of every backward that `mode` drops the activations of.

    "always" and "except_last" (the last micro-batch keeps its activations) recompute a whole stage from
    its input. "every:k" keeps every k-th layer's input, so it needs `layers_per_stage`; its R and B go
    segment by segment, last first. A split backward is recomputed whole, ahead of its I. A recompute
    waits for its gradient, or with `early` runs while its rank would be idle, at most one ahead (GPipe
    §2.3, figure 2). Raises `InputError` for an unknown mode, or a schedule that already holds R.
    """
    every = parse_mode(mode)
    holds_recompute = any(op.kind is Kind.R for op in schedule.rank_of)
    require(
        mode == "never" or not holds_recompute,
        "a schedule that already holds R takes no checkpoint mode",
        got=f"{schedule.name!r} with R, and checkpoint={mode!r}",
        where="with_recompute",
        remedy='checkpoint="never"',
    )
    if mode == "never" or not schedule.trains:
        return schedule
    num_segments = _segments(schedule, every, layers_per_stage)

    def expand(op: Op) -> list[Op]:
        starts_backward = op.kind in (Kind.B, Kind.I)
        is_last = (op.microbatch + 1) % schedule.microbatches_per_replica == 0
        spared = mode == "except_last" and is_last
        if not starts_backward or spared:
            return [op]
        if op.kind is Kind.I:
            return [Op(Kind.R, op.stage, op.microbatch), op]
        segments = reversed(range(num_segments[op.stage]))
        return [Op(kind, op.stage, op.microbatch, s) for s in segments for kind in (Kind.R, Kind.B)]

    ops = tuple(tuple(new for op in row for new in expand(op)) for row in schedule.ops)
    return replace(schedule, ops=ops, recompute_waits=not early)


def _segments(
    schedule: Schedule, every: int | None, layers_per_stage: int | Sequence[int] | None
) -> list[int]:
    if every is None:
        return [1] * schedule.num_stages
    require(
        layers_per_stage is not None,
        '"every:k" cuts stages into segments of k layers, so it needs the number of layers of each stage',
        got="layers_per_stage=None",
        where="with_recompute",
        remedy=f'with_recompute(schedule, "every:{every}", layers_per_stage=4)',
    )
    given = layers_per_stage
    counts = list(given) if isinstance(given, Sequence) else [given or 0] * schedule.num_stages
    require(
        len(counts) == schedule.num_stages and all(is_count(n) for n in counts),
        "layers_per_stage is a whole number of at least 1, or one per stage",
        got=f"{layers_per_stage!r} for {schedule.num_stages} stages",
        where="with_recompute",
        remedy=f"layers_per_stage={[4] * schedule.num_stages}",
    )
    return [-(-n // every) for n in counts]
