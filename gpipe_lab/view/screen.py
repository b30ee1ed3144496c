"""What the explorer's panel shows: pictures, words and files, from settings and runs."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.memory import MemoryReport
from ..plan.trace import Trace
from .apart import bubble_table, plot_bubble
from .downloads import MakeFile, files_of, pictures_of
from .lanes import Lanes, simulated_lanes
from .moment import state_in_words
from .panel import CLOSER, MEMORY, RACE, Panel
from .picture import Picture, img
from .runner import Measured
from .scene import ROWS_HEIGHT, Marks, Wording, axis_end, draw
from .settings import Settings, simulated, simulated_memory
from .style import INK, PAPER


@dataclass(frozen=True)
class Shown:
    """A run with the settings it was made for."""

    settings: Settings
    run: Measured


@dataclass(frozen=True)
class Scene:
    """A trace with what it was made from."""

    settings: Settings
    trace: Trace
    memory: MemoryReport | None


@dataclass(frozen=True)
class Chart:
    """A drawn picture as HTML, and where in it its time axis runs, in shares of its width and height."""

    image: str
    left: float
    right: float
    top: float
    bottom: float
    until: float

    @classmethod
    def of(cls, picture: Picture, until: float) -> Chart:
        first, last = picture.axes[0].get_position(), picture.axes[-1].get_position()
        drawn = img(picture, quick=True)
        return cls(drawn, first.x0, first.x1, 1 - first.y1, 1 - last.y0, until)

    def at(self, time_ms: float | None) -> str:
        """The picture with a line at a moment. The line lies over it, so moving it draws nothing anew."""
        if time_ms is None:
            return self.image
        x = self.left + (self.right - self.left) * min(1.0, time_ms / self.until)
        place = f"left:{100 * x:.2f}%;top:{100 * self.top:.2f}%;height:{100 * (self.bottom - self.top):.2f}%"
        line = f"position:absolute;{place};width:2px;margin-left:-1px;background:{INK};pointer-events:none"
        return (
            f'<div style="position:relative;display:inline-block">{self.image}'
            f'<div class="gl-moment" style="{line};box-shadow:0 0 0 1px {PAPER}"></div></div>'
        )


class Screen:
    """Draws into a panel. The time axis is one for the simulated and the measured chart."""

    def __init__(self, panel: Panel, wording: Wording) -> None:
        self.panel, self.wording = panel, wording
        self.measured: Shown | None = None
        self._measured_race: Lanes | None = None
        self._now: Scene | None = None
        self._charts: dict[str, Chart] = {}  # "simulated", "measured"
        self._measured_marks = Marks()
        self._until = 0.0

    def show_simulated(self, settings: Settings) -> Trace:
        """Simulate and draw, with the memory where its section is open or it has a limit."""
        trace = simulated(settings)
        wants_memory = self.panel.is_open(MEMORY) or settings.memory_limit is not None
        memory = simulated_memory(settings, trace) if wants_memory and self.wording.memory else None
        self._now = Scene(settings, trace, memory)
        run = self._run_of_now()
        self._until = axis_end(
            self._until, max(trace.makespan_ms, run.trace.makespan_ms if run is not None else 0.0)
        )
        self.panel.time.reach(self._until)
        picture = self._draw(self._now, rows_height=ROWS_HEIGHT)
        self._charts["simulated"] = Chart.of(picture, self._until)
        self._put_charts()
        return trace

    def show_measured(self, shown: Shown, settings: Settings) -> Trace:
        """Draw a run, and on the same axis the simulation; the simulation of the run's settings."""
        self.measured = shown
        predicted = simulated(shown.settings)
        if shown.settings == settings:
            self.show_simulated(settings)
        else:
            longest = max(predicted.makespan_ms, shown.run.trace.makespan_ms)
            self._until = axis_end(self._until, longest)
        self._draw_measured()
        self.show_rest()
        return predicted

    def show_rest(self) -> None:
        """What takes longer than a drag may: the words, the bubble taken apart, the race."""
        if self.measured is not None and self._measured_marks != self.panel.marks:
            self._draw_measured()
        if self._now is not None and self.panel.is_open(CLOSER):
            self.show_moment()
            self.panel.apart.value = self._apart()
        if self._now is not None and self.panel.is_open(RACE):
            self.panel.race.value = _race_html(simulated_lanes(self._now.settings, self.panel.racers))

    def show_moment(self) -> None:
        """Move the line, and say what every rank does then."""
        self._put_charts()
        if self._now is None or not self.panel.is_open(CLOSER):
            return
        at = self.panel.time.slider.value
        names = self.wording.names(self._now.trace.num_ranks)
        self.panel.words.value = "".join(
            _words_html(
                f"At {at:g} {unit}, {one.source}",
                state_in_words(one, at, memory, row_names=names, unit=unit),
            )
            for one, memory, unit in self._closer()
        )

    def note_what_changed(self, settings: Settings) -> str:
        """Say above the measured picture if the controls have left its settings; the line for the status."""
        shown = self.measured
        stale = shown is not None and shown.settings != settings
        words = shown.settings.words if stale and shown is not None else ""
        note = f"Measured with {words}; the settings have changed since." if stale else ""
        self.panel.note(note)
        return f"\n{note}" if note else ""

    def show_measured_race(self, lanes: Lanes) -> None:
        self._measured_race = lanes
        self.panel.measured_race.value = _race_html(lanes)

    def files(self) -> list[MakeFile]:
        """Everything that is shown, to be saved: functions that make a file each."""
        files: list[MakeFile] = []
        for scene in self._scenes():
            of = scene.settings
            name = f"{of.schedule} p{of.num_stages} m{of.num_microbatches} {scene.trace.source}"
            picture = self._draw(scene, at_ms=self.panel.moment)
            files += files_of(name, picture, scene.trace, scene.memory)
        lanes = [self._measured_race] if self._measured_race is not None else []
        if self._now is not None and self.panel.is_open(RACE):
            lanes.insert(0, simulated_lanes(self._now.settings, self.panel.racers))
        for race in lanes:
            picture_of_race = race.picture()
            if picture_of_race is not None:
                source = next(iter(race.traces.values())).source
                files += pictures_of(f"race {source}", picture_of_race)
        return files

    def _scenes(self) -> list[Scene]:
        """What the charts show."""
        scenes = [] if self._now is None else [self._now]
        if self.measured is not None:
            run = self.measured.run
            scenes.append(Scene(self.measured.settings, run.trace, run.memory))
        return scenes

    def _run_of_now(self) -> Measured | None:
        """The run of the present settings, if there is one."""
        is_now = self.measured is not None and self._now is not None
        same = is_now and self.measured.settings == self._now.settings  # type: ignore[union-attr]
        return self.measured.run if same and self.measured is not None else None

    def _closer(self) -> list[tuple[Trace, MemoryReport | None, str]]:
        """The traces to look closer at, with memory and unit: the simulation, and a run of it."""
        assert self._now is not None, "asked for after a simulation"
        settings, trace, run = self._now.settings, self._now.trace, self._run_of_now()
        memory = self._now.memory or (simulated_memory(settings, trace) if self.wording.memory else None)
        found: list[tuple[Trace, MemoryReport | None, str]] = [(trace, memory, self.wording.unit)]
        if run is not None:
            found.append((run.trace, run.memory if self.wording.memory else None, self.wording.run_unit))
        return found

    def _draw(self, scene: Scene, *, rows_height: float | None = None, at_ms: float | None = None) -> Picture:
        return draw(
            scene.settings,
            scene.trace,
            scene.memory,
            self.wording,
            until=self._until,
            rows_height=rows_height,
            marks=Marks(path=self.panel.marks.path, at_ms=at_ms),
        )

    def _draw_measured(self) -> None:
        self._measured_marks = self.panel.marks
        picture = self._draw(self._scenes()[-1])
        self._charts["measured"] = Chart.of(picture, self._until)
        self._put_charts()

    def _put_charts(self) -> None:
        places = {"simulated": self.panel.simulated, "measured": self.panel.measured}
        for name, chart in self._charts.items():
            places[name].value = chart.at(self.panel.moment)

    def _apart(self) -> str:
        traces = {trace.source: trace for trace, _, _ in self._closer()}
        table = bubble_table(traces).to_html(border=0, float_format=lambda x: f"{x:.2f}")
        return img(plot_bubble(traces), quick=True) + _folded("The bubble as a table", table)


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
