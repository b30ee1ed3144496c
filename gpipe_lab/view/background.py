"""Run one thing at a time in a thread; a newer one stops and replaces the one that runs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any


class Stopped(RuntimeError):
    """The run was stopped before it had a result."""


class Attempt:
    """One job: its result or its error once `done` is set."""

    def __init__(self, job: Callable[[Attempt], Any]) -> None:
        self.job = job
        self.done = threading.Event()
        self.stopping = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def was_stopped(self) -> bool:
        return self.stopping.is_set() and self.result is None

    def check(self) -> None:
        """Raise `Stopped` if this attempt is not wanted any more: for a job to call between its steps."""
        if self.stopping.is_set():
            raise Stopped("stopped")

    def perform(self) -> None:
        try:
            self.check()
            self.result = self.job(self)
        except BaseException as error:  # whatever it is, the panel must show it
            self.error = error


class LatestWins:
    """`interrupt` ends the job that runs, from another thread; `finished` is told of every attempt."""

    def __init__(self, *, interrupt: Callable[[], None], finished: Callable[[Attempt], None]) -> None:
        self._interrupt = interrupt
        self._finished = finished
        self._lock = threading.Lock()
        self._current: Attempt | None = None
        self._next: Attempt | None = None
        self._thread: threading.Thread | None = None

    def submit(self, attempt: Attempt) -> None:
        """Run it as soon as what runs now has been stopped; what was still waiting is dropped."""
        with self._lock:
            dropped, self._next = self._next, attempt
            self._stop(self._current)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gpipe-explorer", daemon=True)
                self._thread.start()
        self._drop(dropped)

    def stop(self) -> None:
        """Ask what runs to end and drop what waits; returns at once."""
        with self._lock:
            dropped, self._next = self._next, None
            self._stop(self._current)
        self._drop(dropped)

    def _drop(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            attempt.stopping.set()
            attempt.error = Stopped("replaced by a newer run before it began")
            attempt.done.set()
            self._finished(attempt)

    def _stop(self, attempt: Attempt | None) -> None:
        if attempt is not None and not attempt.stopping.is_set():
            attempt.stopping.set()
            threading.Thread(target=self._insist, args=(attempt,), daemon=True).start()

    def _insist(self, attempt: Attempt) -> None:
        """Interrupt until it has ended: one interrupt may come just before the job can be interrupted."""
        while not attempt.done.is_set():
            with self._lock:
                if self._current is attempt:
                    self._interrupt()
            attempt.done.wait(0.1)

    def _work(self) -> None:
        while True:
            with self._lock:
                attempt, self._next = self._next, None
                self._current = attempt
                if attempt is None:
                    self._thread = None
                    return
            attempt.perform()
            with self._lock:
                self._current = None
            attempt.done.set()
            self._finished(attempt)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def from_the_browser() -> bool:
    """Whether this is the answer to a person's click or drag, and not to a cell's code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    return kernel.get_parent().get("header", {}).get("msg_type", "").startswith("comm_")
