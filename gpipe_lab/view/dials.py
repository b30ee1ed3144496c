"""Panels of a chapter's own quantities: whole-number dials on a picture and a run, and a calculator.

The explorer knows schedules; these know nothing but what they are given, so a chapter can put its own
quantities on dials, such as the size of a micro-batch or the place of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from ..plan.errors import InputError, require
from ..plan.units import parse_bytes
from ..planner.sharing import METHODS, Transformer, share
from .controls import ROW, STYLE, Number, button
from .gantt import plot_trace
from .live import LivePanel, Phase, Tell
from .picture import Picture, img, show
from .runner import Measured, shared_lab

if TYPE_CHECKING:
    import pandas

Values = dict[str, int]
GB = 1e9


class Dials(LivePanel):
    """Sliders named as in `dials`, each (least, start, most).

    draw(**values) gives the picture to show at once, and raises `InputError` for values that are not allowed.
    measure(lab, **values) gives a run, made in the background by `ranks(**values)` workers of the lab that
    all panels share, and shown as a chart with its memory. A newer Run replaces one that is going; Stop ends
    it.
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
        super().__init__()
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
        self._measured_values: Values | None = None
        tips = help or {}
        self.numbers = {
            name: Number(name.replace("_", " "), tips.get(name, name), start, least, most)
            for name, (least, start, most) in dials.items()
        }
        for number in self.numbers.values():
            number.slider.continuous_update = False
            number.slider.observe(self._moved, names="value")
        self.run_button = button("Run", "play", "measure with real workers", style="primary")
        self.stop_button = button("Stop", "stop", "end the run; while a cell runs, once that has ended")
        self.stop_button.disabled = True
        self.run_button.on_click(lambda _: self.clicked(self.run))
        self.stop_button.on_click(lambda _: self.stop())
        self.at_once, self.measured = widgets.HTML(), widgets.HTML()
        parts = [part for number in self.numbers.values() for part in number.parts]
        self.box = widgets.VBox(
            [
                widgets.HTML(STYLE),
                widgets.HBox([*parts, self.run_button, self.stop_button], layout=ROW),
                *[self.status, self.at_once, self.measured],
            ]
        )
        self.box.add_class("gl-panel")
        self.redraw()

    @property
    def values(self) -> Values:
        """What the dials say now."""
        return {name: number.value for name, number in self.numbers.items()}

    def set(self, **values: int) -> None:
        """Turn dials from code. Raises `InputError` for an unknown dial, or a value beyond its ends."""
        unknown = sorted(values.keys() - self.numbers.keys())
        require(
            not unknown, f"dials are {', '.join(self.numbers)}", got=", ".join(unknown), where="Dials.set"
        )
        for name, value in values.items():
            self.numbers[name].set(value, where=f"Dials.set({name}=...)")

    def run(self, *, wait: bool = False) -> Measured | None:
        """Measure the present values; `wait=True` returns the run, or raises what went wrong."""
        values = self.values
        self.draw(**values)  # raises what is not allowed
        measuring = Phase(text=f"Measuring {_words(values)} …")

        def job(tell: Tell) -> tuple[Values, Measured]:
            with shared_lab.held(
                self, self.ranks(**values), self.device, self.limit_bytes, lambda _: tell(measuring)
            ) as lab:
                tell(measuring)
                return values, self.measure(lab, **values)

        self.start(job, measuring)
        return self.wait() if wait else None

    def wait(self, timeout_s: float | None = None) -> Measured | None:
        """Wait in this cell for the run, show it, and raise its error if it has one."""
        super().wait(timeout_s)
        return self.result

    def close(self) -> None:
        """Stop what runs, end the workers, and raise the error of a run that nobody waited for."""
        try:
            super().close()
        finally:
            shared_lab.close()
            self.box.close()

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
            if measure and self.latest is None:
                shared_lab.close()

    # What the base asks for.

    def _moved(self, change: Any) -> None:
        for number in self.numbers.values():
            if number.slider is not change["owner"]:
                number.forget()
        self.forget_outcome()
        self.changed()

    def draw_at_once(self) -> None:
        self.run_button.disabled = True  # until the picture is of these values
        self.at_once.add_class("gl-faded")
        try:
            drawn = img(self.draw(**self.values), quick=True)
        except InputError as refusal:
            self.say(f"Run is off: {refusal.rule} (got {refusal.got}).", alarm=True)
            return
        self.at_once.value = drawn
        self.at_once.remove_class("gl-faded")
        self.run_button.disabled = False
        self.say_what_is_so()

    def interrupt(self) -> None:
        shared_lab.stop(self)

    def show_working(self, working: bool) -> None:
        self.stop_button.disabled = not working

    def show_phase(self, phase: Phase, share: float) -> None:
        self.say(phase.text)

    def show_result(self, result: tuple[Values, Measured]) -> None:
        self._measured_values, self.result = result
        self.measured.value = img(_chart(self.result))

    def status_line(self) -> str:
        measured = self._measured_values
        if measured == self.values:
            return f"{_words(self.values)}: measured below."
        stale = "" if measured is None else f" Below: measured with {_words(measured)}."
        return f"{_words(self.values)}. Press Run to measure it.{stale}"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {**self.box._repr_mimebundle_(**options), "text/plain": f"A live panel: {_words(self.values)}"}


