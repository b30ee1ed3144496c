"""Notice that a run no longer moves, and find the rank that holds it up."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Collection
from typing import Any

from .board import Board

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
