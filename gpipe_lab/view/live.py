"""The base of every live panel: controls that answer at once, and runs in the background."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from .controls import message

TICK_S = 0.2  # between two moves of the progress bar
SETTLE_S = 0.015  # events that arrive within this time lead to one answer
REST_S = 0.25  # so long after an answer without another comes what takes longer
INTERRUPT_S = 0.1  # between two attempts to end a job
CLOSE_S = 5.0  # how long `close` waits for a job that was told to end


class Stopped(RuntimeError):
    """The run was stopped before it had a result."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run does now: its progress goes from `done` to `until` (shares of the whole) in `seconds`."""

    text: str
    done: float = 0.0
    until: float = 1.0
    seconds: float = 1.0

    def share(self, elapsed_s: float) -> float:
        """How far the whole run is, `elapsed_s` after the phase began."""
        part = min(1.0, elapsed_s / self.seconds) if self.seconds > 0 else 0.0
        return self.done + (self.until - self.done) * part


Tell = Callable[[Phase], None]
Job = Callable[[Tell], Any]


class Run:
    """One press of Run: a job in a thread of its own, which begins when the run before it has ended.

    `by_person` says whether a click started it, and not a cell's code. The thread is a daemon, so that a
    kernel that ends does not wait for it.
    """

    def __init__(self, job: Job, tell: Callable[[Run, Phase], None], *, before: Run | None) -> None:
        self.by_person = from_the_browser()
        self.future: Future[Any] = Future()
        self._job, self._tell, self._before = job, tell, before
        self._stopping = threading.Event()
        self._is_working = False
        self._lock = threading.Lock()  # so that an interrupt meets this job, and not the next one

    @property
    def in_progress(self) -> bool:
        return not self.future.done()

    @property
    def was_stopped(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        threading.Thread(target=self._perform, name="gpipe-panel", daemon=True).start()

    def stop(self, interrupt: Callable[[], None]) -> None:
        """Ask it to end; returns at once. `interrupt` is called until it has ended, from another thread."""
        if self.in_progress and not self._stopping.is_set():
            self._stopping.set()
            threading.Thread(target=self._insist, args=(interrupt,), daemon=True).start()

    def check(self) -> None:
        """Raise `Stopped` if the run is not wanted any more: for a job to call between its steps."""
        if self._stopping.is_set():
            raise Stopped("stopped")

    def _perform(self) -> None:
        if self._before is not None:
            self._before.future.exception()  # until it has ended, in whichever way
            self._before = None
        result, error = None, None
        try:
            self._work(True)
            self.check()
            result = self._job(self._phase)
            self.check()
        except BaseException as raised:  # whatever it is, the panel must show it
            error = raised
        self._work(False)
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def _work(self, is_working: bool) -> None:
        with self._lock:
            self._is_working = is_working

    def _phase(self, phase: Phase) -> None:
        self.check()
        self._tell(self, phase)

    def _insist(self, interrupt: Callable[[], None]) -> None:
        """One interrupt may come just before the job can be interrupted, so others follow."""
        while self.in_progress:
            with self._lock:
                if self._is_working:
                    interrupt()
            time.sleep(INTERRUPT_S)


class LivePanel:
    """A box of widgets with a status line. Subclasses draw; this runs, waits, stops, and shows what failed.

    A subclass gives `draw_at_once` (what follows a drag), `draw_at_rest` (what takes longer) and
    `status_line`; one that runs something also `interrupt` (end the job that runs, from another thread),
    `show_working`, `show_phase` and `show_result`.

    Nothing that fails is lost: a failure is shown in the status line, and raised in the cell whose code led
    to it: at once, in `wait`, or at the latest in `close`. What a person clicked is only shown.
    """

    def __init__(self) -> None:
        self.status = widgets.HTML()
        self.latest: Run | None = None
        self.outcome = ""  # of the latest run, where it did not end with a result
        self._failed = False
        self._unraised: BaseException | None = None
        self._shown: Run | None = None
        self._phase: tuple[Phase, float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._rest: asyncio.TimerHandle | None = None

    # What a subclass does.

    def draw_at_once(self) -> None:
        raise NotImplementedError

    def draw_at_rest(self) -> None:
        """What takes longer than a drag may."""

    def interrupt(self) -> None:
        raise NotImplementedError

    def show_phase(self, phase: Phase, share: float) -> None:
        raise NotImplementedError

    def show_result(self, result: Any) -> None:
        raise NotImplementedError

    def show_working(self, working: bool) -> None:
        raise NotImplementedError

    def status_line(self) -> str:
        """What the status says while nothing runs and nothing is wrong."""
        raise NotImplementedError

    def stopped_in_words(self) -> str:
        return "Stopped. Nothing was measured."

    def failure_in_words(self, error: BaseException) -> str:
        return f"{type(error).__name__}: {error}"

    # Drawing.

    def changed(self, _: Any = None) -> None:
        """A control has moved: draw, once for all moves that come together."""
        loop = running_loop()
        if loop is None or not from_the_browser():
            self.redraw()
        elif not self._is_due:
            self._is_due = True
            loop.call_later(SETTLE_S, self._settle, loop)

    def redraw(self) -> None:
        """Draw everything anew. Raises what goes wrong where a cell's code asked for it."""
        self.guarded(self._draw_all, by_person=from_the_browser())

    def guarded(self, action: Callable[[], Any], *, by_person: bool) -> None:
        """Do something that nobody waits for: what fails is shown, and raised for code."""
        try:
            action()
        except Exception as error:
            self.say(self.failure_in_words(error), alarm=True)
            if not by_person:
                raise

    def _draw_all(self) -> None:
        self.draw_at_once()
        self.draw_at_rest()

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        self.guarded(self.draw_at_once, by_person=True)
        if self._rest is not None:
            self._rest.cancel()
        self._rest = loop.call_later(REST_S, lambda: self.guarded(self.draw_at_rest, by_person=True))

    # Status.

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Put one message where a screen reader announces it; an alarm stands out."""
        self.status.value = message(text, alarm=alarm)

    def say_what_is_so(self) -> None:
        """The status line for the present: a run's phase, how the latest run ended, or what is shown."""
        if self.in_progress and self._phase is not None:
            phase, began = self._phase
            self.show_phase(phase, phase.share(time.monotonic() - began))
        elif self.outcome:
            self.say(self.outcome, alarm=self._failed)
        else:
            self.say(self.status_line())

    def forget_outcome(self) -> None:
        """The settings have moved on from what the latest run ended with."""
        if not self.in_progress:
            self.outcome = ""

    # Running.

    @property
    def in_progress(self) -> bool:
        return self.latest is not None and self.latest.in_progress

    def start(self, job: Job, first: Phase, *, wait: bool = False) -> Any:
        """Run `job` in the background as soon as what runs now has been stopped; with `wait` its result."""
        self._loop = running_loop()
        self.outcome, self._failed = "", False
        before = self.latest
        if before is not None:
            before.stop(self.interrupt)
        run = self.latest = Run(job, self._told, before=before)
        self.show_working(True)
        self._enter(run, first)
        run.future.add_done_callback(lambda _: self._post(lambda: self._end(run)))
        run.start()
        self._tick(run)
        return self.wait() if wait else None

    def clicked(self, action: Callable[..., Any]) -> None:
        """A person's click starts a run in the background; a click from code waits, and fails in `close`."""
        by_person = from_the_browser()
        try:
            action(wait=not by_person)
        except Exception as error:
            self.outcome, self._failed = self.failure_in_words(error), True
            self._unraised = None if by_person else error
            self.say_what_is_so()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait in this cell for the latest run and show it; its result, or its error raised."""
        run = self.latest
        if run is None:
            return None
        try:
            run.future.exception(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the run was not done after {timeout_s} s") from None
        except KeyboardInterrupt:
            self.stop()
            raise
        self._end(run)
        if (error := run.future.exception()) is not None:
            self._unraised = None  # it is raised here, so `close` need not
            raise error
        return run.future.result()

    def stop(self) -> None:
        """End the run in progress; the panel says so at once, and again when it has ended."""
        if self.latest is not None and self.in_progress:
            self.say("Stopping …")
            self.latest.stop(self.interrupt)

    def close(self) -> None:
        """Stop what runs. Raises the error of a run that code has started and no one waited for."""
        run = self.latest
        if run is not None:
            run.stop(self.interrupt)
            try:
                run.future.exception(CLOSE_S)
            except TimeoutError:
                pass  # its workers are ended by whoever lent them
            else:
                self._end(run)
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def _told(self, run: Run, phase: Phase) -> None:
        """In the run's thread."""
        self._post(lambda: self._enter(run, phase))

    def _enter(self, run: Run, phase: Phase) -> None:
        if run is self.latest and run.in_progress and not run.was_stopped:
            self._phase = phase, time.monotonic()
            self.say_what_is_so()

    def _tick(self, run: Run) -> None:
        """Move the progress on as time passes, while this run is the one that is shown."""
        if self._loop is not None and run is self.latest and run.in_progress and not run.was_stopped:
            self.say_what_is_so()
            self._loop.call_later(TICK_S, self._tick, run)

    def _post(self, action: Callable[[], None]) -> None:
        """Widgets change in the event loop; without one nobody looks, and `wait` does what is left."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(action)

    def _end(self, run: Run) -> None:
        """Show how a run has ended, once; only the latest one's end counts."""
        if run is not self.latest or run is self._shown:
            return
        self._shown = run
        self.show_working(False)
        error = run.future.exception()
        if error is None:
            try:
                self.show_result(run.future.result())
            except Exception as raised:
                error = raised
        if run.was_stopped:
            self.outcome = self.stopped_in_words()
        elif error is not None:
            self.outcome, self._failed = self.failure_in_words(error), True
            self._unraised = None if run.by_person else error
        self.say_what_is_so()


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
