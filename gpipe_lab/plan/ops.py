"""The operations a pipeline is made of, as values that print: `2F0` is stage 2's forward of micro-batch 0."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an operation does. The first five are computed and authored; the rest are added by lowering."""

    F = "F"  # forward
    B = "B"  # full backward: gradients of the stage's input and of its weights
    I = "I"  # noqa: E741  backward_input: the gradient that the previous stage waits for
    W = "W"  # backward_weight: the part of the backward nobody waits for
    R = "R"  # recompute: the forward again, to restore what checkpointing dropped
    SEND_F = "SEND_F"  # a stage's output leaves for the next stage
    RECV_F = "RECV_F"  # a stage's input arrives from the previous stage
    SEND_B = "SEND_B"  # the gradient of a stage's input leaves for the previous stage
    RECV_B = "RECV_B"  # the gradient of a stage's output arrives from the next stage
    REDUCE = "REDUCE"  # gradients summed over copies of the same weights
    STEP = "STEP"  # the optimizer's update

    __hash__ = object.__hash__  # members are unique, and Enum's own hash is a slow Python function


F, B, I, W, R, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE, STEP = Kind  # noqa: E741  short, and found sooner

WORDS = {
    F: "forward",
    B: "full backward",
    I: "backward for the input",
    W: "backward for the weights",
    R: "recompute",
    SEND_F: "sending the output",
    RECV_F: "receiving the input",
    SEND_B: "sending the gradient",
    RECV_B: "receiving the gradient",
    REDUCE: "reducing the gradients",
    STEP: "optimizer step",
}
COMPUTE = frozenset({F, B, I, W, R})
BACKWARD = frozenset({B, I, W})
SENDS = frozenset({SEND_F, SEND_B})
RECEIVES = frozenset({RECV_F, RECV_B})
TRANSFERS = SENDS | RECEIVES
ONCE_A_STEP = frozenset({REDUCE, STEP})

_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|[FBIWR])(\d+)(?:\.(\d+))?")


class Op(NamedTuple):
    """One operation of one stage on one micro-batch.

    `segment` counts the parts into which checkpointing "every:k" cuts a stage; it is 0 elsewhere.
    """

    kind: Kind
    stage: int
    microbatch: int
    segment: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.short}"

    @property
    def short(self) -> str:
        """The operation without its stage, as printed where a rank has only one stage: `F0`."""
        suffix = f".{self.segment}" if self.segment else ""
        return f"{self.kind.value}{self.microbatch}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """The operation that prints as `text`; `ValueError` if there is none."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not an operation: {text!r} (expected something like '2F0')")
        stage, kind, microbatch, segment = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch), int(segment or 0))


def sent(op: Op) -> Op:
    """The send that takes the result of a forward to the next stage, or of a backward to the one before."""
    return Op(SEND_F if op.kind is F else SEND_B, op.stage, op.microbatch)


def peer(op: Op) -> Op:
    """The other end of a transfer."""
    if op.kind not in _OTHER_END:
        raise ValueError(f"{op} is not a transfer")
    kind, step = _OTHER_END[op.kind]
    return Op(kind, op.stage + step, op.microbatch)


_OTHER_END = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}
