"""Real text without a download: the sources of the Python standard library, present on every machine."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch

from ..plan.errors import require

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
