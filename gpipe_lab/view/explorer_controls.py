"""The explorer's controls: widgets that stand for settings. No behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from ..plan.errors import require
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from .controls import ROW, Number, button, choice, explained, hint
from .race import MOST
from .scene import Wording
from .settings import CHECKPOINTS, CUTS, LAYERS, Settings, switched_off

COSTS, MEMORY, CLOSER, RACE, SAVE = "Costs", "Memory", "Look closer", "Race", "Save"
SECTIONS = (COSTS, MEMORY, CLOSER, RACE, SAVE)
NOBODY = "—"
KIB = 1024
LEAST_KIB, MOST_KIB, PLAIN_KIB = 64, 4096, 512


class ExplorerControls:
    """What a person moves; `settings` reads them, `write` sets them from code."""

    def __init__(
        self,
        start: Settings,
        wording: Wording,
        *,
        schedules: Sequence[str],
        max_stages: int,
        max_microbatches: int,
        race: Sequence[str],
    ) -> None:
        self._start = start
        self.schedules = list(schedules)
        self.stages = Number(wording.stages, wording.help_stages, start.num_stages, 1, max_stages)
        self.microbatches = Number(
            wording.microbatches, wording.help_microbatches, start.num_microbatches, 1, max_microbatches
        )
        self.schedule = choice(
            "schedule", "in which order each rank runs its forwards and backwards", schedules, start.schedule
        )
        self.about = widgets.HTML()
        self.run = button("Run", "play", "measure with real workers", style="primary")
        self.stop = button("Stop", "stop", "end the run; while a cell runs, once that has ended")
        self.stop.disabled = True
        self.progress = widgets.FloatProgress(
            value=0, min=0, max=1, layout=widgets.Layout(width="6em", visibility="hidden")
        )
        self._make_costs(start)
        self._make_memory(start)
        self.path = widgets.Checkbox(
            value=True,
            description="critical path",
            tooltip="box the chain of operations and messages that makes the step as long as it is",
            indent=False,
        )
        self.time = Number(
            "time (ms)", "the moment that is marked and told in words", 0.0, 0.0, 1.0, step=0.5
        )
        lanes = [*race, *[NOBODY] * MOST][:MOST]
        self.lanes = [
            choice(f"lane {number}", "a schedule that takes part", [NOBODY, *schedules], name)
            for number, name in enumerate(lanes, 1)
        ]
        self.run_race = button("Run the race", "flag-checkered", "measure every lane with real workers")
        self.save = button(
            "Prepare files", "download", "make the pictures, tables and traces shown ready to save"
        )
        self.files = widgets.HTML()
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

    def _make_costs(self, start: Settings) -> None:
        self.ratio = Number(
            "backward ÷ forward", "how many times as long a backward takes as a forward",
            start.ratio, 0.5, 4.0, step=0.5,
        )  # fmt: skip
        self.send = Number(
            "message (ms)", "how long a message between two ranks travels", start.send_ms, 0.0, 20.0, step=0.5
        )
        self.layers = choice(
            "layers", "how the costs of the model's 16 layers differ", list(LAYERS), start.layers
        )
        self.heaviest = Number(
            "heaviest ÷ lightest", "how much longer the heaviest layer takes",
            start.heaviest, 1.0, 6.0, step=0.5,
        )  # fmt: skip
        self.cut = choice(
            "cut",
            "how layers go to stages: as many each, or so that the costliest stage costs least",
            CUTS,
            start.cut,
        )
        self.reasons = widgets.HTML()

    def _make_memory(self, start: Settings) -> None:
        self.checkpoint = choice(
            "checkpoint",
            "which activations are dropped after the forward and recomputed before the backward",
            CHECKPOINTS,
            start.checkpoint,
        )
        self.limited = widgets.Checkbox(
            value=start.memory_limit is not None,
            description="memory limit on every rank",
            tooltip="draw the limit, and on Run end a rank that passes it",
            indent=False,
        )
        limit = PLAIN_KIB if start.memory_limit is None else round(start.memory_limit / KIB)
        self.limit = Number(
            "limit (KiB)", "bytes that each rank may hold, in KiB", limit, LEAST_KIB, MOST_KIB, step=16
        )

    @property
    def first_row(self) -> list[Any]:
        """What stands above the chart at all times."""
        chosen = [self.schedule] if len(self.schedules) > 1 else []
        return [*self.stages.parts, *self.microbatches.parts, *chosen, self.run, self.stop, self.progress]

    def sections(self, closer: Sequence[Any], race: Sequence[Any]) -> dict[str, tuple[str, list, list]]:
        """What each section explains, its controls, and where else it shows something."""

        def row(*parts: Any) -> Any:
            return widgets.HBox(list(parts), layout=ROW)

        return {
            COSTS: (
                "What operations and messages cost. On Run, every operation is held as long as it says here.",
                [
                    row(*self.ratio.parts, *self.send.parts),
                    row(self.layers, *self.heaviest.parts, self.cut, explained(self.cut)),
                    self.reasons,
                ],
                [],
            ),
            MEMORY: (
                "What the ranks hold, beneath the chart on the same time axis. The simulated bytes "
                "leave room for the messages under way. A limit is drawn, and kept on Run: a rank that "
                "passes it fails.",
                [
                    row(self.checkpoint, explained(self.checkpoint)),
                    row(self.limited, *self.limit.parts),
                ],
                [],
            ),
            CLOSER: (
                "Move the time to mark a moment in every chart and read beneath what every rank does then. "
                "At the end the bubble is taken apart, by laying the schedule out again without one cause "
                "after another.",
                [row(*self.time.parts, self.path)],
                list(closer),
            ),
            RACE: (
                "Up to four schedules of the same model on one time axis, under the limit set in Memory.",
                [row(*self.lanes), self.run_race],
                list(race),
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
            memory_limit=self.limit.value * KIB if self.limited.value else None,
            **{name: number.value for name, number in self.numbers.items()},
            **{name: dropdown.value for name, dropdown in self.choices.items()},
        )

    @property
    def setting_names(self) -> list[str]:
        return [*self.numbers, *self.choices, "memory_limit"]

    @property
    def racers(self) -> list[str]:
        return list(dict.fromkeys(lane.value for lane in self.lanes if lane.value != NOBODY))

    def write(self, name: str, value: Any) -> None:
        """Set the control of one setting. Raises `InputError` for a value that it does not have."""
        where = f"Explorer.set({name}=...)"
        if name == "memory_limit":
            kib = None if value is None else self._whole_kib(value, where)
            if kib is not None:
                self.limit.set(kib, where=where)
            self.limited.value = value is not None
        elif name in self.numbers:
            self.numbers[name].set(value, where=where)
        else:
            options = self.choices[name].options
            require(value in options, f"{name} is one of {', '.join(options)}", got=repr(value), where=where)
            self.choices[name].value = value

    def _whole_kib(self, value: Any, where: str) -> int:
        low, high = (int(end) for end in (self.limit.slider.min, self.limit.slider.max))
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value % KIB == 0
        require(
            is_whole and low <= value // KIB <= high,
            f"memory_limit is in bytes, a whole number of KiB from {low} to {high}",
            got=f"{value!r}",
            where=where,
            remedy=f"memory_limit={PLAIN_KIB} * 1024",
        )
        return value // KIB

    def on_change(self, changed: Callable[[Any], None]) -> None:
        """Call when anything moves that changes a picture."""
        numbers = [*self.numbers.values(), self.limit]
        singles = [*self.choices.values(), *self.lanes, self.limited, self.path]
        for control in [*(number.slider for number in numbers), *singles]:
            control.observe(changed, names="value")

    def forget_notes(self, but: Any) -> None:
        """Notes about numbers out of reach go once something else is moved."""
        for number in (*self.numbers.values(), self.limit):
            if number.slider is not but and number.box is not but:
                number.forget()

    def switch(self, settings: Settings) -> None:
        """Disable the controls that mean nothing beside the others, and say why."""
        self.about.value = hint(_about(settings))
        off = switched_off(settings)
        for name, number in self.numbers.items():
            number.enable(name not in off)
        for name, dropdown in self.choices.items():
            dropdown.disabled = name in off
        self.limit.enable(self.limited.value)
        names = {"ratio": self.ratio.name, "heaviest": self.heaviest.name}
        told = " ".join(f"{names.get(name, name)} is off: {reason}." for name, reason in off.items())
        self.reasons.value = hint(told) if told else ""


def section_of(start: Settings) -> str | None:
    """The section that holds a setting which is out of the ordinary from the start."""
    plain = Settings()
    held = {MEMORY: ("checkpoint", "memory_limit"), COSTS: ("send_ms", "layers", "heaviest", "cut")}
    for name, fields in held.items():
        if any(getattr(start, field) != getattr(plain, field) for field in fields):
            return name
    return None


def _about(settings: Settings) -> str:
    """What the schedule is, in the first line of its description."""
    own = settings.own.get(settings.schedule)
    described = SCHEDULES[settings.schedule] if own is None else own
    text = "" if isinstance(described, Schedule) else (described.__doc__ or "")
    return text.strip().partition("\n")[0] or "a schedule of your own"
