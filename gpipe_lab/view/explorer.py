"""The live panel: dragging a slider simulates at once, Run measures with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..plan.errors import require
from ..plan.trace import Trace
from .background import Attempt, LatestWins, Stopped, from_the_browser, running_loop
from .panel import Panel, image
from .picture import show
from .runner import LabRunner, Measured, Runner
from .settings import (
    LAUNDRY,
    ROWS_HEIGHT,
    Settings,
    Wording,
    axis_end,
    draw,
    draw_measured,
    problem,
    simulated,
    summary,
)
from .tables import explain_error, summary_table

if TYPE_CHECKING:
    import pandas

SETTLE_S = 0.015  # events that arrive within this time lead to one redraw


class Explorer:
    """A panel with sliders for P and M: simulated while you drag, measured when you press Run.

    `schedules` are the names offered; with one only, the choices of schedule, checkpoint and ratio are
    left out. `forward_ms` is the time of one forward, simulated and as the pace of a real run. `wording`
    names things. `runner` runs settings for real; by default in the one `Lab` that all panels of a
    notebook share, started at the first Run and closed by `close()`.
    """

    def __init__(
        self,
        num_stages: int = 4,
        num_microbatches: int = 8,
        *,
        schedule: str = "gpipe",
        checkpoint: str = "never",
        ratio: float = 2.0,
        forward_ms: float = 10.0,
        schedules: Sequence[str] = ("naive", "gpipe", "one_f_one_b"),
        max_stages: int = 8,
        max_microbatches: int = 32,
        wording: Wording = Wording(),  # noqa: B008 (a frozen value)
        runner: Runner | None = None,
    ) -> None:
        start = Settings(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            checkpoint=checkpoint,
            ratio=ratio,
            forward_ms=forward_ms,
        )
        require(
            schedule in schedules,
            "the schedule is one of those offered",
            got=f"schedule={schedule!r}",
            where="Explorer",
            remedy=f"schedules={[*schedules, schedule]}",
        )
        reason = problem(start)
        require(reason is None, reason or "", got=repr(start), where="Explorer")
        self.wording = wording
        self.error: BaseException | None = None
        self.result: Measured | None = None
        self._measured: Settings | None = None  # those of the measured picture
        self._runner: Runner = LabRunner() if runner is None else runner
        self._background = LatestWins(interrupt=self._runner.stop, finished=self._finished)
        self._attempt: Attempt | None = None
        self._running = start  # the settings of the attempt
        self._phase = ""
        self._applied: Attempt | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._redraw_pending = False
        self._quiet = False
        self._seen = False
        self._until = 0.0
        self.panel = Panel(
            start,
            wording,
            schedules=schedules,
            max_stages=max_stages,
            max_microbatches=max_microbatches,
        )
        self.panel.on_change(self._changed)
        self.panel.run.on_click(lambda _: self._run_clicked())
        self.panel.stop.on_click(lambda _: self.stop())
        self.redraw()

    @classmethod
    def laundry(cls, num_stages: int = 3, num_microbatches: int = 4, **options: Any) -> Explorer:
        """The panel of stations and loads: forwards only, 30 min each (run for real as 30 ms)."""
        laundry: dict[str, Any] = {"schedule": "forward_only", "schedules": ("forward_only",)}
        laundry |= {"max_stages": 6, "max_microbatches": 12, "forward_ms": 30.0, "wording": LAUNDRY}
        return cls(num_stages, num_microbatches, **(laundry | options))

    @property
    def settings(self) -> Settings:
        """What the controls say now."""
        return self.panel.settings

    def set(self, **changes: Any) -> None:
        """Move controls from code (`num_stages=6`, `checkpoint="always"`, ...) and redraw once."""
        controls = self.panel.controls()
        unknown = sorted(changes.keys() - controls.keys())
        require(
            not unknown, "settings are " + ", ".join(controls), got=", ".join(unknown), where="Explorer.set"
        )
        self._quiet = True
        try:
            for name, value in changes.items():
                controls[name].value = value
        finally:
            self._quiet = False
        self.redraw()

    def redraw(self) -> None:
        """Simulate the present settings and draw them; if they cannot run, say why and disable Run."""
        settings = self.settings
        reason = problem(settings)
        self.panel.run.disabled = reason is not None
        stale = self._note_what_changed()
        if reason is not None:
            self.panel.say(f"Run is off: {reason}.", alarm=True)
            return
        trace = simulated(settings)
        self._until = axis_end(self._until, trace.makespan_ms)
        self._show_simulated(settings, trace)
        if self._attempt is not None and not self._attempt.done.is_set():
            self._say_phase()
        else:
            self.panel.say(f"{summary(trace, self.wording.unit)}. Press Run to measure it.{stale}")

    def run(self, *, wait: bool = False) -> Measured | None:
        """Measure the present settings with real workers; a run still going is stopped and replaced.

        `wait=True` returns when the run is done, with its result, and raises what went wrong: for a cell
        that must fail if the run fails. Otherwise the panel shows the result or the error.
        """
        settings = self.settings
        reason = problem(settings)
        require(reason is None, reason or "", got=repr(settings), where="Explorer.run")
        self._loop = running_loop()
        self._running = settings
        self._attempt = Attempt(lambda attempt: self._measure(attempt, settings))
        self._working(True)
        self._report(self._attempt, "starting", 1)
        self._background.submit(self._attempt)
        return self.wait() if wait else None

    def wait(self, timeout_s: float | None = None) -> Measured | None:
        """Wait for the latest run in this cell, show it, and raise its error if it has one."""
        attempt = self._attempt
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
            self.error = None
            raise attempt.error
        return self.result

    def stop(self) -> None:
        """End the run in progress; the panel says so within two seconds."""
        self._background.stop()

    def close(self) -> None:
        """Stop what runs and close the lab. Raises the error of a run from code that no one waited for."""
        self.stop()
        if self._attempt is not None:
            self._attempt.done.wait(5)
            self._apply(self._attempt)
        self._runner.close()
        self.panel.box.close()
        error, self.error = self.error, None
        if error is not None and not self._seen:
            raise error

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is not None:
            self.error = None
        self.close()

    def static(
        self, *choices: Settings | Mapping[str, Any], measure: bool = False, display: bool = True
    ) -> pandas.DataFrame:
        """The same view without widgets: a plain figure for each choice, and one table of their numbers.

        A choice is a `Settings` or the settings that differ from the panel's; without any, the panel's
        own. With `measure` each is run for real as well; a panel on which nobody pressed Run leaves no
        workers behind.
        """
        try:
            return self._static(choices, measure=measure, display=display)
        finally:
            if measure and self._attempt is None:
                self._runner.close()

    def _static(
        self, choices: Sequence[Settings | Mapping[str, Any]], *, measure: bool, display: bool
    ) -> pandas.DataFrame:
        import pandas

        tables = {}
        for choice in choices or ({},):
            settings = choice if isinstance(choice, Settings) else replace(self.settings, **choice)
            reason = problem(settings)
            require(reason is None, reason or "", got=repr(settings), where="Explorer.static")
            trace = simulated(settings)
            result = self._runner.run(settings, lambda _: None) if measure else None
            until = None if result is None else max(trace.makespan_ms, result.trace.makespan_ms)
            if display:
                show(draw(settings, trace, self.wording, until=until))
                if result is not None:
                    show(draw_measured(settings, result.trace, result.memory, self.wording, until=until))
            key = f"{settings.schedule}, P = {settings.num_stages}, M = {settings.num_microbatches}"
            key += "" if settings.checkpoint == "never" else f", checkpoint {settings.checkpoint}"
            key += "" if settings.ratio == self.settings.ratio else f", ratio {settings.ratio:g}"
            tables[key] = summary_table(trace, result.trace if result is not None else None)
        return pandas.concat(tables, names=["settings", "quantity"])

    def _changed(self, _: Any) -> None:
        if self._quiet or self._redraw_pending:
            return
        loop = running_loop()
        if loop is None or not from_the_browser():
            self.redraw()
            return
        self._redraw_pending = True
        loop.call_later(SETTLE_S, self._redraw_pending_change)

    def _redraw_pending_change(self) -> None:
        self._redraw_pending = False
        try:
            self.redraw()
        except Exception as error:
            self._show_error(error)

    def _run_clicked(self) -> None:
        """A click by a person runs in the background; a click from code must fail in its cell."""
        try:
            self.run(wait=not from_the_browser())
        except Exception as error:
            self._show_error(error)

    def _measure(self, attempt: Attempt, settings: Settings) -> tuple[Settings, Measured]:
        """In the thread."""

        def progress(phase: str) -> None:
            attempt.check()
            self._post(lambda: self._report(attempt, phase, 3 if phase == "measuring" else 2))

        result = self._runner.run(settings, progress)
        attempt.check()
        return settings, result

    def _finished(self, attempt: Attempt) -> None:
        """In the thread."""
        self._post(lambda: self._apply(attempt))

    def _post(self, action: Callable[[], None]) -> None:
        """Widgets change in the event loop; without one nobody looks, and `wait` does what is left."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(action)

    def _apply(self, attempt: Attempt) -> None:
        """Show how an attempt ended, once; only the latest one's end counts."""
        if attempt is not self._attempt or attempt is self._applied:
            return
        self._applied = attempt
        self._working(False)
        if attempt.was_stopped or isinstance(attempt.error, Stopped):
            self.panel.say("Stopped. Nothing was measured.")
        elif attempt.error is not None:
            self._show_error(attempt.error)
        else:
            try:
                self._show_result(*attempt.result)
            except Exception as error:
                attempt.error = error
                self._show_error(error)

    def _show_result(self, settings: Settings, result: Measured) -> None:
        self.result, self.error, self._measured = result, None, settings
        predicted = simulated(settings)
        self._until = axis_end(self._until, max(predicted.makespan_ms, result.trace.makespan_ms))
        self.panel.measured.value = image(
            draw_measured(settings, result.trace, result.memory, self.wording, until=self._until)
        )
        if settings == self.settings:
            self._show_simulated(settings, predicted)
        stale = self._note_what_changed()
        self.panel.say(
            f"{summary(predicted, self.wording.unit)}; {summary(result.trace, self.wording.run_unit)}.\n"
            f"{explain_error(result.trace, predicted)}{stale}"
        )

    def _note_what_changed(self) -> str:
        """Say above the measured picture if the controls have left its settings; the line for the status."""
        shown = self._measured
        stale = shown is not None and shown != self.settings
        note = f"Measured with {shown.words}; the settings have changed since." if stale and shown else ""
        self.panel.note(note)
        return f"\n{note}" if note else ""

    def _show_simulated(self, settings: Settings, trace: Trace) -> None:
        picture = draw(settings, trace, self.wording, until=self._until, rows_height=ROWS_HEIGHT)
        self.panel.simulated.value = image(picture, quick=True)

    def _show_error(self, error: BaseException) -> None:
        self.error = error
        self._seen = from_the_browser()
        self.panel.say(f"{type(error).__name__}: {error}", alarm=True)

    def _working(self, working: bool) -> None:
        self.panel.stop.disabled = not working
        self.panel.progress.layout.visibility = "visible" if working else "hidden"

    def _report(self, attempt: Attempt, phase: str, step: int) -> None:
        if attempt is self._attempt and not attempt.done.is_set():
            self.panel.progress.value = step
            self._phase = phase
            self._say_phase()

    def _say_phase(self) -> None:
        """What the run in progress does, and for which settings where the controls have left them."""
        changed = self._running != self.settings
        of = f" for {self._running.words}; the settings have changed since" if changed else ""
        self.panel.say(f"{self._phase[:1].upper()}{self._phase[1:]}{of} …")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        data = self.panel.box._repr_mimebundle_(**options)
        shown = summary(simulated(self.settings), self.wording.unit)
        return {**data, "text/plain": f"A live panel: {shown}"}
