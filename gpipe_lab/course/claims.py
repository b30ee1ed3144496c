"""Claims that a chapter measures: what was predicted, simulated and measured, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..plan.trace import MEASURED, PACED
from .kept import CLAIMED, record

if TYPE_CHECKING:
    import pandas


RECORDS = "gpipe_lab.claims"  # where a displayed table keeps its claims, in the output's metadata


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
    timed: bool = False

    @property
    def chapter(self) -> str:
        """The number that the name starts with, as "03"."""
        return self.name[:2]

    @property
    def deviation(self) -> float:
        return abs(self.measured - self.predicted)

    @property
    def source(self) -> str:
        return PACED if self.paced else MEASURED

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
        simulated = "" if self.simulated is None else f", simulated {number(self.simulated)}"
        return (
            f"{self.text} ({self.formula}): predicted {number(self.predicted)}{simulated}, "
            f"{self.source} {number(self.measured)}{self._unit}: {self.verdict}"
        )

    def _repr_html_(self) -> str:
        mark = "✓" if self.holds else "✗"
        return f"<p><b>{mark}</b> {escape(repr(self))}</p>"


def number(value: float) -> str:
    """Counts to the last digit, since they are claimed exactly; others to six digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


def _plain(value: float) -> float | int:
    """A whole number as an int, since six digits would cut a byte count; a plain number in any case."""
    return int(value) if float(value).is_integer() else float(value)


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
    made = Claim(
        name=name,
        text=text,
        formula=formula,
        predicted=_plain(predicted),
        simulated=None if simulated is None else _plain(simulated),
        measured=_plain(measured),
        tolerance=_plain(tolerance),
        unit=unit,
        paced=paced,
        timed=timed,
    )
    _claims[name] = made
    if why := record(CLAIMED, name):
        print(why)
    if not made.holds and not timed:
        raise ClaimFailed(repr(made))
    return made


def checked() -> tuple[Claim, ...]:
    """The claims that this process has checked, in order."""
    return tuple(_claims.values())


def claims() -> pandas.DataFrame:
    """The claims checked in this notebook so far, one row each, shown in full.

    `paced` says whether the measured run was held to set times; `simulated` is empty where nothing was.
    """
    return as_table(checked())


def as_table(made: Iterable[Claim]) -> pandas.DataFrame:
    """One row a claim. What is displayed carries the claims along, for `read_claims`."""
    from .claims_table import ClaimsTable

    records = [(c, asdict(c)) for c in made]
    rows = [
        record
        | {
            "simulated": "" if c.simulated is None else c.simulated,
            "verdict": c.verdict,
            "paced": "yes" if c.paced else "no",
        }
        for c, record in records
    ]
    columns = "name text formula predicted simulated measured unit paced verdict".split()
    frame = ClaimsTable(rows, columns=columns, dtype=object)  # bytes stand beside fractions
    frame.attrs[RECORDS] = [record for _, record in records]
    return frame


def read_claims(output: dict[str, Any]) -> tuple[Claim, ...]:
    """The claims that an executed cell's output carries in its metadata, if any."""
    return tuple(Claim(**record) for record in output.get("metadata", {}).get(RECORDS, ()))
