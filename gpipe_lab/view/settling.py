"""One answer to a burst of events, and what takes longer once they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SETTLE_S = 0.015  # events that arrive within this time lead to one answer
REST_S = 0.25  # so long after an answer without another comes what takes longer


class Settling:
    """Calls `answer` soon after events, once for all that came meanwhile, and `at_rest` when they ended."""

    def __init__(self, answer: Callable[[], None], at_rest: Callable[[], None]) -> None:
        self._answer, self._at_rest = answer, at_rest
        self._is_due = False
        self._rest: asyncio.TimerHandle | None = None

    def note(self, loop: asyncio.AbstractEventLoop) -> None:
        """An event has come."""
        if not self._is_due:
            self._is_due = True
            loop.call_later(SETTLE_S, self._settle, loop)

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        self._answer()
        if self._rest is not None:
            self._rest.cancel()
        self._rest = loop.call_later(REST_S, self._at_rest)
