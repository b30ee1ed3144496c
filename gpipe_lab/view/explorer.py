"""The explorer: dragging a slider simulates at once, Run measures with real workers."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from ..plan.errors import require
from ..plan.memory import MemoryReport
from ..plan.schedules import SCHEDULES
from ..plan.trace import Trace
from .apart import bubble_table, plot_bubble
from .controls import ROW, STYLE, Chart, Folds, message
from .downloads import File, MakeFile, bar, files_of, links, pictures_of
from .explorer_controls import CLOSER, MEMORY, RACE, SECTIONS, ExplorerControls, section_of
from .live import LivePanel, Phase, Tell, from_the_browser
from .moment import state_in_words
from .picture import Picture, img, show
from .race import Lanes, measured_lanes, simulated_lanes
from .runner import MEASURING, LabRunner, Measured, Runner, does_not_fit
from .scene import LAUNDRY, ROWS_HEIGHT, Marks, Wording, axis_end, draw, summary
from .settings import Own, Settings, own_schedules, problem, simulated, simulated_memory
from .tables import explain_error, summary_table

if TYPE_CHECKING:
    import pandas

START_SHARE = 0.1  # of a run's progress: its workers
STARTING = Phase(text="starting", done=0.0, until=START_SHARE, seconds=0.5)
RACERS = ("gpipe", "one_f_one_b", "zero_bubble_h1")


@dataclass(frozen=True)
class Scene:
    """A trace, simulated or measured, with the settings it was made for and its memory."""

    settings: Settings
    trace: Trace
    memory: MemoryReport | None


class Explorer(LivePanel):
    """A panel with sliders for P and M: simulated while you drag, measured when you press Run.

    `schedules` are the names offered; with one only, there is no choice of schedule and no race.
    `own`: schedules of yours, a `Schedule`, a function of (num_stages, num_microbatches), or several by
    name. `forward_ms` is the time of one forward, simulated and as the pace of a real run; `options` are
    further settings (`send_ms`, `layers`, `heaviest`, `cut`, `memory_limit` in bytes). `sections` can be
    unfolded, one at a time; `opened` is from the start; `race` are the lanes. `wording` names things.
    `runner` runs settings for real; by default in the one `Lab` that all panels of a notebook share, started
    at the first Run and closed by `close()`. Raises `InputError` for names and settings that there are not.
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
        opened: str | Collection[str] = (),
        race: Sequence[str] = (),
        wording: Wording = Wording(),  # noqa: B008 (a frozen value)
        runner: Runner | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        mine = own_schedules(own)
        offered = [*schedules, *mine]
        unfolded = [opened] if isinstance(opened, str) else list(opened)
        _require_known("schedules", schedules, [*SCHEDULES, *mine])
        _require_known("schedule", [schedule], offered)
        _require_known("race", race, offered)
        _require_known("sections", sections, SECTIONS)
        _require_known("opened", unfolded, SECTIONS)
        start = Settings(
            num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, own=mine, **options
        )
        reason = problem(start)
        require(reason is None, reason or "", got=repr(start), where="Explorer")
        self.wording = wording
        self.result: Measured | None = None
        self._runner: Runner = LabRunner() if runner is None else runner
        self._running = start  # the settings of the latest run
        self._now: Scene | None = None  # simulated
        self._measured: Scene | None = None
        self._measured_race: Lanes | None = None
        self._measured_look: tuple[float, Marks] | None = None  # axis and marks of the measured chart
        self._until = 0.0
        self._quiet = False
        racers = [name for name in (*race, *mine, *RACERS) if name in offered]
        self.controls = ExplorerControls(
            start,
            wording,
            schedules=offered,
            max_stages=max_stages,
            max_microbatches=max_microbatches,
            race=list(dict.fromkeys(racers))[:4],
        )
        self.simulated, self.measured = Chart(), Chart()
        self.words, self.apart = widgets.HTML(), widgets.HTML()
        self.race, self.measured_race = widgets.HTML(), widgets.HTML()
        self.measured_note = widgets.HTML()
        kept = sections if len(offered) > 1 else ()
        every = self.controls.sections([self.words, self.apart], [self.race, self.measured_race])
        self.folds = Folds(
            {name: section for name, section in every.items() if name in kept},
            opened=unfolded[0] if unfolded else section_of(start),
            toggled=self.changed,
            beside=[self.controls.about],
        )
        self.box = widgets.VBox(
            [
                widgets.HTML(STYLE),
                widgets.HBox(self.controls.first_row, layout=ROW),
                *self.folds.parts,
                self.status,
                *[self.simulated.box, self.words, self.measured_note, self.measured.box],
                *[self.apart, self.race, self.measured_race],
            ]
        )
        self.box.add_class("gl-panel")
        self._listen()
        self.redraw()

    def _listen(self) -> None:
        controls = self.controls
        controls.on_change(self._moved)
        controls.time.slider.observe(lambda _: self.guarded(self._show_moment, by_person=True), names="value")
        controls.run.on_click(lambda _: self.clicked(self.run))
        controls.run_race.on_click(lambda _: self.clicked(self.run_race))
        controls.stop.on_click(lambda _: self.stop())
        controls.save.on_click(lambda _: self.guarded(self._save, by_person=from_the_browser()))

    @classmethod
    def laundry(cls, num_stages: int = 3, num_microbatches: int = 4, **options: Any) -> Explorer:
        """The panel of stations and loads: forwards only, 30 min each (run for real as 30 ms)."""
        laundry: dict[str, Any] = {"schedule": "forward_only", "schedules": ("forward_only",)}
        laundry |= {"max_stages": 6, "max_microbatches": 12, "forward_ms": 30.0, "wording": LAUNDRY}
        return cls(num_stages, num_microbatches, **(laundry | options))

    @property
    def settings(self) -> Settings:
        """What the controls say now."""
        return self.controls.settings

    def set(self, **changes: Any) -> None:
        """Move controls from code (`num_stages=6`, `checkpoint="always"`, ...) and redraw once.

        Raises `InputError` for a setting that there is not, or a value that its control does not have.
        """
        names = self.controls.setting_names
        unknown = sorted(changes.keys() - set(names))
        require(not unknown, "settings are " + ", ".join(names), got=", ".join(unknown), where="Explorer.set")
        before = self.settings
        self._quiet = True
        try:
            for name, value in changes.items():
                self.controls.write(name, value)
        except Exception:
            for name in changes:  # all of them, or none
                self.controls.write(name, getattr(before, name))
            raise
        finally:
            self._quiet = False
        self.forget_outcome()
        self.redraw()

    def run(self, *, wait: bool = False) -> Measured | None:
        """Measure the present settings with real workers; a run still going is stopped and replaced.

        `wait=True` returns when the run is done, with its result, and raises what went wrong: for a cell
        that must fail if the run fails. Otherwise the panel shows the result or the error.
        """
        settings = self.settings
        reason = problem(settings)
        require(reason is None, reason or "", got=repr(settings), where="Explorer.run")
        seconds = simulated(settings).makespan_ms / 1000

        def job(tell: Tell) -> Measured:
            def progress(text: str) -> None:
                if text == MEASURING:
                    tell(Phase(text=text, done=START_SHARE, until=1.0, seconds=seconds))
                else:
                    tell(replace(STARTING, text=text))

            return self._runner.run(settings, progress)

        self._running = settings
        return self.start(job, STARTING, wait=wait)

    def run_race(self, *, wait: bool = False) -> Lanes | None:
        """Measure every lane of the race, one after another; as `run` otherwise."""
        settings, names = self.settings, self.controls.racers
        require(bool(names), "a race has at least one lane", got="none", where="Explorer.run_race")
        self._running = settings
        return self.start(
            lambda tell: measured_lanes(settings, names, self._runner, tell), STARTING, wait=wait
        )

    def close(self) -> None:
        """Stop what runs and close the lab. Raises the error of a run from code that no one waited for."""
        try:
            super().close()
        finally:
            self._runner.close()
            self.box.close()

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self._unraised = None  # the cell fails already
        self.close()

    def static(
        self, *choices: Settings | Mapping[str, Any], measure: bool = False, display: bool = True
    ) -> pandas.DataFrame:
        """The same view without widgets: a plain figure for each choice, and one table of their numbers.

        A choice is a `Settings` or the settings that differ from the panel's; without any, the panel's
        own. With `measure` each is run for real as well; a panel on which nobody pressed Run leaves no
        workers behind.
        """
        import pandas

        chosen = [c if isinstance(c, Settings) else replace(self.settings, **c) for c in choices or ({},)]
        ratios = {choice.ratio for choice in chosen}
        tables = {}
        try:
            for settings in chosen:
                reason = problem(settings)
                require(reason is None, reason or "", got=repr(settings), where="Explorer.static")
                trace = simulated(settings)
                run = self._runner.run(settings, lambda _: None) if measure else None
                until = None if run is None else max(trace.makespan_ms, run.trace.makespan_ms)
                if display:
                    show(draw(settings, trace, None, self.wording, until=until))
                if display and run is not None:
                    show(draw(settings, run.trace, run.memory, self.wording, until=until))
                table = summary_table(trace, run.trace if run is not None else None)
                tables[_key(settings, varied=ratios)] = table
        finally:
            self._leave_none(measure)
        return pandas.concat(tables, names=["settings", "quantity"])

    def static_race(
        self, *names: str, measure: bool = False, display: bool = True, **changes: Any
    ) -> pandas.DataFrame:
        """The race without widgets: a plain figure, and a table with one row a schedule.

        `names` are the lanes, the panel's own unless given; `changes` differ from the panel's settings.
        """
        settings, racers = replace(self.settings, **changes), names or self.controls.racers
        try:
            lanes = (
                measured_lanes(settings, racers, self._runner, lambda phase: None)
                if measure
                else simulated_lanes(settings, racers)
            )
        finally:
            self._leave_none(measure)
        picture = lanes.picture()
        if display and picture is not None:
            show(picture)
        return lanes.table()

    def _leave_none(self, measured: bool) -> None:
        """A panel on which nobody pressed Run leaves no workers behind."""
        if measured and self.latest is None:
            self._runner.close()

    # Drawing.

    def _moved(self, change: Any) -> None:
        if not self._quiet:
            self.controls.forget_notes(change["owner"])
            self.forget_outcome()
            self.changed()

    def draw_at_once(self) -> None:
        settings = self.settings
        self.controls.switch(settings)
        reason = problem(settings)
        self.controls.run.disabled = reason is not None
        self.simulated.fade(reason is not None)
        self._note_what_changed()
        if reason is not None:
            self.say(f"Run is off: {reason}.", alarm=True)
            return
        trace = simulated(settings)
        wants_memory = self.folds.is_open(MEMORY) or settings.memory_limit is not None
        memory = simulated_memory(settings, trace) if wants_memory and self.wording.memory else None
        self._now = Scene(settings, trace, memory)
        self._draw_charts()
        self.say_what_is_so()

    def _draw_charts(self) -> None:
        """The simulated chart, and the measured one where its axis or its marks have changed: one axis."""
        assert self._now is not None, "drawn after a simulation"
        scenes = [self._now] if self._measured is None else [self._now, self._measured]
        self._until = axis_end(self._until, max(scene.trace.makespan_ms for scene in scenes))
        self.controls.time.reach(self._until)
        self.simulated.put(self._picture(self._now, rows_height=ROWS_HEIGHT), until=self._until, quick=True)
        self._draw_measured()
        self._mark()

    def _draw_measured(self) -> None:
        look = self._until, self._marks
        if self._measured is not None and self._measured_look != look:
            self._measured_look = look
            self.measured.put(self._picture(self._measured), until=self._until, quick=True)

    def draw_at_rest(self) -> None:
        if self._now is None or self._now.settings != self.settings:
            return  # the settings cannot be drawn, and the status says why
        if self.folds.is_open(CLOSER):
            self._show_moment()
            self.apart.value = self._apart()
        if self.folds.is_open(RACE):
            self.race.value = _race_html(simulated_lanes(self._now.settings, self.controls.racers))

    @property
    def _marks(self) -> Marks:
        """What is drawn into the charts: nothing unless somebody looks closer."""
        return Marks(path=self.folds.is_open(CLOSER) and self.controls.path.value)

    def _picture(
        self, scene: Scene, *, rows_height: float | None = None, at_ms: float | None = None
    ) -> Picture:
        return draw(
            scene.settings,
            scene.trace,
            scene.memory,
            self.wording,
            until=self._until,
            rows_height=rows_height,
            marks=replace(self._marks, at_ms=at_ms),
        )

    def _mark(self) -> None:
        at = self.controls.time.value if self.folds.is_open(CLOSER) else None
        for chart in (self.simulated, self.measured):
            chart.mark(at)

    def _show_moment(self) -> None:
        """Move the line, and say what every rank does then."""
        self._mark()
        if self._now is None or not self.folds.is_open(CLOSER):
            return
        at = self.controls.time.value
        names = self.wording.names(self._now.trace.num_ranks)
        self.words.value = "".join(
            _words_html(
                f"At {at:g} {unit}, {scene.trace.source}",
                state_in_words(scene.trace, at, scene.memory, row_names=names, unit=unit),
            )
            for scene, unit in self._comparable()
        )

    def _comparable(self) -> list[tuple[Scene, str]]:
        """The simulation and, where it is of the same settings, the run; each with the unit of its times."""
        assert self._now is not None, "asked for after a simulation"
        now = self._now
        if now.memory is None and self.wording.memory:
            now = replace(now, memory=simulated_memory(now.settings, now.trace))
        found = [(now, self.wording.unit)]
        if self._measured is not None and self._measured.settings == now.settings:
            found.append((self._measured, self.wording.run_unit))
        return found

    def _apart(self) -> str:
        traces = {scene.trace.source: scene.trace for scene, _ in self._comparable()}
        table = bubble_table(traces).to_html(border=0, float_format=lambda x: f"{x:.2f}")
        return img(plot_bubble(traces), quick=True) + _folded("The bubble as a table", table)

    def _note_what_changed(self) -> None:
        """Say above the measured picture if the controls have left its settings."""
        note = self._stale_note
        self.measured_note.value = message(note, alarm=True, role="note") if note else ""

    @property
    def _stale_note(self) -> str:
        shown = self._measured
        if shown is None or shown.settings == self.settings:
            return ""
        return f"Measured with {shown.settings.words}; the settings have changed since."

    # What the base asks for.

    def interrupt(self) -> None:
        self._runner.stop()

    def show_working(self, working: bool) -> None:
        self.controls.stop.disabled = not working
        self.controls.progress.layout.visibility = "visible" if working else "hidden"

    def show_phase(self, phase: Phase, share: float) -> None:
        """What the run in progress does, and for which settings where the controls have left them."""
        self.controls.progress.value = share
        changed = self._running != self.settings
        of = f" for {self._running.words}; the settings have changed since" if changed else ""
        self.say(f"{phase.text[:1].upper()}{phase.text[1:]}{of} …")

    def show_result(self, result: Measured | Lanes) -> None:
        if isinstance(result, Lanes):
            self._measured_race = result
            self.measured_race.value = _race_html(result)
            self.outcome = "The race is run."
            return
        self.result = result
        self._measured = Scene(self._running, result.trace, result.memory if self.wording.memory else None)
        self._measured_look = None
        self._note_what_changed()
        if self._now is not None:
            self._draw_charts()
        self.draw_at_rest()

    def stopped_in_words(self) -> str:
        earlier = "" if self.measured.is_empty else " The chart below is of an earlier run."
        return f"Stopped. Nothing was measured.{earlier}"

    def failure_in_words(self, error: BaseException) -> str:
        if does_not_fit(error):
            return f"Does not fit: {error.__cause__}"
        return super().failure_in_words(error)

    def status_line(self) -> str:
        """The simulation; beside it the run of the same settings, or what there is to do."""
        assert self._now is not None, "said after a simulation"
        told = summary(self._now.trace, self.wording.unit)
        shown = self._measured
        if shown is None or shown.settings != self.settings:
            return "\n".join(filter(None, [f"{told}. Press Run to measure it.", self._stale_note]))
        measured = summary(shown.trace, self.wording.run_unit)
        return f"{told}; {measured}.\n{explain_error(shown.trace, self._now.trace)}"

    # Files.

    def _save(self) -> None:
        found: list[File] = []
        makers = self._files()
        for make in makers:
            self.controls.files.value = bar(len(found), len(makers))
            found.append(make())
        self.controls.files.value = links(found)

    def _files(self) -> list[MakeFile]:
        """Everything that is shown, to be saved: functions that make a file each."""
        files: list[MakeFile] = []
        at = self.controls.time.value if self.folds.is_open(CLOSER) else None
        for scene in filter(None, (self._now, self._measured)):
            of = scene.settings
            name = f"{of.schedule} p{of.num_stages} m{of.num_microbatches} {scene.trace.source}"
            files += files_of(name, self._picture(scene, at_ms=at), scene.trace, scene.memory)
        lanes = [] if self._measured_race is None else [self._measured_race]
        if self._now is not None and self.race.value:
            lanes.insert(0, simulated_lanes(self._now.settings, self.controls.racers))
        for race in lanes:
            picture = race.picture()
            if picture is not None:
                source = next(iter(race.traces.values())).source
                files += pictures_of(f"race {source}", picture)
        return files

    def _repr_mimebundle_(self, **options: Any) -> Any:
        data = self.box._repr_mimebundle_(**options)
        shown = summary(simulated(self.settings), self.wording.unit)
        return {**data, "text/plain": f"A live panel: {shown}"}


