"""Wrong answers to the exercises of chapter 12, which each of them must refuse."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

from gpipe_lab.course.exercises.ch12 import BYTES_PER_PARAMETER
from gpipe_lab.plan.formulas import bubble_fraction


def clip_by(stage_norms: list[float], max_norm: float, *, how: str) -> float:
    """A wrong answer: another total."""
    total = {
        "sum": sum(stage_norms),
        "largest": max(stage_norms),
        "mean": sum(stage_norms) / len(stage_norms),
        "squares": sum(norm**2 for norm in stage_norms),
        "first": stage_norms[0],
    }[how]
    return min(1.0, max_norm / total) if total > 0 else 1.0


def always_to_the_limit(stage_norms: list[float], max_norm: float) -> float:
    total = math.sqrt(sum(norm**2 for norm in stage_norms))
    return max_norm / total if total else 1.0


def divides_by_zero(stage_norms: list[float], max_norm: float) -> float:
    return min(1.0, max_norm / math.sqrt(sum(norm**2 for norm in stage_norms)))


def layout_with(
    num_devices: int,
    batch_size: int,
    num_layers: int,
    parameters: int,
    sample_bytes: int,
    card_bytes: int,
    per_node: int,
    *,
    bytes_per_parameter: int = BYTES_PER_PARAMETER,
    holds: str = "P",
    beyond_the_node: bool = False,
    last: bool = False,
) -> tuple[int, int, int]:
    """A wrong answer: another count of what is held, or another choice among what fits."""
    fitting = []
    most = num_devices if beyond_the_node else per_node
    for T, P in product(range(1, most + 1), range(1, num_layers + 1)):
        if num_devices % (T * P) or num_layers % P or batch_size % (num_devices // (T * P)):
            continue
        D = num_devices // (T * P)
        M = batch_size // D
        in_flight = {"P": min(P, M), "one": 1, "M": M, "none": 0}[holds]
        if (bytes_per_parameter * parameters + in_flight * sample_bytes) / (T * P) <= card_bytes:
            fitting.append((bubble_fraction(P, M), T, P, D))
    if not fitting:
        return (1, 1, num_devices)
    _, T, P, D = max(fitting) if last else min(fitting)
    return T, P, D


MUTANTS = {
    "12-clip": {
        "norms added up": partial(clip_by, how="sum"),
        "the largest stage's norm": partial(clip_by, how="largest"),
        "the mean of the norms": partial(clip_by, how="mean"),
        "the root forgotten": partial(clip_by, how="squares"),
        "a stage's own norm": partial(clip_by, how="first"),
        "small gradients made larger": always_to_the_limit,
        "divides by a norm of zero": divides_by_zero,
    },
    "12-layout": {
        "activations forgotten": partial(layout_with, holds="none"),
        "one micro-batch in flight": partial(layout_with, holds="one"),
        "M in flight, as in GPipe": partial(layout_with, holds="M"),
        "weights of 2 bytes and nothing else": partial(layout_with, bytes_per_parameter=2),
        "tensor parallel across nodes": partial(layout_with, beyond_the_node=True),
        "the largest bubble that fits": partial(layout_with, last=True),
    },
}
