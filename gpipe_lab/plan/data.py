"""The tables that come with the package: models, devices, what papers measured, terms and formulas."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from .errors import require

PACKAGE = Path(__file__).resolve().parents[1]
DATA = PACKAGE / "data"  # as installed
if not DATA.is_dir():
    DATA = PACKAGE.parent / "data"  # in a copy of the repository


@cache
def read(name: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """(where it comes from, its rows) of `data/NAME.csv`; a first line behind a # says where from."""
    path = DATA / f"{name}.csv"
    require(
        path.is_file(),
        "the package's tables lie in its data folder",
        got=f"no {path}",
        where="data",
        remedy="pip install --force-reinstall gpipe-lab, or pip install -e . in a copy of the repository",
    )
    text = path.read_text(encoding="utf-8")
    comment, _, table = text.partition("\n") if text.startswith("#") else ("", "", text)
    return comment.removeprefix("#").strip(), tuple(csv.DictReader(table.splitlines()))
