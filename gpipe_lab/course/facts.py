"""The course's own files, beside the package: the tables in data/ and the chapters in notebooks/."""

from __future__ import annotations

import csv
from pathlib import Path

from ..plan.errors import require

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def table(name: str) -> list[dict[str, str]]:
    """The rows of data/NAME.csv, each a dict by column. Raises `InputError` where the file is not there."""
    path = ROOT / "data" / f"{name}.csv"
    require(
        path.exists(),
        "the course's tables lie in data/, beside the package",
        got=f"no {path}",
        where=f"table({name!r})",
        remedy="pip install -e . in the project's folder",
    )
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
