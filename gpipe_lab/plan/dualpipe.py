"""DualPipe in the form that keeps one copy of the weights: DualPipeV."""

from __future__ import annotations

from collections import Counter, deque

from .build import build, check_counts, v_placement
from .ops import Kind, Op
from .schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank in a V, one stage's forward beside the other's backward (DeepSeek's DualPipeV).

    DualPipe (DeepSeek-V3, arXiv 2412.19437 §3.2.1) feeds micro-batches from both ends, so every rank keeps
    two stages' weights and every weight is there twice. DualPipeV is one half of that picture: stages s and
    2P-1-s on rank s, each weight once. In its steady part a rank pairs the forward of one stage with the
    backward of the other, so that on a GPU the messages inside one (of experts, of tensor parallel) travel
    under the other's arithmetic. Here the two run one after the other, which costs nothing but that overlap.
    Most backwards are whole; those that fill and drain are split, and W's run first in, first out.
    A rank holds at most 2P+1 of its half stages. For M ≥ 2P and F = I = W the bubble time is (P-1)F of one
    stage. With fewer micro-batches it is the order of 2P with those that do not exist left out.
    """
    check_counts("dualpipe_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks)

    def row(rank: int) -> list[Op]:
        behind = num_ranks - 1 - rank
        turns = "bB" * (rank + 1)
        pattern = [  # capitals: the stage on the way down, small letters: up; W: the oldest put off
            "F" * (2 * behind),
            "Ff" * (rank + 1),
            "iWf" * behind,
            "FbfB" * (total - 2 * num_ranks + rank + 1),
            "bfB" * behind,
            turns[: rank + 1],
            turns[rank + 1 :].replace("b", "i").replace("B", "I"),
            "WI" * behind,
            "W" * (rank + 1),
        ]
        so_far: Counter[str] = Counter()
        waiting: deque[Op] = deque()
        ops = []
        for letter in "".join(pattern):
            if letter == "W":
                ops.append(waiting.popleft())
                continue
            is_forward, is_down = letter in "Ff", letter.isupper()
            way = ("F" if is_forward else "B") + str(is_down)  # I's and B's of a stage count on together
            stage = rank if is_down else 2 * num_ranks - 1 - rank
            ops.append(Op(Kind(letter.upper()), stage, so_far[way]))
            so_far[way] += 1
            if letter in "Ii":
                waiting.append(ops[-1]._replace(kind=Kind.W))
        return [op for op in ops if op.microbatch < num_microbatches]

    return build("dualpipe_v", num_microbatches, v_placement(num_ranks), row)