def _chart(run: Measured) -> Picture:
    return plot_trace(run.trace, run.memory)


def _words(values: Values) -> str:
    return ", ".join(f"{name.replace('_', ' ')} = {value}" for name, value in values.items())


def share_table(
    model: Transformer,
    num_ranks: int,
    *,
    rows: int = 1,
    fused_attention: bool = True,
    card_gb: float = 80.0,
    methods: Sequence[str] = METHODS,
) -> pandas.DataFrame:
    """GB that one rank holds and sends in a step by each method, estimated, and whether a card holds them."""
    import pandas

    shares = [share(model, name, num_ranks, rows=rows, fused_attention=fused_attention) for name in methods]
    table = pandas.DataFrame(shares).set_index("method") / GB
    table.insert(4, "held", [s.held / GB for s in shares])
    table.columns = pandas.Index([f"{name} (GB)" for name in table.columns])
    table[f"fits {card_gb:g} GB"] = ["yes" if s.held <= card_gb * GB else "no" for s in shares]
    return table.round(1)


class Calculator(LivePanel):
    """Controls over `share_table`: the model, ranks, rows and attention; the table follows at once."""

    def __init__(
        self, models: Mapping[str, Transformer], model: str, *, num_ranks: int = 8, card_gb: float = 80.0
    ) -> None:
        super().__init__()
        self.models, self.card_gb = models, card_gb
        self.model = widgets.Dropdown(options=list(models), value=model, description="model")
        self.num_ranks = Number("ranks N", "how many ranks share the model", num_ranks, 1, 64)
        self.rows = Number("rows", "sequences that a rank works on at once", 1, 1, 4096)
        self.fused = widgets.Checkbox(value=True, description="fused attention", indent=False)
        self.table = widgets.HTML()
        for control in (self.model, self.num_ranks.slider, self.rows.slider, self.fused):
            control.observe(self.changed, names="value")
        row = [self.model, *self.num_ranks.parts, *self.rows.parts, self.fused]
        self.box = widgets.VBox([widgets.HTML(STYLE), widgets.HBox(row, layout=ROW), self.status, self.table])
        self.box.add_class("gl-panel")
        self.redraw()

    def frame(self) -> pandas.DataFrame:
        """The table for the settings shown."""
        return share_table(
            self.models[self.model.value],
            self.num_ranks.value,
            rows=self.rows.value,
            fused_attention=self.fused.value,
            card_gb=self.card_gb,
        )

    def draw_at_once(self) -> None:
        self.table.value = self.frame().to_html()
        self.say_what_is_so()

    def status_line(self) -> str:
        return "Estimated on paper; nothing runs."

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {**self.box._repr_mimebundle_(**options), "text/plain": f"A calculator:\n{self.frame()}"}
