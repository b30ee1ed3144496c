"""A rank that does not move is named, and the job ended, by the rank before it.

Nobody else would know which one it is: those that wait for it wait for each other too, a stopped process
raises nothing, and the launcher sees exit codes alone. Once a second each rank writes into the job's store
what it is in and how many operations it has begun, and looks at what the next rank has written.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..lab.failures import describe
from ..plan.ops import Op

PERIOD_S = 1.0


class Beat(NamedTuple):
    """What a rank says of itself."""

    tick: int
    num_ops: int
    works: bool  # in an operation that waits for nobody
    op: str  # the last that it has begun
    host: str
    pid: int


class Watchdog(threading.Thread):
    """The board of a rank: it knows what the rank is in, and sees to it that somebody else does.

    A context manager: it watches within. limit_s: how long the next rank may be in one operation that waits
    for nobody, or give no sign of life. One on this host is killed, or the launcher would wait for it.
    """

    def __init__(self, rank: int, num_ranks: int, limit_s: float) -> None:
        super().__init__(daemon=True, name="watchdog")
        self.rank = rank
        self.next = (rank + 1) % num_ranks
        self.limit_s = limit_s
        self.op: Op | None = None
        self._last: Op | None = None
        self._works = False
        self._num_ops = 0
        self._over = threading.Event()

    def mark(self, op: Op, *, waits: bool = False) -> None:
        self.op = self._last = op
        self._works = not waits
        self._num_ops += 1

    def clear(self) -> None:
        self.op, self._works = None, False

    def where(self) -> str:
        """The rank and what it is in, for an error."""
        return f"rank {self.rank}" + (f" in {describe(self.op)}" if self.op else "")

    def __enter__(self) -> Watchdog:
        if self.next != self.rank:
            store = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # type: ignore[attr-defined]  # a connection of its own
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()

    def run(self) -> None:
        last: Beat | None = None
        alive = moved = time.monotonic()
        tick = 0
        while not self._over.wait(PERIOD_S):
            tick += 1
            try:
                beat = self._exchange(tick)
            except dist.DistError:  # the store is gone, and with it the job: transfers will say so
                return
            now = time.monotonic()
            if last is None or beat is None or beat.tick != last.tick:
                alive = now
            if last is None or beat is None or beat.num_ops != last.num_ops or not beat.works:
                moved = now
            last = beat
            if beat is not None and now - alive > self.limit_s:
                self._end("gives no sign of life", beat)
            if beat is not None and now - moved > self.limit_s:
                self._end("does not move", beat)

    def _exchange(self, tick: int) -> Beat | None:
        """Tell the others, and hear from the next rank; None before it has begun."""
        op = describe(self._last) if self._last else "its set-up"
        mine = Beat(tick, self._num_ops, self._works, op, socket.gethostname(), os.getpid())
        self._store.set(f"beat {self.rank}", json.dumps(mine))
        key = f"beat {self.next}"
        return Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _end(self, what: str, beat: Beat) -> NoReturn:
        try:
            raise TimeoutError(f"rank {self.next}, last seen in {beat.op}, {what} for {self.limit_s:g} s")
        except TimeoutError as error:
            get_error_handler().record_exception(error)
            print(f"TimeoutError: {error}", file=sys.stderr, flush=True)
        time.sleep(1.0)  # the launcher, which counts in seconds, takes the first failure for the cause
        if beat.host == socket.gethostname():
            os.kill(beat.pid, signal.SIGKILL)
        os._exit(1)
