"""Backwards split in two, so that the half nobody waits for fills the bubble (Zero Bubble, arXiv 2401.10241).

I gives the gradient of the stage's input, which the previous stage waits for; W gives the gradient of the
weights, which can wait. A micro-batch is held from its F until its W.
"""

from __future__ import annotations

from collections import Counter, deque

from .build import alternate, build, check_counts, each, loop_placement, v_placement
from .ops import Kind, Op
from .schedule import Schedule


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with its W's put off, at 1F1B's peak memory (Zero Bubble §2.1, ZB-H1).

    Stage k warms up with P-1-k forwards and holds back up to k W's, so every stage holds min(P, M)
    micro-batches at its peak. Bubble time for M ≥ P: (P-1)(F+I-W) where W is the shortest of the three.
    """
    return _handcrafted("zero_bubble_h1", num_stages, num_microbatches, depth=1)


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Twice the warmup and twice the W's held back (Zero Bubble §2.2, ZB-H2).

    Every stage holds min(2P-1, M) micro-batches at its peak. For M ≥ 2P-1, from a rank's first operation
    to its last, the longest bubble is (P-1)(F+I-2W), and none where F = I = W: all ranks work without a
    pause, each starting one F after the one before it. The makespan on one clock adds that start.
    """
    return _handcrafted("zero_bubble_h2", num_stages, num_microbatches, depth=2)


def _handcrafted(name: str, num_stages: int, num_microbatches: int, depth: int) -> Schedule:
    check_counts(name, num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        forwards = each(Kind.F, stage, num_microbatches)
        inputs = each(Kind.I, stage, num_microbatches)
        order = alternate(forwards, inputs, num_warmup=depth * (num_stages - 1 - stage))
        return _with_weights(order, held_back=depth * stage)

    return build(name, num_microbatches, loop_placement(num_stages), row)


def _with_weights(order: list[Op], held_back: int) -> list[Op]:
    """Add the W's: each comes after the I that is `held_back` further on; those left over come last."""
    row: list[Op] = []
    waiting: deque[Op] = deque()
    for op in order:
        row.append(op)
        if op.kind is Kind.I:
            waiting.append(op._replace(kind=Kind.W))
            if len(waiting) > held_back:
                row.append(waiting.popleft())
    return row + list(waiting)


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, down the ranks and up again (Zero Bubble §6, ZB-V).

    Stages s and 2P-1-s are on rank s, so a micro-batch turns round on the last rank and its loss is on
    the first, where its backward starts at once. A rank holds at most 2P of its half stages: what 1F1B
    holds on rank 0. For M ≥ 2P-1 and F = I = W no rank pauses between its first operation and its last.
    With fewer micro-batches it is the order of 2P-1 micro-batches with those that do not exist left out.
    """
    check_counts("zero_bubble_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks - 1)

    def row(rank: int) -> list[Op]:
        behind = num_ranks - 1 - rank
        pattern = [  # capitals: the stage on the way down; small letters: the one on the way up
            "F" * (2 * behind + 1),
            "fF" * rank,
            "fiw" * (behind + 1),
            "FIWfiw" * (total - num_ranks - behind),
            "IWfiw" * behind,
            "Ii" * rank,
            "IW" * (behind + 1),
            "w" * rank,
            "W" * rank,
        ]
        so_far: Counter[str] = Counter()
        ops = []
        for letter in "".join(pattern):
            stage = rank if letter.isupper() else 2 * num_ranks - 1 - rank
            ops.append(Op(Kind(letter.upper()), stage, so_far[letter]))
            so_far[letter] += 1
        return [op for op in ops if op.microbatch < num_microbatches]

    return build("zero_bubble_v", num_microbatches, v_placement(num_ranks), row)
