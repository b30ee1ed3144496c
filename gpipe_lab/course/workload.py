"""The one model and the one text that run through the course."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

NUM_BLOCKS = 6  # with embedding and head: 8 layers, so that P can go up to 8
WIDTH = 32
NUM_HEADS = 4
LENGTH = 32  # tokens in a row


def tiny_gpt(
    num_blocks: int = NUM_BLOCKS, *, width: int = WIDTH, dropout: float = 0.0
) -> list[Callable[[], nn.Module]]:
    """The course's GPT: embedding, blocks, head, as factories that build each layer on its rank."""
    from ..engine.models import VOCABULARY, gpt

    return gpt(
        num_blocks, width=width, num_heads=NUM_HEADS, vocabulary=VOCABULARY, length=LENGTH, dropout=dropout
    )


def tiny_batch(rows: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each (rows, 32) characters of the Python standard library's sources."""
    from ..engine.models import batch, corpus

    return batch(corpus(), step, rows=rows, length=LENGTH)
