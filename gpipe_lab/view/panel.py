"""The widgets of the explorer: controls, buttons, status, places for pictures. No behaviour."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ipywidgets as widgets

from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from .controls import ROW, Number, Section, button, choice, explained, hint, message
from .race import MOST
from .scene import Marks, Wording
from .settings import CHECKPOINTS, CUTS, LAYERS, Settings, switched_off

COSTS, MEMORY, CLOSER, RACE, SAVE = "Costs", "Memory", "Look closer", "Race", "Save"
SECTIONS = (COSTS, MEMORY, CLOSER, RACE, SAVE)
NOBODY = "—"
KIB = 1024


class Panel:
    """Controls and places for the pictures; `settings` reads the controls."""

    def __init__(
        self,
        start: Settings,
        wording: Wording,
        *,
        schedules: Sequence[str],
        max_stages: int,
        max_microbatches: int,
        sections: Sequence[str] = SECTIONS,
        opened: Collection[str] = (),
        race: Sequence[str] = (),
    ) -> None:
        self._start = start
        self._make_controls(start, wording, schedules, max_stages, max_microbatches)
        self._make_buttons()
        self._make_closer()
        self._make_race(schedules, race)
        self.save = button(
            "Prepare files", "download", "make the pictures, tables and traces shown ready to save"
        )
        self.files = widgets.HTML()
        self.status = widgets.HTML()
        self.simulated = widgets.HTML()
        self.measured_note = widgets.HTML()
        self.measured = widgets.HTML()
        opened = {*opened, *_sections_of(start)}
        self.sections = {
            name: Section(name, tip, rows, shown, opened=name in opened)
            for name, (tip, rows, shown) in self._folded().items()
            if name in sections
        }
        first = [self.schedule, self.about] if len(schedules) > 1 else []
        rows: list[Any] = [
            widgets.HBox([*self.stages.parts, *self.microbatches.parts], layout=ROW),
            *([widgets.HBox(first, layout=ROW)] if first else []),
            widgets.HBox([self.run, self.stop, self.progress], layout=ROW),
        ]
        if self.sections:
            rows.append(widgets.HBox([s.button for s in self.sections.values()], layout=ROW))
        rows += [section.body for section in self.sections.values()]
        charts = [self.simulated, self.words, self.measured_note, self.measured]
        self.box = widgets.VBox([*rows, self.status, *charts, self.apart, self.race, self.measured_race])

    def _make_controls(
        self,
        start: Settings,
        wording: Wording,
        schedules: Sequence[str],
        max_stages: int,
        max_microbatches: int,
    ) -> None:
        self.stages = Number(wording.stages, wording.help_stages, start.num_stages, 1, max_stages)
        self.microbatches = Number(
            wording.microbatches, wording.help_microbatches, start.num_microbatches, 1, max_microbatches
        )
        self.schedule = choice(
            "schedule", "in which order each rank runs its forwards and backwards", schedules, start.schedule
        )
        self.checkpoint = choice(
            "checkpoint",
            "which activations are dropped after the forward and recomputed before the backward",
            CHECKPOINTS,
            start.checkpoint,
        )
        self.ratio = Number(
            "backward ÷ forward",
            "how many times as long a backward takes as a forward",
            start.ratio,
            0.5,
            4.0,
            step=0.5,
        )
        self.send = Number(
            "message (ms)", "how long a message between two ranks travels", start.send_ms, 0.0, 20.0, step=0.5
        )
        self.layers = choice(
            "layers", "how the costs of the model's 16 layers differ", list(LAYERS), start.layers
        )
        self.heaviest = Number(
            "heaviest ÷ lightest",
            "how much longer the heaviest layer takes",
            start.heaviest,
            1.0,
            6.0,
            step=0.5,
        )
        self.cut = choice(
            "cut",
            "how layers go to stages: as many each, or so that the costliest stage costs least",
            CUTS,
            start.cut,
        )
        self.limited = widgets.Checkbox(
            value=start.memory_limit is not None,
            description="memory limit on every rank",
            tooltip="draw the limit, and on Run end a rank that passes it",
            indent=False,
        )
        limit = 512 if start.memory_limit is None else round(start.memory_limit / KIB)
        self.limit = Number("limit (KiB)", "bytes that each rank may hold, in KiB", limit, 64, 4096, step=16)
        self.numbers = {
            "num_stages": self.stages,
            "num_microbatches": self.microbatches,
            "ratio": self.ratio,
            "send_ms": self.send,
            "heaviest": self.heaviest,
        }
        self.choices = {
            "schedule": self.schedule,
            "checkpoint": self.checkpoint,
            "layers": self.layers,
            "cut": self.cut,
        }
        self.about = widgets.HTML()
        self.reasons = widgets.HTML()

    def _make_buttons(self) -> None:
        self.run = button("Run", "play", "measure with real workers", style="primary")
        self.stop = button("Stop", "stop", "end the run within two seconds")
        self.stop.disabled = True
        self.progress = widgets.FloatProgress(
            value=0, min=0, max=1, layout=widgets.Layout(width="9em", visibility="hidden")
        )

    def _make_closer(self) -> None:
        self.path = widgets.Checkbox(
            value=True,
            description="critical path",
            tooltip="box the chain of operations and messages that makes the step as long as it is",
            indent=False,
        )
        self.time = Number(
            "time (ms)", "the moment that is marked and told in words", 0.0, 0.0, 1.0, step=0.5
        )
        self.words = widgets.HTML()
        self.apart = widgets.HTML()

    def _make_race(self, schedules: Sequence[str], race: Sequence[str]) -> None:
        lanes = [*race, *[NOBODY] * MOST][:MOST]
        self.lanes = [
            choice(f"lane {number}", "a schedule that takes part", [NOBODY, *schedules], name)
            for number, name in enumerate(lanes, 1)
        ]
        self.run_race = button("Run the race", "flag-checkered", "measure every lane with real workers")
        self.race = widgets.HTML()
        self.measured_race = widgets.HTML()

    def _folded(self) -> dict[str, tuple[str, list[Any], list[Any]]]:
        """What each section explains, its controls, and what it shows beneath or between the charts."""
        return {
            COSTS: (
                "What operations and messages cost. On Run, every operation is held as long as it says here.",
                [
                    widgets.HBox([*self.ratio.parts, *self.send.parts], layout=ROW),
                    widgets.HBox([self.layers, *self.heaviest.parts], layout=ROW),
                    widgets.HBox([self.cut, explained(self.cut)], layout=ROW),
                    self.reasons,
                ],
                [],
            ),
            MEMORY: (
                "What the ranks hold, beneath the chart on the same time axis. The simulated bytes "
                "leave room for the messages under way. A limit is drawn, and kept on Run: a rank that "
                "passes it fails.",
                [
                    widgets.HBox([self.checkpoint, explained(self.checkpoint)], layout=ROW),
                    widgets.HBox([self.limited, *self.limit.parts], layout=ROW),
                ],
                [],
            ),
            CLOSER: (
                "Move the time to mark a moment in every chart and read beneath what every rank does then. "
                "At the end the bubble is taken apart, by laying the schedule out again without one cause "
                "after another.",
                [widgets.HBox([*self.time.parts, self.path], layout=ROW)],
                [self.words, self.apart],
            ),
            RACE: (
                "Up to four schedules of the same model on one time axis, under the limit set in Memory.",
                [
                    widgets.HBox(self.lanes[:2], layout=ROW),
                    widgets.HBox(self.lanes[2:], layout=ROW),
                    self.run_race,
                ],
                [self.race, self.measured_race],
            ),
            SAVE: (
                "Pictures as PNG and SVG, the numbers as CSV, and traces for ui.perfetto.dev.",
                [self.save, self.files],
                [],
            ),
        }

    @property
    def settings(self) -> Settings:
        return Settings(
            forward_ms=self._start.forward_ms,
            own=self._start.own,
            memory_limit=self.limit.slider.value * KIB if self.limited.value else None,
            **{name: number.slider.value for name, number in self.numbers.items()},
            **{name: dropdown.value for name, dropdown in self.choices.items()},
        )

    def is_open(self, name: str) -> bool:
        return name in self.sections and self.sections[name].is_open

    @property
    def marks(self) -> Marks:
        """What is drawn into the charts: nothing unless somebody looks closer."""
        return Marks(path=self.is_open(CLOSER) and self.path.value)

    @property
    def moment(self) -> float | None:
        """The moment that is marked, in ms."""
        return self.time.slider.value if self.is_open(CLOSER) else None

    @property
    def racers(self) -> list[str]:
        return list(dict.fromkeys(lane.value for lane in self.lanes if lane.value != NOBODY))

    def write(self, name: str, value: Any) -> None:
        """Set the control of one setting."""
        if name == "memory_limit":
            self.limited.value = value is not None
            if value is not None:
                self.limit.slider.value = round(value / KIB)
        elif name in self.numbers:
            self.numbers[name].slider.value = value
        else:
            self.choices[name].value = value

    @property
    def setting_names(self) -> list[str]:
        return [*self.numbers, *self.choices, "memory_limit"]

    def on_change(self, changed: Callable[[Any], None]) -> None:
        """Call when anything moves that changes a picture."""
        numbers = [*self.numbers.values(), self.limit]
        singles = [*self.choices.values(), *self.lanes, self.limited, self.path]
        for control in [*(number.slider for number in numbers), *singles]:
            control.observe(changed, names="value")
        for section in self.sections.values():
            section.on_toggle(changed)

    def switch(self, settings: Settings) -> None:
        """Disable the controls that mean nothing beside the others, and say why."""
        self.about.value = hint(_about(settings))
        off = switched_off(settings)
        for name, number in self.numbers.items():
            number.slider.disabled = number.box.disabled = name in off
        for name, dropdown in self.choices.items():
            dropdown.disabled = name in off
        self.limit.slider.disabled = self.limit.box.disabled = not self.limited.value
        names = {"ratio": self.ratio.name, "heaviest": self.heaviest.name}
        told = [f"{names.get(name, name)} is off: {reason}." for name, reason in off.items()]
        self.reasons.value = f"<small>{html.escape(' '.join(told))}</small>"

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Show one message where a screen reader announces it; an alarm stands out."""
        self.status.value = message(text, alarm=alarm)

    def note(self, text: str) -> None:
        """What stands above the measured picture, as conspicuous as an alarm; "" takes it away."""
        self.measured_note.value = message(text, alarm=True, role="note") if text else ""

    def working(self, working: bool) -> None:
        """Whether a run is in progress."""
        self.stop.disabled = not working
        self.progress.layout.visibility = "visible" if working else "hidden"


def _about(settings: Settings) -> str:
    """What the schedule is, in the first line of its description."""
    own = settings.own.get(settings.schedule)
    described = SCHEDULES[settings.schedule] if own is None else own
    text = "" if isinstance(described, Schedule) else (described.__doc__ or "")
    return text.strip().partition("\n")[0] or "a schedule of your own"


def _sections_of(start: Settings) -> set[str]:
    """The sections that hold a setting which is out of the ordinary from the start."""
    plain = Settings()
    costs = ("send_ms", "layers", "heaviest", "cut")
    memory = ("checkpoint", "memory_limit")
    return {
        name
        for name, fields in ((COSTS, costs), (MEMORY, memory))
        if any(getattr(start, field) != getattr(plain, field) for field in fields)
    }
