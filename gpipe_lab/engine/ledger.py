"""Measured memory: every storage that is held, by category, to the byte."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..plan.memory import CATEGORIES, MemoryRow
from ..plan.ops import Op

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


class OutOfMemory(RuntimeError):
    """A virtual card's limit was passed; names the rank, the operation, the limit and what is held."""


class _Storage:
    """A held storage: how often each category holds it, and the first that does."""

    __slots__ = ("counts", "first", "size")

    def __init__(self, size: int, first: int) -> None:
        self.size = size
        self.counts: dict[int, int] = {}  # by category, of those that hold it at all
        self.first = first


class Ledger:
    """Bytes held by one rank.

    Each distinct storage counts once, whole, in the first of `CATEGORIES` that holds it. Storages are
    told apart by their address, which is unique while they live, and they live while they are held.
    A snapshot is kept after every operation, and at its highest point where that lies within it.
    """

    def __init__(self, rank: int, *, limit_bytes: int | None = None) -> None:
        self.rank = rank
        self.limit_bytes = limit_bytes
        self.total = 0
        self.rows: list[tuple[int, Any, tuple[int, ...], Op | None]] = []
        self._totals = [0] * len(CATEGORIES)
        self._storages: dict[int, _Storage] = {}  # by address
        self._lock = threading.RLock()  # on CUDA, autograd frees saved tensors from its own threads
        self.doing: Op | None = None  # for an error; a message may pass the limit as well
        self._op: Op | None = None
        self._op_index = 0
        self._start: Any = None
        self._high, self._highest = tuple(self._totals), 0

    @property
    def highest(self) -> int:
        """The most bytes held at once since the last snapshot."""
        return self._highest

    @property
    def totals(self) -> dict[str, int]:
        """Bytes held now, by category."""
        return dict(zip(CATEGORIES, self._totals, strict=True))

    def hold(self, category: str, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Count the storages of `tensors`; returns what `release` is to be given."""
        index = _INDEX[category]
        found = [self._hold(index, tensor.untyped_storage()) for tensor in tensors]
        self._note_peak()
        return [key for key in found if key is not None]

    def release(self, category: str, keys: Iterable[int]) -> None:
        index = _INDEX[category]
        for key in keys:
            self._release(index, key)

    def drop(self, category: str) -> None:
        """Release all that is held in one category."""
        index = _INDEX[category]
        with self._lock:
            for key in [key for key, storage in self._storages.items() if index in storage.counts]:
                self._storages[key].counts[index] = 1
                self._release(index, key)

    def _hold(self, index: int, memory: torch.UntypedStorage) -> int | None:
        """Count one storage; its key, or None where it has no bytes."""
        size = memory.nbytes()
        if not size:
            return None
        key = memory.data_ptr()
        with self._lock:
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(size, index)
                self.total += size
                self._totals[index] += size
            storage.counts[index] = storage.counts.get(index, 0) + 1
            if index < storage.first:
                self._move(storage, index)
        return key

    def _note_peak(self) -> None:
        """After a hold: whether this is the most so far, or more than may be."""
        if self.total > self._highest:
            with self._lock:
                self._high, self._highest = tuple(self._totals), self.total
        if self.limit_bytes is not None and self.total > self.limit_bytes:
            raise OutOfMemory(self._over_limit())

    def _release(self, index: int, key: int) -> None:
        with self._lock:
            storage = self._storages[key]
            counts = storage.counts
            counts[index] -= 1
            if counts[index]:
                return
            del counts[index]
            if not counts:
                del self._storages[key]
                self.total -= storage.size
                self._totals[index] -= storage.size
            elif index == storage.first:
                self._move(storage, min(counts))

    def _move(self, storage: _Storage, to: int) -> None:
        self._totals[storage.first] -= storage.size
        self._totals[to] += storage.size
        storage.first = to

    def begin(self, stamp: Any) -> None:
        """Start a step: drop the last one's snapshots and note what is held before the first operation."""
        with self._lock:
            self.rows.clear()
            self._op, self._op_index, self._start = None, 0, stamp
            self._high, self._highest = tuple(self._totals), self.total
        self.snapshot(stamp)

    def start(self, op: Op, op_index: int, stamp: Any) -> None:
        with self._lock:
            self._op, self._op_index, self._start = op, op_index, stamp
            self._high, self._highest = tuple(self._totals), self.total

    def snapshot(self, stamp: Any) -> None:
        """Note what is held now, and what was held at the highest point since the operation started.

        When within the operation that point was is not measured; it is dated to the start. It is that of the
        whole: what one category held beyond its share there is not seen.
        """
        with self._lock:
            now = tuple(self._totals)
            if self._high != now:  # also where another category has taken over what was held
                self.rows.append((self._op_index, self._start, self._high, self._op))
            self.rows.append((self._op_index, stamp, now, self._op))
            self._high, self._highest = now, self.total

    def memory_rows(self, times_ms: list[float]) -> list[MemoryRow]:
        """The snapshots as rows, one for each category that changed; `times_ms` has one time a snapshot."""
        last: tuple[int | None, ...] = (None,) * len(CATEGORIES)
        rows = []
        for (index, _, totals, op), time_ms in zip(self.rows, times_ms, strict=True):
            for category, size, earlier in zip(CATEGORIES, totals, last, strict=True):
                if size != earlier:
                    rows.append(MemoryRow(self.rank, index, time_ms, category, size, op))
            last = totals
        return rows

    def _over_limit(self) -> str:
        held = ", ".join(f"{name} {size:,} B" for name, size in self.totals.items() if size)
        return (
            f"out of memory on rank {self.rank} in {self.doing or 'set-up'}: {self.total:,} B held, "
            f"limit {self.limit_bytes:,} B (held: {held})"
        )

    def saving(self, category: str) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which every tensor that autograd saves is counted in `category` until it is freed."""

        index = _INDEX[category]

        def pack(tensor: torch.Tensor) -> _Saved | torch.Tensor:
            # Forward-mode differentiation has zeros that are nowhere in memory.
            return tensor if tensor._is_zerotensor() else _Saved(self, index, tensor)

        def unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
            return saved.unpack() if isinstance(saved, _Saved) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Saved:
    """A tensor saved for backward. Packed detached, or the graph would hold itself in a circle."""

    __slots__ = ("_index", "_key", "_ledger", "_tensor", "_version")

    def __init__(self, ledger: Ledger, index: int, tensor: torch.Tensor) -> None:
        self._key: int | None = None  # nothing to release, should the next lines fail
        self._tensor = tensor.detach()
        self._version = tensor._version
        self._ledger = ledger
        self._index = index
        self._key = ledger._hold(index, tensor.untyped_storage())
        ledger._note_peak()

    def unpack(self) -> torch.Tensor:
        require_unchanged(self._tensor, self._version)  # torch checks this only where there are no hooks
        return self._tensor

    def __del__(self) -> None:
        key = getattr(self, "_key", None)  # torch.compile makes one without __init__ while it traces
        if key is not None:
            self._ledger._release(self._index, key)


def require_unchanged(tensor: torch.Tensor, version: int) -> None:
    """Raise `RuntimeError` unless `tensor` is still what it was at `version`."""
    if tensor._version != version:
        raise RuntimeError(
            "a tensor that the backward needs was modified in place after it was saved: "
            f"shape {tuple(tensor.shape)}, version {tensor._version} instead of {version}. "
            "Use the out-of-place form of the operation."
        )
