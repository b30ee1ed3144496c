"""A shared array in which every rank says which operation it is in, and the watchdog that reads it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Collection
from multiprocessing.context import BaseContext
from typing import Any

from ..plan.ops import Kind, Op

_KINDS = tuple(Kind)
_CODES = {kind: code for code, kind in enumerate(_KINDS, start=1)}  # 0 is "in no operation"


_WAITS = 1 << 63


def _pack(op: Op) -> int:
    """An operation as one 64-bit integer, so that the driver never reads half of one."""
    return _CODES[op.kind] | op.stage << 8 | op.microbatch << 24 | op.segment << 48


def _unpack(cell: int) -> Op | None:
    cell &= _WAITS - 1
    if not cell:
        return None
    return Op(_KINDS[(cell & 0xFF) - 1], cell >> 8 & 0xFFFF, cell >> 24 & 0xFFFFFF, cell >> 48)


class Board:
    """The current operation of every rank, in shared memory that has no name and leaves no file."""

    def __init__(self, num_ranks: int, context: BaseContext) -> None:
        self._cells: Any = context.RawArray("Q", num_ranks)

    def of_rank(self, rank: int) -> RankBoard:
        """The part that one rank writes."""
        return RankBoard(self._cells, rank)

    def read(self, rank: int) -> Op | None:
        """The operation that `rank` was last seen in; None between operations."""
        return _unpack(self._cells[rank])

    def waits(self, rank: int) -> bool:
        """Whether `rank` was last seen waiting for another."""
        return bool(self._cells[rank] & _WAITS)


class RankBoard:
    """One rank's place on the board. Stages up to 65535, micro-batches up to 16 million."""

    __slots__ = ("_cells", "_rank")

    def __init__(self, cells: Any, rank: int) -> None:
        self._cells = cells
        self._rank = rank

    def mark(self, op: Op, *, waits: bool = False) -> None:
        """Say that this rank is in `op` from now on (about 1 µs), and whether it waits for another."""
        self._cells[self._rank] = _pack(op) | (_WAITS if waits else 0)

    def clear(self) -> None:
        """Say that this rank is in no operation."""
        self._cells[self._rank] = 0


ASK_STACK = b"stack"  # what a worker's listener is sent; no job, since pickles begin otherwise


class Watchdog:
    """Watches the board: a run hangs when for `limit_s` no rank has come to another operation.

    Ranks that wait for a message hang for the sake of another, so the one to blame is one that does not.
    Programs that mark no operations are left alone.
    """

    def __init__(self, board: Board, limit_s: float | None) -> None:
        self._board = board
        self.limit_s = limit_s
        self._seen: dict[int, Any] = {}
        self._moved_at = time.monotonic()

    def blamed(self, missing: Collection[int]) -> int | None:
        """The rank that holds up a run in which the ranks `missing` have not replied; None while it moves."""
        now = {rank: self._board.read(rank) for rank in missing}
        if now != self._seen:
            self._seen, self._moved_at = now, time.monotonic()
        working = [rank for rank, op in now.items() if op is not None]
        if self.limit_s is None or not working or time.monotonic() - self._moved_at < self.limit_s:
            return None
        busy = [rank for rank in working if not self._board.waits(rank)]
        return min(busy or working)

    def patience(self) -> float | None:
        """Seconds until it is worth looking again."""
        return None if self.limit_s is None else self.limit_s / 4


def main_thread_stack() -> str:
    """Where this process's main thread is, as a traceback prints it; called from another thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)).rstrip()
