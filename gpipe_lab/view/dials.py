"""A panel of whole-number dials: a picture at once while you turn them, a real run when you press Run.

The explorer knows schedules; this knows nothing but what it is given, so a chapter can put its own quantities
on dials, such as the size of a micro-batch or the place of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from ..plan.errors import InputError, require
from ..plan.units import parse_bytes
from .background import Attempt, from_the_browser
from .controls import ROW, button, message
from .gantt import plot_trace
from .picture import Picture, img, show
from .runner import Measured, shared_lab
from .runs import Phase, Runs, Tell, was_stopped

Values = dict[str, int]


class Dials:
    """Sliders named as in `dials`, each (least, start, most).

    draw(**values) gives the picture to show at once, and raises `InputError` for values that are not allowed.
    measure(lab, **values) gives a run, made in the background by `ranks(**values)` workers of the lab that
    all panels share, and shown as a chart with its memory. A newer Run replaces one that is going; Stop ends
    it within two seconds.
    """

    def __init__(
        self,
        dials: Mapping[str, tuple[int, int, int]],
        draw: Callable[..., Picture],
        measure: Callable[..., Measured],
        *,
        ranks: Callable[..., int],
        help: Mapping[str, str] | None = None,
        device: str = "auto",
        memory_limit: str | int | None = None,
    ) -> None:
        wrong = [name for name, (least, start, most) in dials.items() if not least <= start <= most]
        require(
            bool(dials) and not wrong,
            "a dial has (least, start, most), in this order",
            got=f"{ {name: dials[name] for name in wrong} or 'no dials' }",
            where="Dials",
            remedy='Dials({"M": (1, 8, 32)}, ...)',
        )
        self.draw, self.measure, self.ranks = draw, measure, ranks
        self.device, self.limit_bytes = device, parse_bytes(memory_limit)
        self.result: Measured | None = None
        self.error: BaseException | None = None
        self._runs = Runs(
            lambda: shared_lab.stop(self),
            show_phase=lambda phase, share: self._say(phase.text),
            show_end=self._show_end,
        )
        self._measured: Values = {}
        self.sliders = {}
        boxes = []
        for name, (least, start, most) in dials.items():
            self.sliders[name], box = _dial(name, (help or {}).get(name, name), least, start, most)
            self.sliders[name].observe(lambda _: self.redraw(), names="value")
            boxes += [self.sliders[name], box]
        self.run_button = button("Run", "play", "measure with real workers", style="primary")
        self.stop_button = button("Stop", "stop", "end the run within two seconds")
        self.stop_button.disabled = True
        self.run_button.on_click(lambda _: self._run_clicked())
        self.stop_button.on_click(lambda _: self.stop())
        self.status, self.at_once, self.measured = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.box = widgets.VBox(
            [
                widgets.HBox(boxes, layout=ROW),
                widgets.HBox([self.run_button, self.stop_button], layout=ROW),
                self.status,
                self.at_once,
                self.measured,
            ]
        )
        self.redraw()

    @property
    def values(self) -> Values:
        """What the dials say now."""
        return {name: slider.value for name, slider in self.sliders.items()}

    def set(self, **values: int) -> None:
        """Turn dials from code."""
        for name, value in values.items():
            self.sliders[name].value = value

    def redraw(self) -> None:
        """Draw the present values; if they are not allowed, say why and disable Run."""
        try:
            self.at_once.value = img(self.draw(**self.values), quick=True)
        except InputError as refusal:
            self.run_button.disabled = True
            self._say(f"Run is off: {refusal.rule} (got {refusal.got}).", alarm=True)
            return
        self.run_button.disabled = False
        if self._runs.in_progress:
            self._runs.say_phase()
            return
        stale = f" Below: measured with {_words(self._measured)}." if self._measured else ""
        self._say(f"{_words(self.values)}. Press Run to measure it.{stale}")

    def run(self, *, wait: bool = False) -> Measured | None:
        """Measure the present values; `wait=True` returns the run, or raises what went wrong."""
        values = self.values
        self.draw(**values)  # raises what is not allowed
        measuring = Phase(text=f"Measuring {_words(values)} …", done=0.0, until=1.0, seconds=1.0)
        self.stop_button.disabled = False
        self._runs.start(lambda tell: (values, self._measure(values, tell, measuring)), measuring)
        return self.wait() if wait else None

    def wait(self, timeout_s: float | None = None) -> Measured | None:
        """Wait in this cell for the run, show it, and raise its error if it has one."""
        try:
            self._runs.wait(timeout_s)
        except Exception as error:
            if self.error is error:
                self.error = None  # it is raised here, so `close` need not
            raise
        return self.result

    def stop(self) -> None:
        """End the run in progress."""
        self._runs.stop()

    def close(self) -> None:
        """Stop what runs, end the workers, and raise the error of a run that nobody waited for."""
        self._runs.close()
        shared_lab.close()
        self.box.close()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def static(self, *choices: Mapping[str, int], measure: bool = True) -> None:
        """The same without widgets: for each choice what the panel shows at once, and what Run would show."""
        try:
            for choice in choices or ({},):
                values = self.values | dict(choice)
                show(self.draw(**values))
                if measure:
                    with shared_lab.held(
                        self, self.ranks(**values), self.device, self.limit_bytes, lambda _: None
                    ) as lab:
                        show(_chart(self.measure(lab, **values)))
        finally:
            if measure and self._runs.latest is None:
                shared_lab.close()

    def _measure(self, values: Values, tell: Tell, measuring: Phase) -> Measured:
        """In the thread; `tell` raises once the run is not wanted any more."""

        def progress(_: str) -> None:
            tell(measuring)

        with shared_lab.held(self, self.ranks(**values), self.device, self.limit_bytes, progress) as lab:
            tell(measuring)
            return self.measure(lab, **values)

    def _show_end(self, attempt: Attempt) -> None:
        self.stop_button.disabled = True
        if was_stopped(attempt):
            self._say("Stopped. Nothing was measured.")
        elif attempt.error is not None:
            self._fail(attempt.error)
        else:
            self._measured, self.result = attempt.result
            assert self.result is not None
            self.error = None
            self.measured.value = img(_chart(self.result))
            self.redraw()

    def _run_clicked(self) -> None:
        """A click by a person runs in the background; a click from code must fail in its cell."""
        try:
            self.run(wait=not from_the_browser())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._say(f"{type(error).__name__}: {error}", alarm=True)

    def _say(self, text: str, *, alarm: bool = False) -> None:
        self.status.value = message(text, alarm=alarm)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {**self.box._repr_mimebundle_(**options), "text/plain": f"A live panel: {_words(self.values)}"}


def _dial(name: str, tip: str, least: int, start: int, most: int) -> tuple[Any, Any]:
    """A slider and a number box that are one value."""
    slider = widgets.IntSlider(
        value=start,
        min=least,
        max=most,
        readout=False,
        continuous_update=False,
        description=name.replace("_", " "),
        tooltip=tip,
        style={"description_width": "initial"},
        layout=widgets.Layout(width="20em"),
    )
    box = widgets.BoundedIntText(
        value=start, min=least, max=most, tooltip=f"{tip}, as a number", layout=widgets.Layout(width="5em")
    )
    widgets.link((slider, "value"), (box, "value"))
    return slider, box


def _chart(run: Measured) -> Picture:
    return plot_trace(run.trace, run.memory)


def _words(values: Values) -> str:
    return ", ".join(f"{name.replace('_', ' ')} = {value}" for name, value in values.items())
