"""The widgets of the explorer: sliders with number boxes, choices, buttons, status. No behaviour."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from .picture import Picture, img
from .settings import CHECKPOINTS, Settings, Wording

_STYLE = {"description_width": "10.5em"}
_ROW = widgets.Layout(align_items="center", flex_flow="row wrap")


class Panel:
    """Controls and places for the pictures; `settings` reads them, `write` sets them."""

    def __init__(
        self,
        start: Settings,
        wording: Wording,
        *,
        schedules: Sequence[str],
        max_stages: int,
        max_microbatches: int,
        ratios: tuple[float, float] = (0.5, 4.0),
    ) -> None:
        self.stages, stages = _slider(wording.stages, wording.help_stages, start.num_stages, max_stages)
        self.microbatches, microbatches = _slider(
            wording.microbatches, wording.help_microbatches, start.num_microbatches, max_microbatches
        )
        self.schedule = widgets.Dropdown(
            options=list(schedules),
            value=start.schedule,
            description="schedule",
            tooltip="in which order each rank runs its forwards and backwards",
            style=_STYLE,
        )
        self.checkpoint = widgets.Dropdown(
            options=list(dict.fromkeys([*CHECKPOINTS, start.checkpoint])),
            value=start.checkpoint,
            description="checkpoint",
            tooltip="which activations are dropped after the forward and recomputed before the backward",
            style=_STYLE,
        )
        self.ratio = widgets.FloatSlider(
            value=start.ratio,
            min=min(ratios[0], start.ratio),
            max=max(ratios[1], start.ratio),
            step=0.5,
            readout=False,
            description="backward ÷ forward",
            tooltip="how many times as long a backward takes as a forward",
            style=_STYLE,
            layout=widgets.Layout(width="24em"),
        )
        ratio_box = widgets.BoundedFloatText(
            value=start.ratio,
            min=self.ratio.min,
            max=self.ratio.max,
            step=0.5,
            tooltip="backward ÷ forward, as a number",
            layout=widgets.Layout(width="5em"),
        )
        widgets.link((self.ratio, "value"), (ratio_box, "value"))
        self.run = widgets.Button(
            description="Run", icon="play", button_style="primary", tooltip="measure with real workers"
        )
        self.stop = widgets.Button(
            description="Stop", icon="stop", disabled=True, tooltip="end the run within two seconds"
        )
        self.progress = widgets.IntProgress(
            value=0, min=0, max=3, layout=widgets.Layout(width="9em", visibility="hidden")
        )
        self.status = widgets.HTML()
        self.simulated = widgets.HTML()
        self.measured_note = widgets.HTML()
        self.measured = widgets.HTML()
        self._start = start
        rows: list[Any] = [
            widgets.HBox([*stages, *microbatches], layout=_ROW),
            widgets.HBox([self.run, self.stop, self.progress], layout=_ROW),
        ]
        if len(schedules) > 1:
            choices = [self.schedule, self.checkpoint, self.ratio, ratio_box]
            rows.insert(1, widgets.HBox(choices, layout=_ROW))
        pictures = [self.simulated, self.measured_note, self.measured]
        self.box = widgets.VBox([*rows, self.status, *pictures])

    @property
    def settings(self) -> Settings:
        return Settings(
            num_stages=self.stages.value,
            num_microbatches=self.microbatches.value,
            schedule=self.schedule.value,
            checkpoint=self.checkpoint.value,
            ratio=self.ratio.value,
            forward_ms=self._start.forward_ms,
        )

    def controls(self) -> dict[str, Any]:
        """The widget of every setting, by the setting's name."""
        return {
            "num_stages": self.stages,
            "num_microbatches": self.microbatches,
            "schedule": self.schedule,
            "checkpoint": self.checkpoint,
            "ratio": self.ratio,
        }

    def on_change(self, changed: Callable[[Any], None]) -> None:
        for control in self.controls().values():
            control.observe(changed, names="value")

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Show one message where a screen reader announces it; an alarm stands out."""
        role = "alert" if alarm else "status"
        self.status.value = f'<div role="{role}" style="{_look(alarm)}">{_body(text)}</div>'

    def note(self, text: str) -> None:
        """What stands above the measured picture, as conspicuous as an alarm; "" takes it away."""
        self.measured_note.value = f'<div style="{_look(True)}">{_body(text)}</div>' if text else ""


def _look(alarm: bool) -> str:
    mark = "border-left:4px solid #D55E00;padding:2px 8px;background:#fff4ec;color:#1a1a1a;" if alarm else ""
    return f"line-height:1.45;white-space:normal;{mark}"


def _body(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def image(picture: Picture, *, quick: bool = False) -> str:
    """The picture as HTML with its alt text. `quick` trades a larger file for time."""
    return img(picture, picture.png(quick=quick))


def _slider(name: str, tip: str, value: int, most: int) -> tuple[Any, list[Any]]:
    slider = widgets.IntSlider(
        value=value,
        min=1,
        max=max(most, value),
        readout=False,
        description=name,
        tooltip=tip,
        style=_STYLE,
        layout=widgets.Layout(width="24em"),
    )
    box = widgets.BoundedIntText(
        value=value, min=1, max=slider.max, tooltip=f"{tip}, as a number", layout=widgets.Layout(width="5em")
    )
    widgets.link((slider, "value"), (box, "value"))
    return slider, [slider, box]
