"""Random numbers that depend on what is computed, not on where or when."""

from __future__ import annotations

import hashlib


def layer_seed(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The seed set before `layer` (counted over the whole model) runs on a micro-batch.

    Keyed so, a dropout mask is the same whatever the stages, the schedule or the recompute.
    """
    key = f"{seed}/{step}/{layer}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())


def init_seed(seed: int, layer: int) -> int:
    """The seed set before a factory builds `layer`."""
    return int.from_bytes(hashlib.blake2b(f"init/{seed}/{layer}".encode(), digest_size=7).digest())
