"""Chapter 01, why cut by layers: what a rank sends, and what it holds before the first activation."""

from __future__ import annotations

import math

from ...plan.lowering import lower
from ...plan.ops import SENDS
from ...plan.schedules import gpipe
from ..exercise import Answer, Exercise, Mismatch, over, over_cases

METHODS = ("data", "tensor", "pipeline")


def bytes_sent(method, L, h, T, N):
    """Bytes that the busiest rank sends in one step.

    method: "data", "tensor" or "pipeline", over N ranks (N > 2). L blocks of 12h² parameters, width h, T
    tokens in the whole batch; every number that is sent takes 2 bytes. Collectives run as rings.
    """
    ring = 2 * (N - 1) / N  # an all-reduce sends this many times the size of what it sums
    raise NotImplementedError("what is sent, how large is it, and how often?")
    return ring


def solution(method, L, h, T, N):
    ring = 2 * (N - 1) / N
    gradients = 2 * 12 * L * h**2
    activations = 2 * T * h
    if method == "data":
        return ring * gradients  # once a step
    if method == "tensor":
        return 4 * L * ring * activations  # twice forward and twice backward in each block
    return 2 * activations  # a middle stage: activations down, gradients up


def _ring_walk(num_ranks: int, size: float) -> float:
    """What one rank sends while a ring of `num_ranks` sums a tensor of `size` bytes, hop by hop."""
    hops = 2 * (num_ranks - 1)  # a reduce-scatter and an all-gather, each passing on one part a hop
    return sum(size / num_ranks for _ in range(hops))


def _pipeline_walk(num_ranks: int, size: float) -> float:
    """What the busiest rank sends in a lowered GPipe step of 4 micro-batches, `size` bytes a batch."""
    lowered = lower(gpipe(num_ranks, 4))
    return max(sum(op.kind in SENDS for op in row) for row in lowered.ops) * size / 4


def _expected(method: str, L: int, h: int, T: int, N: int) -> float:
    if method == "pipeline":
        return _pipeline_walk(N, 2 * T * h)
    if method == "data":
        return _ring_walk(N, 2 * L * 12 * h * h)
    return sum(_ring_walk(N, 2 * T * h) for _ in range(4 * L))


@over(method=METHODS, L=(4, 1, 32), h=(64, 4096), T=(1024, 8, 2_000_000), N=(4, 3, 8))
def equals_what_was_counted(answer: Answer, method: str, L: int, h: int, T: int, N: int) -> Mismatch | None:
    """the bytes are those of rings walked hop by hop, or of the messages of a lowered pipeline"""
    expected, got = _expected(method, L, h, T, N), float(answer(method, L, h, T, N))
    return None if math.isclose(got, expected, rel_tol=1e-9) else Mismatch(f"{expected:,.0f}", f"{got:,.0f}")


@over_cases(*({"L": L, "h": h, "N": N} for L, h, N in ((4, 64, 4), (32, 4096, 8), (126, 16384, 16))))
def right_on_both_sides(answer: Answer, L: int, h: int, N: int) -> Mismatch | None:
    """below 12Lh(N−1)/N tokens the pipeline sends less than data parallelism, above it more"""
    crossover = 12 * L * h * (N - 1) // N
    for tokens, fewest in ((crossover // 2, "pipeline"), (2 * crossover, "data")):
        sent = {method: float(answer(method, L, h, tokens, N)) for method in ("data", "pipeline")}
        if min(sent, key=lambda method: sent[method]) != fewest:
            numbers = ", ".join(f"{method} {size:,.0f}" for method, size in sent.items())
            return Mismatch(f"{fewest} at T = {tokens:,}", numbers)
    return None


BYTES_SENT = Exercise(
    name="01-bytes-sent",
    statement=(
        "A model of L blocks of 12h² parameters, T tokens in the whole batch, N ranks, 2 bytes a number. "
        'Write bytes_sent(method, L, h, T, N): the bytes that the busiest rank sends in a step, for "data", '
        '"tensor" and "pipeline".'
    ),
    starter=bytes_sent,
    solution=solution,
    properties=(equals_what_was_counted, right_on_both_sides),
    hints=(
        "Two sizes occur: all gradients, 2·12Lh² bytes, and the activations between blocks, 2·T·h bytes.",
        "Data: one ring over the gradients. Tensor: four rings over the activations in each block.",
        "Pipeline: no ring. A middle stage sends the activations down once and their gradients up once.",
    ),
)


def state_bytes(num_parameters, N, stage):
    """Bytes of parameters, gradients and Adam's state on a rank, with ZeRO `stage` 0, 1, 2 or 3 over N ranks.

    Mixed precision, bytes for each parameter: 2 its value, 2 its gradient, 12 the optimizer's.
    """
    raise NotImplementedError("each stage cuts one more of the three by N")


def state_solution(num_parameters, N, stage):
    optimizer = 12 / N if stage >= 1 else 12
    gradients = 2 / N if stage >= 2 else 2
    parameters = 2 / N if stage >= 3 else 2
    return num_parameters * (parameters + gradients + optimizer)


# ZeRO (2020), figure 1: 7.5 billion parameters on 64 ranks, in GB.
PUBLISHED_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}


@over_cases(*({"num_parameters": 7_500_000_000, "N": 64, "stage": stage} for stage in PUBLISHED_GB))
def as_published(answer: Answer, num_parameters: int, N: int, stage: int) -> Mismatch | None:
    """the four numbers of the ZeRO paper's first figure, in GB"""
    got = float(answer(num_parameters, N, stage)) / 1e9
    published = PUBLISHED_GB[stage]
    return (
        None if math.isclose(got, published, rel_tol=0.01) else Mismatch(f"{published} GB", f"{got:.4g} GB")
    )


@over(num_parameters=(1000,), N=(4, 1, 2, 8), stage=(0, 1, 2, 3))
def counted_one_by_one(answer: Answer, num_parameters: int, N: int, stage: int) -> Mismatch | None:
    """the bytes are those of each part, whole or divided by N"""
    cut_from = {"optimizer": (12, 1), "gradients": (2, 2), "parameters": (2, 3)}
    expected = sum(num_parameters * size / (N if stage >= first else 1) for size, first in cut_from.values())
    got = float(answer(num_parameters, N, stage))
    return None if math.isclose(got, expected, rel_tol=1e-9) else Mismatch(f"{expected:,.0f}", f"{got:,.0f}")


STATE_BYTES = Exercise(
    name="01-state-bytes",
    statement=(
        "Before the first activation a rank holds parameters, gradients and the optimizer's state: 2, 2 and "
        "12 bytes for each parameter. ZeRO cuts them by N, one after another: stage 1 the optimizer's state, "
        "2 the gradients as well, 3 the parameters too. Write state_bytes(num_parameters, N, stage)."
    ),
    starter=state_bytes,
    solution=state_solution,
    properties=(counted_one_by_one, as_published),
    hints=(
        "Start from stage 0: nothing is cut, 16 bytes for each parameter.",
        "Stage 1 turns 12 into 12/N and leaves 2 + 2.",
        "Stage 2 leaves 2 + 14/N, stage 3 leaves 16/N.",
    ),
)

EXERCISES = (BYTES_SENT, STATE_BYTES)
