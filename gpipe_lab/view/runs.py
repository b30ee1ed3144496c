"""The runs of one explorer: in a thread, the latest wins, and what they say arrives in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .background import Attempt, LatestWins, Stopped, running_loop

TICK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run does now: its progress goes from `done` to `until` (shares of the whole) in `seconds`."""

    text: str
    done: float
    until: float
    seconds: float

    def share(self, elapsed_s: float) -> float:
        """How far the whole run is, `elapsed_s` after the phase began."""
        part = min(1.0, elapsed_s / self.seconds) if self.seconds > 0 else 0.0
        return self.done + (self.until - self.done) * part


Tell = Callable[[Phase], None]


class Runs:
    """Jobs one after another. A job is called in a thread with a function to tell its phases by.

    `show_phase(phase, share)` and `show_end(attempt)` are called where widgets may be changed: in the
    event loop, or by `wait` where no loop runs. Only the latest job is shown.
    """

    def __init__(
        self,
        interrupt: Callable[[], None],
        *,
        show_phase: Callable[[Phase, float], None],
        show_end: Callable[[Attempt], None],
    ) -> None:
        self._show_phase, self._show_end = show_phase, show_end
        self._background = LatestWins(interrupt=interrupt, finished=self._finished)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown: Attempt | None = None
        self._phase: tuple[Phase, float] | None = None
        self.latest: Attempt | None = None

    @property
    def in_progress(self) -> bool:
        return self.latest is not None and not self.latest.done.is_set()

    def start(self, job: Callable[[Tell], Any], first: Phase) -> None:
        """Run `job` as soon as what runs now has been stopped."""
        self._loop = running_loop()

        def perform(attempt: Attempt) -> Any:
            def tell(phase: Phase) -> None:
                attempt.check()
                self._post(lambda: self._enter(attempt, phase))

            result = job(tell)
            attempt.check()
            return result

        self.latest = Attempt(perform)
        self._enter(self.latest, first)
        self._background.submit(self.latest)
        self._tick()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the latest job and show its end; its result, or its error raised."""
        attempt = self.latest
        if attempt is None:
            return None
        try:
            if not attempt.done.wait(timeout_s):
                raise TimeoutError(f"the run was not done after {timeout_s} s")
        except KeyboardInterrupt:
            self.stop()
            attempt.done.wait(2)
            raise
        self._apply(attempt)
        if attempt.error is not None:
            raise attempt.error
        return attempt.result

    def stop(self) -> None:
        """Ask what runs to end; returns at once."""
        self._background.stop()

    def close(self) -> None:
        """Stop what runs and show its end."""
        self.stop()
        if self.latest is not None:
            self.latest.done.wait(5)
            self._apply(self.latest)

    def say_phase(self) -> None:
        """Show the phase of the job in progress again."""
        if self.in_progress and self._phase is not None:
            phase, began = self._phase
            self._show_phase(phase, phase.share(time.monotonic() - began))

    def _enter(self, attempt: Attempt, phase: Phase) -> None:
        if attempt is self.latest and not attempt.done.is_set():
            self._phase = phase, time.monotonic()
            self.say_phase()

    def _tick(self) -> None:
        """Move the progress on as time passes."""
        if self.in_progress and self._loop is not None:
            self.say_phase()
            self._loop.call_later(TICK_S, self._tick)

    def _finished(self, attempt: Attempt) -> None:
        """In the thread."""
        self._post(lambda: self._apply(attempt))

    def _post(self, action: Callable[[], None]) -> None:
        """Widgets change in the event loop; without one nobody looks, and `wait` does what is left."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(action)

    def _apply(self, attempt: Attempt) -> None:
        """Show how an attempt ended, once; only the latest one's end counts."""
        if attempt is self.latest and attempt is not self._shown:
            self._shown = attempt
            self._show_end(attempt)


def was_stopped(attempt: Attempt) -> bool:
    return attempt.was_stopped or isinstance(attempt.error, Stopped)
