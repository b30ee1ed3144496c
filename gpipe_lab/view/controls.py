"""Controls that panels are made of: a slider with its number box, sections that fold, a marked chart."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets as widgets

from ..plan.errors import require
from .picture import Picture, img
from .style import INK, PAPER

ROW = widgets.Layout(align_items="center", flex_flow="row wrap")
SLIDER_EM, BOX_EM, CHOICE_EM = 15, 4.5, 15
STYLE = f"""<style>
.gl-chart {{ position: relative; width: fit-content; max-width: 100%; }}
.gl-faded {{ opacity: 0.35; }}
.gl-chart > * {{ margin: 0 !important; }}
.gl-chart img {{ display: block; }}
.gl-line {{ position: absolute !important; inset: 0; pointer-events: none; }}
.gl-moment {{ position: absolute; width: 2px; margin-left: -1px; background: {INK};
  box-shadow: 0 0 0 1px {PAPER}; }}
.gl-panel :focus-visible, .gl-panel .noUi-handle:focus {{ outline: 3px solid #0072B2; outline-offset: 1px; }}
@media (max-width: 600px) {{ .gl-chart {{ overflow-x: auto; }} .gl-chart img {{ min-width: 640px; }} }}
</style>"""


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
            style={"description_width": "initial"},
            layout=widgets.Layout(width=f"{SLIDER_EM + 0.55 * len(name)}em"),
        )
        self.box = box(  # its label takes no room: it names the box to those who cannot see the slider
            value=value,
            step=step,
            description=f"{name}, as a number",
            tooltip=tip,
            style={"description_width": "0px"},
            layout=widgets.Layout(width=f"{BOX_EM}em"),
        )
        self.note = widgets.HTML()
        self._follows = False
        self.slider.observe(self._moved, names="value")
        self.box.observe(self._typed, names="value")

    @property
    def parts(self) -> list[Any]:
        return [self.slider, self.box, self.note]

    @property
    def value(self) -> Any:
        return self.slider.value

    def set(self, value: float, *, where: str) -> None:
        """Move it from code. Raises `InputError` for a value that the slider cannot take."""
        slider = self.slider
        kinds = (int,) if isinstance(slider, widgets.IntSlider) else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        require(
            is_number and slider.min <= value <= slider.max,
            f"{self.name} is a number from {slider.min:g} to {slider.max:g}",
            got=repr(value),
            where=where,
        )
        slider.value = value

    def reach(self, most: float) -> None:
        """Move the slider's upper end."""
        self.slider.max = most

    def enable(self, enabled: bool) -> None:
        self.slider.disabled = self.box.disabled = not enabled

    def forget(self) -> None:
        """The note was about an earlier entry."""
        self.note.value = ""

    def _moved(self, change: Any) -> None:
        self._follows = True  # the box must not move a slider back that somebody still moves
        self.box.value = round(change.new, 3)  # steps of a half do not add up exactly
        self._follows = False
        self.forget()

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


class Folds:
    """Sections of which one is unfolded at a time: buttons in a row, controls beneath, places further down.

    `sections` maps a name to (what it explains, its controls, the places it shows elsewhere); `beside` stands
    in the row of buttons.
    """

    def __init__(
        self,
        sections: Mapping[str, tuple[str, Sequence[Any], Sequence[Any]]],
        *,
        opened: str | None,
        toggled: Callable[[], None],
        beside: Sequence[Any] = (),
    ) -> None:
        self._toggled = toggled
        self._beside = beside
        self._changing = False
        self.buttons: dict[str, Any] = {}
        self._places: dict[str, list[Any]] = {}
        for name, (tip, rows, shown) in sections.items():
            self.buttons[name] = widgets.ToggleButton(
                value=name == opened, description=name, tooltip=tip, layout=widgets.Layout(width="auto")
            )
            border = widgets.Layout(border_left="3px solid #9aa0a6", padding="2px 0 6px 10px", margin="4px 0")
            body = widgets.VBox([widgets.HTML(hint(tip)), *rows], layout=border)
            self._places[name] = [body, *shown]
            self.buttons[name].observe(partial(self._toggle, name), names="value")
        self._show()

    @property
    def parts(self) -> list[Any]:
        if not self.buttons:
            return []
        bodies = [places[0] for places in self._places.values()]
        return [widgets.HBox([*self.buttons.values(), *self._beside], layout=ROW), *bodies]

    def is_open(self, name: str) -> bool:
        return name in self.buttons and bool(self.buttons[name].value)

    def _toggle(self, name: str, change: Any) -> None:
        if self._changing:
            return
        is_open = change.new
        self._changing = True
        for other, button_ in self.buttons.items():
            if is_open and other != name:
                button_.value = False
        self._changing = False
        self._show()
        self._toggled()

    def _show(self) -> None:
        for name, button_ in self.buttons.items():
            button_.icon = "caret-down" if button_.value else "caret-right"
            for place in self._places[name]:
                place.layout.display = "" if button_.value else "none"


class Chart:
    """A place for a picture, and a line over it that marks a moment: moving it sends a hundred bytes."""

    def __init__(self) -> None:
        self.image, self.line = widgets.HTML(), widgets.HTML()
        self.line.add_class("gl-line")
        self.box = widgets.VBox([self.image, self.line])
        self.box.add_class("gl-chart")
        self._place: tuple[float, float, float, float, float] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.image.value

    def put(self, picture: Picture, *, until: float, quick: bool) -> None:
        """Show a picture whose time axis ends at `until`."""
        first, last = picture.axes[0].get_position(), picture.axes[-1].get_position()
        self._place = (first.x0, first.x1, 1 - first.y1, 1 - last.y0, until)
        self.image.value = img(picture, quick=quick)

    def mark(self, time_ms: float | None) -> None:
        """Draw the line at a moment, or take it away."""
        if time_ms is None or self._place is None:
            self.line.value = ""
            return
        left, right, top, bottom, until = self._place
        x = left + (right - left) * min(1.0, time_ms / until)
        place = f"left:{100 * x:.2f}%;top:{100 * top:.2f}%;height:{100 * (bottom - top):.2f}%"
        self.line.value = f'<div class="gl-moment" style="{place}"></div>'

    def fade(self, faded: bool) -> None:
        """Pale while it does not show what the controls say."""
        (self.box.add_class if faded else self.box.remove_class)("gl-faded")


def hint(text: str, *, role: str = "") -> str:
    """A line of small print."""
    announced = f' role="{role}"' if role else ""
    return (
        f'<div{announced} style="font-size:0.9em;line-height:1.4;white-space:normal;padding:4px 0">'
        f"{_marked_up(text)}</div>"
    )


def message(text: str, *, alarm: bool = False, role: str = "") -> str:
    """Words that a screen reader announces; an alarm stands out."""
    role = role or ("alert" if alarm else "status")
    mark = "border-left:4px solid #D55E00;padding:2px 8px;background:#fff4ec;color:#1a1a1a;" if alarm else ""
    body = _marked_up(text).replace("\n", "<br>")
    return f'<div role="{role}" style="line-height:1.45;white-space:normal;{mark}">{body}</div>'


def _marked_up(text: str) -> str:
    """Text as HTML, what stands in backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def button(name: str, icon: str, tip: str, *, style: str = "") -> Any:
    layout = widgets.Layout(width="auto")
    return widgets.Button(description=name, icon=icon, tooltip=tip, button_style=style, layout=layout)


def choice(name: str, tip: str, options: Sequence[str], value: str) -> Any:
    """A dropdown that also offers a value it is given."""
    return widgets.Dropdown(
        options=list(dict.fromkeys([*options, value])),
        value=value,
        description=name,
        tooltip=tip,
        style={"description_width": "initial"},
        layout=widgets.Layout(width=f"{CHOICE_EM + 0.5 * len(name)}em"),
    )


def explained(control: Any) -> Any:
    """A control's tooltip as text beside it: JupyterLab does not show that of a dropdown."""
    return widgets.HTML(hint(control.tooltip))
