"""The models of the course: layers of a small GPT, and a corpus to train it on."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..plan.errors import require


class Embedding(nn.Module):
    """Token ids (rows, length) to vectors (rows, length, width), with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block: causal attention and an MLP, each added to its input."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = (rows, length, 3, -1, self.head_size)  # -1: all heads, or a rank's share of them
        q, k, v = self.qkv(self.norm_1(x)).view(heads).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self._drop(self.project(attended.transpose(1, 2).reshape(rows, length, -1)))
        return x + self._drop(self.contract(F.gelu(self.expand(self.norm_2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """Vectors (rows, length, width) to scores of the next token (rows, length, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x))


class Cast(nn.Module):
    """Change the dtype of what passes; its gradient goes back in the dtype that came in.

    As the last layer of a stage it decides in which dtype activations and their gradients cross the boundary.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def gpt(
    num_blocks: int,
    *,
    width: int,
    num_heads: int,
    vocabulary: int,
    length: int,
    dropout: float = 0.0,
) -> list[Callable[[], nn.Module]]:
    """A GPT as factories: embedding, `num_blocks` blocks, head. No process need ever hold all of it."""
    return [
        functools.partial(Embedding, vocabulary, length, width),
        *[functools.partial(Block, width, num_heads, dropout)] * num_blocks,
        functools.partial(Head, width, vocabulary),
    ]


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens. scores (rows, length, vocabulary), targets (rows, length)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


VOCABULARY = 128  # ASCII


@functools.cache
def corpus(num_bytes: int = 1 << 20) -> torch.Tensor:
    """The first `num_bytes` ASCII bytes of the standard library's top-level modules, as int64 ids.

    Modules come in alphabetical order, so a given Python version gives the same text everywhere.
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += bytes(b for b in path.read_bytes() if b < VOCABULARY)
        if len(text) >= num_bytes:
            break
    require(
        len(text) >= num_bytes,
        "the corpus is as long as the standard library's sources",
        got=f"{num_bytes} bytes asked for, {len(text)} there",
        where="corpus",
        remedy=f"num_bytes={len(text)}",
    )
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()


def batch(
    text: torch.Tensor, step: int, *, rows: int, length: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each (rows, length): random windows of the text, the targets one token ahead.

    The same step gives the same windows, wherever it is asked.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
