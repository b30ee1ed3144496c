"""A number the learner commits to before anything runs."""

from __future__ import annotations

import math
from typing import Any

from ..plan.errors import InputError, require
from . import mode
from .kept import PREDICTED, record

_committed: dict[str, float] = {}  # running the cell again keeps what was typed


class Prediction:
    """What the learner expects. `value` is the number typed, or the default where nobody typed one."""

    def __init__(self, name: str, question: str, default: float, unit: str) -> None:
        self.name = name
        self.question = question
        self.default = default
        self.unit = unit

    @property
    def value(self) -> float:
        return _committed.get(self.name, self.default)

    @value.setter
    def value(self, number: float) -> None:
        require(
            math.isfinite(number),
            "a prediction is a finite number",
            got=repr(number),
            where=f"predict({self.name!r}, ...)",
        )
        _committed[self.name] = float(number)
        if why := record(PREDICTED, self.name):
            print(why)

    @property
    def is_default(self) -> bool:
        return self.name not in _committed

    @property
    def said(self) -> str:
        """HTML for beside the box: what was committed, once something was."""
        return "" if self.is_default else f'<span role="status">you said {self._with_unit(self.value)}</span>'

    def versus(self, found: float, what: str = "measured") -> str:
        """One sentence that sets the prediction beside what was found."""
        said = "the default was" if self.is_default else "you said"
        beside = f"{said} {self._with_unit(self.value)}, {what}: {self._with_unit(found)}"
        if found == 0 or math.isclose(self.value, found, rel_tol=0.005):
            return beside
        side = "too high" if self.value > found else "too low"
        if self.value / found < 0:  # a share of a number of the other sign says nothing
            return f"{beside} ({side})"
        return f"{beside} ({abs(self.value / found - 1):.0%} {side})"

    def __repr__(self) -> str:
        source = " (default)" if self.is_default else ""
        return f"{self.question} Your prediction: {self._with_unit(self.value)}{source}"

    def _with_unit(self, number: float) -> str:
        return f"{number:.6g} {self.unit}".rstrip()


def predict(name: str, question: str, default: float, unit: str = "") -> Prediction:
    """Ask for a number before running. Returns at once; read `.value` in a later cell.

    In a live notebook a box appears; elsewhere the question is printed and the default serves.
    `name` tells predictions apart and lets a cell that runs again keep what was typed.
    """
    is_number = isinstance(default, int | float) and not isinstance(default, bool) and math.isfinite(default)
    require(
        is_number,
        "a prediction's default is a finite number",
        got=f"default={default!r}",
        where=f"predict({name!r}, ...)",
        remedy="default=0.0",
    )
    prediction = Prediction(name, question, default, unit)
    if mode.live():
        from IPython.display import display

        display(_box(prediction))
    else:
        print(prediction)
    return prediction


def _box(prediction: Prediction) -> Any:
    import ipywidgets as widgets

    number = widgets.FloatText(
        value=prediction.value,
        description="I predict",
        tooltip=prediction.question,
        layout=widgets.Layout(width="14em"),
    )
    commit = widgets.Button(
        description="Commit", tooltip="this is my prediction", layout=widgets.Layout(width="auto")
    )
    said = widgets.HTML(prediction.said)

    def committed(_: Any) -> None:
        """On a click, or on leaving the box with another number; the default counts once it is committed."""
        try:
            prediction.value = number.value
        except InputError as error:
            said.value = f'<span role="alert">{error.rule}</span>'
        else:
            said.value = prediction.said

    number.observe(committed, names="value")
    commit.on_click(committed)
    unit = widgets.Label(prediction.unit)
    return widgets.VBox([widgets.Label(prediction.question), widgets.HBox([number, unit, commit, said])])
