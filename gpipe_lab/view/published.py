"""What papers published beside what is predicted here: one table, one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..planner.published import GOOD, Comparison, comparisons
from .picture import Picture, Sheet, show
from .style import ALARM, CURVES, FAINT, SOFT, look, percent

if TYPE_CHECKING:
    import pandas


class Published:
    """All published values with their predictions. Displays as a picture and, folded, the table."""

    def __init__(self) -> None:
        self.rows = comparisons()

    def frame(self, *, predicted_only: bool = False) -> pandas.DataFrame:
        """One row a value: table, case, quantity, unit, published, predicted, error (%), why."""
        import pandas

        rows = [
            {
                "table": row.table,
                "case": row.case,
                "quantity": row.quantity,
                "unit": row.unit,
                "published": row.published,
                "predicted": row.predicted,
                "error (%)": None if row.error is None else round(100 * row.error, 1),
                "why": row.why,
            }
            for row in self.rows
            if row.predicted is not None or not predicted_only
        ]
        return pandas.DataFrame(rows)

    def plot(self) -> Picture:
        return plot_published(self.rows)

    def __repr__(self) -> str:
        return f"{self.plot().alt}\nEvery value, and why one is missed: .frame()"

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        show(self.plot())
        table = self.frame().to_html(index=False, na_rep="", float_format=lambda x: f"{x:.4g}")
        name = f"The table: {len(self.rows)} published values"
        display(HTML(f"<details><summary>{name}</summary>{table}</details>"))


def published() -> Published:
    """Every value of the papers' tables in `data/tables`, its prediction, and the reason for a miss."""
    return Published()


def plot_published(rows: Sequence[Comparison]) -> Picture:
    """predicted / published for every value that can be predicted, one row each; 1 is a hit."""
    shown = [row for row in rows if row.predicted is not None]
    tables = list(dict.fromkeys(row.table for row in shown))
    good = sum(abs(row.error or 0.0) <= GOOD for row in shown)
    missing = len(rows) - len(shown)
    headline = f"Predicted over published: {good} of {len(shown)} values within {percent(GOOD)}"
    with look():
        sheet = Sheet(
            [0.17 * (len(shown) + len(tables)) + 0.1],
            headline=headline,
            subtitle="predicted from shapes, published times and the simulator · nothing is tuned to a row · "
            f"{missing} further values cannot be predicted: times or shapes of their papers are missing",
            left=4.3,
            right=0.75,
        )
        (axes,) = sheet.axes
        places: list[float] = []
        names: list[str] = []
        y = 0.0
        for table in tables:
            axes.text(-0.01, y, table, transform=axes.get_yaxis_transform(), ha="right", va="center",
                      fontsize=7.5, weight="bold")  # fmt: skip
            y += 1
            for row in (row for row in shown if row.table == table):
                assert row.predicted is not None and row.error is not None
                ratio, near = 1 + row.error, abs(row.error) <= GOOD
                color = CURVES[0][0] if near else ALARM
                axes.plot([1, ratio], [y, y], color=color, linewidth=1.2, zorder=2)
                axes.plot([ratio], [y], "o" if near else "D", color=color, markersize=4.5,
                          markerfacecolor=color if near else "white", zorder=3)  # fmt: skip
                axes.annotate(
                    f"{round(100 * row.error, 1) + 0.0:+.1f} %",
                    (1, y),
                    xycoords=("axes fraction", "data"),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                    color=SOFT if near else ALARM,
                )
                places.append(y)
                names.append(f"{row.case}: {row.quantity}")
                y += 1
        axes.axvline(1, color=SOFT, linewidth=1)
        axes.axvspan(1 - GOOD, 1 + GOOD, color=FAINT, alpha=0.6, linewidth=0, zorder=0)
        axes.set_yticks(places, names, fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(y - 0.3, -0.7)
        axes.set_xlabel("predicted / published (band: within 5 %; hollow mark: outside)")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    misses = [row for row in shown if abs(row.error or 0.0) > GOOD]
    worst = max(misses, key=lambda row: abs(row.error or 0.0), default=None)
    told = (
        f" Farthest off: {worst.case}, {worst.quantity}, {100 * (worst.error or 0):+.0f} %." if worst else ""
    )
    sheet.picture.alt = (
        f"{headline}. {missing} further values cannot be predicted. "
        + " ".join(
            f"{table}: {sum(abs(r.error or 0.0) <= GOOD for r in shown if r.table == table)} of "
            f"{sum(r.table == table for r in shown)} within {percent(GOOD)}."
            for table in tables
        )
        + told
    )
    return sheet.picture