def explore(num_stages: int = 4, num_microbatches: int = 8, **options: Any) -> Explorer:
    """The explorer with every schedule that trains, and yours: `gl.explore(own=my_schedule)`.

    `options` are those of `Explorer`.
    """
    names = tuple(name for name in SCHEDULES if name != "forward_only")
    return Explorer(num_stages, num_microbatches, **({"schedules": names} | options))


def _require_known(what: str, names: Sequence[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    require(
        not unknown,
        f"{what}: any of {', '.join(known)}",
        got=", ".join(map(repr, unknown)),
        where=f"Explorer({what}=...)",
    )


def _key(settings: Settings, varied: Collection[float]) -> str:
    key = f"{settings.schedule}, P = {settings.num_stages}, M = {settings.num_microbatches}"
    key += "" if settings.checkpoint == "never" else f", checkpoint {settings.checkpoint}"
    return key + (f", ratio {settings.ratio:g}" if len(varied) > 1 else "")


def _words_html(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return (
        f'<div style="line-height:1.5"><b>{html.escape(title)}</b><ul style="margin:2px 0">{items}</ul></div>'
    )


def _race_html(lanes: Lanes) -> str:
    picture = lanes.picture()
    if picture is None:
        return lanes.reasons()
    table = lanes.table().drop(columns="out").dropna().to_html(border=0)
    return img(picture, quick=True) + lanes.reasons() + _folded("The race as a table", table)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"
