"""The live panel: dragging a slider simulates at once, Run measures with real workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..plan.errors import require
from ..plan.schedules import SCHEDULES
from . import twin
from .background import Attempt, from_the_browser, running_loop
from .downloads import File, bar, links
from .lanes import Lanes, measured_lanes
from .panel import SECTIONS, Panel
from .runner import MEASURING, LabRunner, Measured, Runner, does_not_fit
from .runs import Phase, Runs, Tell, was_stopped
from .scene import LAUNDRY, Wording, summary
from .screen import Screen, Shown
from .settings import Own, Settings, own_schedules, problem, simulated
from .settling import Settling
from .tables import explain_error

if TYPE_CHECKING:
    import pandas

START_SHARE = 0.1  # of a run's progress: its workers
RACE = ("gpipe", "one_f_one_b", "zero_bubble_h1")


class Explorer:
    """A panel with sliders for P and M: simulated while you drag, measured when you press Run.

    `schedules` are the names offered; with one only, there is no choice of schedule and no race.
    `own`: schedules of yours, a `Schedule`, a function of (num_stages, num_microbatches), or several by
    name. `forward_ms` is the time of one forward, simulated and as the pace of a real run; `options` are
    further settings (`send_ms`, `layers`, `heaviest`, `cut`, `memory_limit` in bytes). `sections` can be
    unfolded, those in `opened` are from the start; `race` are the lanes. `wording` names things. `runner`
    runs settings for real; by default in the one `Lab` that all panels of a notebook share, started at the
    first Run and closed by `close()`.
    """

    def __init__(
        self,
        num_stages: int = 4,
        num_microbatches: int = 8,
        *,
        schedule: str = "gpipe",
        schedules: Sequence[str] = ("naive", "gpipe", "one_f_one_b"),
        own: Own | Mapping[str, Own] | Sequence[Own] | None = None,
        max_stages: int = 8,
        max_microbatches: int = 32,
        sections: Sequence[str] = SECTIONS,
        opened: Collection[str] = (),
        race: Sequence[str] = (),
        wording: Wording = Wording(),  # noqa: B008 (a frozen value)
        runner: Runner | None = None,
        **options: Any,
    ) -> None:
        mine = own_schedules(own)
        start = Settings(
            num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, own=mine, **options
        )
        offered = [*schedules, *mine]
        require(
            schedule in offered,
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
        self._runner: Runner = LabRunner() if runner is None else runner
        self._runs = Runs(self._runner.stop, show_phase=self._show_phase, show_end=self._show_end)
        self._running = start  # the settings of the attempt
        self._settling = Settling(
            lambda: self._guarded(self._redraw), lambda: self._guarded(self._screen.show_rest)
        )
        self._quiet = False
        self._seen = False
        racers = [name for name in (*race, *mine, *RACE) if name in offered]
        self.panel = Panel(
            start,
            wording,
            schedules=offered,
            max_stages=max_stages,
            max_microbatches=max_microbatches,
            sections=sections if len(offered) > 1 else (),
            opened=opened,
            race=list(dict.fromkeys(racers))[:4],
        )
        self._screen = Screen(self.panel, wording)
        self.panel.on_change(self._changed)
        self.panel.time.slider.observe(lambda _: self._screen.show_moment(), names="value")
        for button, action in (
            (self.panel.run, self.run),
            (self.panel.run_race, self.run_race),
        ):
            button.on_click(lambda _, action=action: self._clicked(action))
        self.panel.stop.on_click(lambda _: self.stop())
        self.panel.save.on_click(lambda _: self._guarded(self._save))
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
        names = self.panel.setting_names
        unknown = sorted(changes.keys() - set(names))
        require(not unknown, "settings are " + ", ".join(names), got=", ".join(unknown), where="Explorer.set")
        self._quiet = True
        try:
            for name, value in changes.items():
                self.panel.write(name, value)
        finally:
            self._quiet = False
        self.redraw()

    def redraw(self) -> None:
        """Simulate the present settings and draw them; if they cannot run, say why and disable Run."""
        self._redraw()
        self._screen.show_rest()

    def _redraw(self) -> None:
        """What follows a drag at once."""
        settings = self.settings
        self.panel.switch(settings)
        reason = problem(settings)
        self.panel.run.disabled = reason is not None
        stale = self._screen.note_what_changed(settings)
        if reason is not None:
            self.panel.say(f"Run is off: {reason}.", alarm=True)
            return
        trace = self._screen.show_simulated(settings)
        if self._runs.in_progress:
            self._runs.say_phase()
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
        seconds = simulated(settings).makespan_ms / 1000

        def job(tell: Tell) -> Shown:
            def progress(text: str) -> None:
                measuring = text == MEASURING
                done, until = (START_SHARE, 1.0) if measuring else (0.0, START_SHARE)
                tell(Phase(text=text, done=done, until=until, seconds=seconds if measuring else 0.5))

            run = self._runner.run(settings, progress)
            return Shown(settings, run)

        return self._start(job, settings, wait=wait)

    def run_race(self, *, wait: bool = False) -> Lanes | None:
        """Measure every lane of the race, one after another; as `run` otherwise."""
        settings, names = self.settings, self.panel.racers
        require(bool(names), "a race has at least one lane", got="none", where="Explorer.run_race")
        return self._start(
            lambda tell: measured_lanes(settings, names, self._runner, tell), settings, wait=wait
        )

    def _start(self, job: Any, settings: Settings, *, wait: bool) -> Any:
        self._running = settings
        self.panel.working(True)
        self._runs.start(job, Phase(text="starting", done=0.0, until=START_SHARE, seconds=0.5))
        return self.wait() if wait else None

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the latest run in this cell, show it, and raise its error if it has one."""
        try:
            result = self._runs.wait(timeout_s)
        except Exception as error:
            if self.error is error:
                self.error = None  # it is raised here, so `close` need not
            raise
        return result.run if isinstance(result, Shown) else result

    def stop(self) -> None:
        """End the run in progress; the panel says so within two seconds."""
        self._runs.stop()

    def close(self) -> None:
        """Stop what runs and close the lab. Raises the error of a run from code that no one waited for."""
        self._runs.close()
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
        chosen = [c if isinstance(c, Settings) else replace(self.settings, **c) for c in choices or ({},)]
        try:
            return twin.static(
                chosen, self.wording, runner=self._runner if measure else None, display=display
            )
        finally:
            self._leave_none(measure)

    def static_race(
        self, *names: str, measure: bool = False, display: bool = True, **changes: Any
    ) -> pandas.DataFrame:
        """The race without widgets: a plain figure, and a table with one row a schedule.

        `names` are the lanes, the panel's own unless given; `changes` differ from the panel's settings.
        """
        settings, lanes = replace(self.settings, **changes), names or self.panel.racers
        try:
            return twin.static_race(
                settings, lanes, runner=self._runner if measure else None, display=display
            )
        finally:
            self._leave_none(measure)

    def _leave_none(self, measured: bool) -> None:
        """A panel on which nobody pressed Run leaves no workers behind."""
        if measured and self._runs.latest is None:
            self._runner.close()

    def _changed(self, _: Any) -> None:
        if self._quiet:
            return
        loop = running_loop()
        if loop is None or not from_the_browser():
            self.redraw()
        else:
            self._settling.note(loop)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Nobody waits for what the event loop calls, so its error is shown."""
        try:
            action()
        except Exception as error:
            self._show_error(error)

    def _clicked(self, action: Any) -> None:
        """A click by a person runs in the background; a click from code must fail in its cell."""
        try:
            action(wait=not from_the_browser())
        except Exception as error:
            self._show_error(error)

    def _save(self) -> None:
        found: list[File] = []
        makers = self._screen.files()
        for make in makers:
            self.panel.files.value = bar(len(found), len(makers))
            found.append(make())
        self.panel.files.value = links(found)

    def _show_phase(self, phase: Phase, share: float) -> None:
        """What the run in progress does, and for which settings where the controls have left them."""
        self.panel.progress.value = share
        changed = self._running != self.settings
        of = f" for {self._running.words}; the settings have changed since" if changed else ""
        self.panel.say(f"{phase.text[:1].upper()}{phase.text[1:]}{of} …")

    def _show_end(self, attempt: Attempt) -> None:
        self.panel.working(False)
        if was_stopped(attempt):
            self.panel.say("Stopped. Nothing was measured.")
        elif attempt.error is not None:
            self._show_error(attempt.error)
        else:
            try:
                self._show_result(attempt.result)
            except Exception as error:
                attempt.error = error
                self._show_error(error)

    def _show_result(self, result: Shown | Lanes) -> None:
        self.error = None
        if isinstance(result, Lanes):
            self._screen.show_measured_race(result)
            self.panel.say("The race is run.")
            return
        self.result = result.run
        predicted = self._screen.show_measured(result, self.settings)
        stale = self._screen.note_what_changed(self.settings)
        told = f"{summary(predicted, self.wording.unit)}; {summary(result.run.trace, self.wording.run_unit)}"
        self.panel.say(f"{told}.\n{explain_error(result.run.trace, predicted)}{stale}")

    def _show_error(self, error: BaseException) -> None:
        self.error = error
        self._seen = from_the_browser()
        told = (
            f"Does not fit: {error.__cause__}" if does_not_fit(error) else f"{type(error).__name__}: {error}"
        )
        self.panel.say(told, alarm=True)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        data = self.panel.box._repr_mimebundle_(**options)
        shown = summary(simulated(self.settings), self.wording.unit)
        return {**data, "text/plain": f"A live panel: {shown}"}


def explore(num_stages: int = 4, num_microbatches: int = 8, **options: Any) -> Explorer:
    """The explorer with every schedule that trains, and yours: `gl.explore(own=my_schedule)`.

    `options` are those of `Explorer`.
    """
    names = tuple(name for name in SCHEDULES if name != "forward_only")
    return Explorer(num_stages, num_microbatches, **({"schedules": names} | options))
