"""What fits on a card: a table that answers at once, with controls for the model and the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..planner.sharing import METHODS, Transformer, share

if TYPE_CHECKING:
    import pandas

GB = 1e9


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


class Calculator:
    """Controls over `share_table`: the model, ranks, rows and attention; the table follows at once."""

    def __init__(
        self, models: Mapping[str, Transformer], model: str, *, num_ranks: int = 8, card_gb: float = 80.0
    ) -> None:
        import ipywidgets as widgets

        self.models, self.card_gb = models, card_gb
        self.model = widgets.Dropdown(options=list(models), value=model, description="model")
        self.num_ranks = widgets.IntSlider(num_ranks, 1, 64, description="ranks N", continuous_update=True)
        self.rows = widgets.BoundedIntText(1, min=1, max=4096, description="rows")
        self.fused = widgets.Checkbox(True, description="fused attention")
        self.table = widgets.HTML()
        for control in (self.model, self.num_ranks, self.rows, self.fused):
            control.observe(self._changed, names="value")
        self.widget = widgets.VBox(
            [widgets.HBox([self.model, self.num_ranks]), widgets.HBox([self.rows, self.fused]), self.table]
        )
        self._show()

    def frame(self) -> pandas.DataFrame:
        """The table for the settings shown."""
        return share_table(
            self.models[self.model.value],
            self.num_ranks.value,
            rows=self.rows.value,
            fused_attention=self.fused.value,
            card_gb=self.card_gb,
        )

    def _changed(self, change: Any) -> None:
        self._show()

    def _show(self) -> None:
        self.table.value = self.frame().to_html()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)
