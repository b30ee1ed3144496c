"""Controls that the explorer is made of: a slider with its number box, and a section that folds."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

LABEL = {"description_width": "10.5em"}
ROW = widgets.Layout(align_items="center", flex_flow="row wrap")


class Number:
    """A slider with a number box beside it. A number beyond the slider's ends is moved there, and said so."""

    def __init__(
        self, name: str, tip: str, value: float, least: float, most: float, *, step: float = 1
    ) -> None:
        whole = isinstance(step, int)
        slider, box = (
            (widgets.IntSlider, widgets.IntText) if whole else (widgets.FloatSlider, widgets.FloatText)
        )
        self.name = name
        self.slider = slider(
            value=value,
            min=min(least, value),
            max=max(most, value),
            step=step,
            readout=False,
            description=name,
            tooltip=tip,
            style=LABEL,
            layout=widgets.Layout(width="24em"),
        )
        self.box = box(  # its label takes no room: it names the box to those who cannot see the slider
            value=value,
            step=step,
            description=f"{name}, as a number",
            tooltip=tip,
            style={"description_width": "0px"},
            layout=widgets.Layout(width="5.5em"),
        )
        self.note = widgets.HTML()
        self._follows = False
        self.slider.observe(self._moved, names="value")
        self.box.observe(self._typed, names="value")

    @property
    def parts(self) -> list[Any]:
        return [self.slider, self.box, self.note]

    def reach(self, most: float) -> None:
        """Move the slider's upper end."""
        self.slider.max = most

    def _moved(self, change: Any) -> None:
        self._follows = True  # the box must not move a slider back that somebody still moves
        self.box.value = round(change.new, 3)  # steps of a half do not add up exactly
        self._follows = False
        self.note.value = ""

    def _typed(self, change: Any) -> None:
        if self._follows:
            return
        asked = change.new
        given = min(max(asked, self.slider.min), self.slider.max)
        self.slider.value = given
        if given != asked:
            self.box.value = given
            end = "most" if given < asked else "least"
            self.note.value = hint(f"{given:g} is the {end} here; {asked:g} was asked for", role="status")


def hint(text: str, *, role: str = "") -> str:
    """A line of small print."""
    announced = f' role="{role}"' if role else ""
    return (
        f'<div{announced} style="font-size:0.9em;line-height:1.4;white-space:normal;padding:4px 0">'
        f"{html.escape(text)}</div>"
    )


def message(text: str, *, alarm: bool = False, role: str = "") -> str:
    """Words that a screen reader announces; an alarm stands out."""
    role = role or ("alert" if alarm else "status")
    mark = "border-left:4px solid #D55E00;padding:2px 8px;background:#fff4ec;color:#1a1a1a;" if alarm else ""
    body = html.escape(text).replace("\n", "<br>")
    return f'<div role="{role}" style="line-height:1.45;white-space:normal;{mark}">{body}</div>'


def button(name: str, icon: str, tip: str, *, style: str = "") -> Any:
    layout = widgets.Layout(width="auto", align_self="flex-start")
    return widgets.Button(description=name, icon=icon, tooltip=tip, button_style=style, layout=layout)


def choice(name: str, tip: str, options: Sequence[str], value: str) -> Any:
    """A dropdown that also offers a value it is given."""
    return widgets.Dropdown(
        options=list(dict.fromkeys([*options, value])),
        value=value,
        description=name,
        tooltip=tip,
        style=LABEL,
        layout=widgets.Layout(width="24em"),
    )


def explained(control: Any) -> Any:
    """A control's tooltip as text beside it: JupyterLab does not show that of a dropdown."""
    return widgets.HTML(hint(control.tooltip))


class Section:
    """A button that unfolds controls beneath it, and `shown` further down. The keyboard reaches buttons."""

    def __init__(
        self, name: str, tip: str, rows: Sequence[Any], shown: Sequence[Any] = (), *, opened: bool = False
    ) -> None:
        self.name = name
        self.button = widgets.ToggleButton(
            value=opened, description=name, tooltip=tip, layout=widgets.Layout(width="auto")
        )
        border = widgets.Layout(border_left="3px solid #9aa0a6", padding="2px 0 6px 10px", margin="4px 0")
        self.body = widgets.VBox([widgets.HTML(hint(tip)), *rows], layout=border)
        self._shown = [self.body, *shown]
        self.button.observe(lambda _: self._fold(), names="value")
        self._fold()

    @property
    def is_open(self) -> bool:
        return bool(self.button.value)

    def on_toggle(self, changed: Callable[[Any], None]) -> None:
        self.button.observe(changed, names="value")

    def _fold(self) -> None:
        self.button.icon = "caret-down" if self.is_open else "caret-right"
        for place in self._shown:
            place.layout.display = "" if self.is_open else "none"
