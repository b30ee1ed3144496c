"""What the executed chapters say about themselves: title, minutes, predictions, claims, time to run.

Read from notebooks/*.ipynb, so that nothing is written twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan.data import PACKAGE
from ..plan.errors import InputError
from .claims import Claim, as_table, checked, read_claims

if TYPE_CHECKING:
    import pandas

NOTEBOOKS = PACKAGE.parent / "notebooks"  # in a copy of the repository

# In a notebook's metadata: what `make course` measured, all in seconds.
EXECUTED = "gpipe_lab.executed_s"
FIRST_PICTURE = "gpipe_lab.first_picture_s"
LONGEST_CELL = "gpipe_lab.longest_cell_s"
SHORT_PATH = ("00", "02", "03", "04", "11")  # the 90-minute path
TWO_SITTINGS = "11"
SITTING = f"; of chapter {TWO_SITTINGS} its first sitting"
CHAPTER_NAME = re.compile(r"\d\d_[a-z_]+\.ipynb")
MINUTES = re.compile(r"^Read (\d+) min · run (\d+) min · exercise (\d+) min", re.MULTILINE)


@dataclass(frozen=True)
class Minutes:
    """What a chapter takes, as its first cell says."""

    read: int
    run: int
    exercise: int

    @property
    def total(self) -> int:
        return self.read + self.run + self.exercise


@dataclass(frozen=True)
class Chapter:
    """One notebook of the course. What was measured is None where `make course` has not executed it.

    first_picture_s counts from the start of the first cell to the end of the one that draws, all cells
    run one after another; longest_cell_s is the time of the cell that took longest.
    """

    path: Path
    title: str  # without its number, as "The naive pipeline"
    question: str
    minutes: Minutes | None
    predictions: tuple[str, ...]
    claims: tuple[Claim, ...]
    claim_names: tuple[str, ...]  # also of a chapter that was saved before it had run
    executed_s: float | None
    first_picture_s: float | None
    longest_cell_s: float | None

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @property
    def minutes_in_words(self) -> str:
        """What it takes, and how long running it took when the chapter was last executed."""
        if self.minutes is None:
            return "no times given"
        measured = "" if self.executed_s is None else f" ({self.executed_s:g} s measured)"
        given = self.minutes
        return f"read {given.read}, run {given.run}{measured}, exercise {given.exercise} min"


def chapters(folder: Path | None = None) -> tuple[Chapter, ...]:
    """The chapters there are, in order; a copy of one, as JupyterLab names it, is none.

    They are beside the package, or of a package that was installed by itself, in the working folder or its
    notebooks/. Raises `InputError` where there are none.
    """
    for place in [folder] if folder else (NOTEBOOKS, Path.cwd(), Path.cwd() / "notebooks"):
        paths = sorted(path for path in place.glob("*.ipynb") if CHAPTER_NAME.fullmatch(path.name))
        if paths:
            return tuple(map(read_chapter, paths))
    raise InputError(
        "the chapters lie in notebooks/, beside the package or where one works",
        got=f"none in {folder or f'{NOTEBOOKS}, {Path.cwd()} and its notebooks/'}",
        where="chapters",
        remedy="get the course's repository, and work in its notebooks/",
    )


def read_chapter(path: Path) -> Chapter:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    first, code = _first_cell(notebook), _code(notebook)
    minutes = MINUTES.search(first)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    claims = {claim.name: claim for output in outputs for claim in read_claims(output)}
    own_claims = tuple(claim for claim in claims.values() if claim.chapter == path.name[:2])
    written = re.findall(r"gl\.claim\(\s*\"([^\"]+)\"", code)
    return Chapter(
        path=path,
        title=_match(r"^# (?:\d+ · )?(.+)$", first) or path.stem,
        question=_match(r"^\*(.+)\*$", first),
        minutes=Minutes(*map(int, minutes.groups())) if minutes else None,
        predictions=tuple(re.findall(r"gl\.predict\(\s*\"([^\"]+)\"", code)),
        claims=own_claims,
        claim_names=tuple(dict.fromkeys([*written, *(claim.name for claim in own_claims)])),
        executed_s=notebook["metadata"].get(EXECUTED),
        first_picture_s=notebook["metadata"].get(FIRST_PICTURE),
        longest_cell_s=notebook["metadata"].get(LONGEST_CELL),
    )


def claims_table() -> pandas.DataFrame:
    """The claims of the whole course: those of every executed chapter, and those of this notebook."""
    recorded = {claim.name: claim for chapter in chapters() for claim in chapter.claims}
    here = {claim.name: claim for claim in checked()}
    return as_table(sorted((recorded | here).values(), key=lambda claim: claim.chapter))


def map_markdown(made: Sequence[Chapter]) -> str:
    """The map of the course as a table with links, the 90-minute path marked by a star."""
    rows = [
        f"| {'★' if c.number in SHORT_PATH else ''} | [{c.number} · {c.title}]({c.path.name}) | {c.question} "
        f"| {c.minutes_in_words} |"
        for c in made
    ]
    return "\n".join(
        [
            "| | chapter | the question | what it takes |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"★ the short path, read and run in {short_minutes(made)} minutes{SITTING}.",
            "",
        ]
    )


def short_minutes(made: Sequence[Chapter]) -> int:
    """To read and run the short path, without exercises; of two sittings the first, half of the chapter."""
    minutes = {c.number: c.minutes.read + c.minutes.run for c in made if c.minutes and c.number in SHORT_PATH}
    return sum(minutes.values()) - minutes.get(TWO_SITTINGS, 0) // 2


def _text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _first_cell(notebook: dict[str, Any]) -> str:
    return _text(notebook["cells"][0]) if notebook["cells"] else ""


def _code(notebook: dict[str, Any]) -> str:
    return "\n".join(_text(cell) for cell in notebook["cells"] if cell["cell_type"] == "code")


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""
