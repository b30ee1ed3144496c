"""Claims that a chapter measures: what was predicted, simulated and measured, and whether it holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


class ClaimFailed(AssertionError):
    """A claim that does not depend on speed turned out false."""


@dataclass(frozen=True)
class Claim:
    """One row of "claims we checked". `deviation` is |measured - predicted|, in the claim's unit."""

    name: str
    text: str
    formula: str
    predicted: float
    simulated: float | None
    measured: float
    tolerance: float
    unit: str
    paced: bool

    @property
    def deviation(self) -> float:
        return abs(self.measured - self.predicted)

    @property
    def holds(self) -> bool:
        return self.deviation <= self.tolerance

    @property
    def verdict(self) -> str:
        within = "exactly" if self.tolerance == 0 else f"within {self.tolerance:g}{self._unit}"
        return f"holds, {within}" if self.holds else f"off by {self.deviation:.4g}{self._unit}"

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    def __repr__(self) -> str:
        simulated = "" if self.simulated is None else f", simulated {_number(self.simulated)}"
        source = "measured, paced" if self.paced else "measured"
        return (
            f"{self.text} ({self.formula}): predicted {_number(self.predicted)}{simulated}, "
            f"{source} {_number(self.measured)}{self._unit}: {self.verdict}"
        )

    def _repr_html_(self) -> str:
        mark = "✓" if self.holds else "✗"
        return f"<p><b>{mark}</b> {escape(repr(self))}</p>"


def _number(value: float) -> str:
    """Counts to the last digit, since they are claimed exactly; others to six digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


def _plain(value: float | None) -> float | int | str:
    """A whole number as an int, since six digits would cut a byte count; nothing as an empty cell."""
    if value is None:
        return ""
    return int(value) if float(value).is_integer() else value


_claims: dict[str, Claim] = {}


def claim(
    name: str,
    text: str,
    *,
    formula: str,
    predicted: float,
    measured: float,
    simulated: float | None = None,
    tolerance: float = 0.0,
    unit: str = "",
    paced: bool = False,
    timed: bool = False,
) -> Claim:
    """Check a claim and note it in the table of `claims`.

    tolerance is in the claim's unit. A claim that does not hang on speed raises `ClaimFailed` where it does
    not hold; a `timed` one is shown with its deviation, since a busy machine can spoil it.
    """
    made = Claim(name, text, formula, predicted, simulated, measured, tolerance, unit, paced)
    _claims[name] = made
    if not made.holds and not timed:
        raise ClaimFailed(repr(made))
    return made


def claims() -> pandas.DataFrame:
    """The claims checked in this notebook so far, one row each, shown in full.

    `paced` says whether the measured run was held to set times; `simulated` is empty where nothing was.
    """
    from .claims_table import ClaimsTable

    numbers = ("predicted", "simulated", "measured")
    rows = [
        asdict(c)
        | {name: _plain(getattr(c, name)) for name in numbers}
        | {"verdict": c.verdict, "paced": "yes" if c.paced else "no"}
        for c in _claims.values()
    ]
    columns = "name text formula predicted simulated measured unit paced verdict".split()
    return ClaimsTable(rows, columns=columns, dtype=object)  # bytes stand beside fractions
