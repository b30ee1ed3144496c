"""Shared memory in which every rank says which operation it is in, and the watchdog that reads it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from typing import Any, Protocol

from ..plan.ops import Kind, Op

_KINDS = tuple(Kind)
_CODES = {kind: code for code, kind in enumerate(_KINDS, start=1)}  # 0 is "in no operation"
_WAITS = 1 << 63
CELL_BYTES = 8


def _pack(op: Op) -> int:
    """An operation as one 64-bit integer, so that the driver never reads half of one."""
    return _CODES[op.kind] | op.stage << 8 | op.microbatch << 24 | op.segment << 48


def _unpack(cell: int) -> Op | None:
    cell &= _WAITS - 1
    if not cell:
        return None
    return Op(_KINDS[(cell & 0xFF) - 1], cell >> 8 & 0xFFFF, cell >> 24 & 0xFFFFFF, cell >> 48)


class SharedBoard:
    """The current operation of every rank, in a file that all of them map into memory.

    It lies in the workers' private folder and goes with that.
    """

    def __init__(self, folder: str, num_ranks: int) -> None:
        self.path = os.path.join(folder, "board")
        with open(self.path, "wb") as file:
            file.write(bytes(CELL_BYTES * num_ranks))
        self._cells = _map(self.path)

    def read(self, rank: int) -> Op | None:
        """The operation that `rank` was last seen in; None between operations."""
        return _unpack(self._cells[rank])

    def waits(self, rank: int) -> bool:
        """Whether `rank` was last seen waiting for another."""
        return bool(self._cells[rank] & _WAITS)


class RankBoard:
    """One rank's place on the board. Stages up to 65535, micro-batches up to 16 million."""

    __slots__ = ("_cells", "_rank")

    def __init__(self, path: str, rank: int) -> None:
        self._cells = _map(path)
        self._rank = rank

    def mark(self, op: Op, *, waits: bool = False) -> None:
        """Say that this rank is in `op` from now on (about 1 µs), and whether it waits for another."""
        self._cells[self._rank] = _pack(op) | (_WAITS if waits else 0)

    def clear(self) -> None:
        """Say that this rank is in no operation."""
        self._cells[self._rank] = 0


def _map(path: str) -> memoryview:
    """A file as 64-bit integers, each written and read whole."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


ASK_STACK = b"stack"  # what a worker's listener is sent; no job, since pickles begin otherwise


class Board(Protocol):
    """What a watchdog reads."""

    def read(self, rank: int) -> Op | None: ...

    def waits(self, rank: int) -> bool: ...


class Watchdog:
    """Watches a board: a run hangs when for `limit_s` no rank has come to another operation.

    Ranks that wait for a message hang for the sake of another, so those to blame are ones that do not.
    Programs that mark no operations are left alone.
    """

    def __init__(self, board: Board, limit_s: float | None) -> None:
        self._board = board
        self.limit_s = limit_s
        self._seen: dict[int, Any] = {}
        self._moved_at = time.monotonic()

    def suspects(self, missing: Collection[int]) -> list[int]:
        """Those of the ranks `missing`, without a reply so far, that may hold up the run, if it hangs.

        Where all wait, as they do when one was frozen as it waited, it is any of them.
        """
        now = {rank: self._board.read(rank) for rank in missing}
        if now != self._seen:
            self._seen, self._moved_at = now, time.monotonic()
        working = sorted(rank for rank, op in now.items() if op is not None)
        if self.limit_s is None or time.monotonic() - self._moved_at < self.limit_s:
            return []
        return [rank for rank in working if not self._board.waits(rank)] or working

    def patience(self) -> float | None:
        """Seconds until it is worth looking again."""
        return None if self.limit_s is None else self.limit_s / 4


def main_thread_stack() -> str:
    """Where this process's main thread is, as a traceback prints it; called from another thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()
