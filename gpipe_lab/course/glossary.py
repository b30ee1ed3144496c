"""The course's words: shown in a cell by `gl.glossary("bubble")`, and as the page notebooks/glossary.md.

data/glossary.csv is the only place where they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from html import escape

from ..plan.data import read
from ..plan.errors import require

PAGE = "glossary.md"


@dataclass(frozen=True)
class Term:
    """One word of the course. `also` are other names for it, `avoid` names that mean something else here."""

    term: str
    definition: str
    also: tuple[str, ...]
    avoid: tuple[str, ...]
    chapter: str  # where it is met first, as "03"

    @property
    def anchor(self) -> str:
        return anchor(self.term)

    @property
    def notes(self) -> str:
        also = f"Also: {', '.join(self.also)}." if self.also else ""
        avoid = f"Not: {', '.join(self.avoid)}." if self.avoid else ""
        return " ".join(part for part in (also, avoid, f"Chapter {self.chapter}.") if part)

    def __repr__(self) -> str:
        return f"{self.term}: {self.definition} {self.notes}"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.term)}</b>: {escape(self.definition)} <i>{escape(self.notes)}</i></p>"


@dataclass(frozen=True)
class Glossary:
    """Every term, in alphabetical order."""

    terms: tuple[Term, ...]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.terms))

    def _repr_html_(self) -> str:
        return "".join(term._repr_html_() for term in self.terms)


def glossary(word: str | None = None) -> Term | Glossary:
    """What a word means in this course; without a word, every term.

    A word is looked up by its name, by its other names, and then by the start of a name, so that "bubble"
    and "in flight" are found. Raises `InputError` for an unknown word, with the nearest ones.
    """
    if word is None:
        return Glossary(terms())
    found = _look_up(word)
    near = get_close_matches(word.lower(), [term.term for term in terms()], n=3, cutoff=0.5)
    require(
        found is not None,
        "gl.glossary knows the terms that gl.glossary() lists",
        got=f"{word!r}",
        where="glossary",
        remedy=f"gl.glossary({near[0]!r})" if near else "gl.glossary()",
    )
    assert found is not None
    return found


def _look_up(word: str) -> Term | None:
    """An exact name before another case of it: M is not m. Then other spellings, then the start of a name."""
    wanted = anchor(word)
    return next(
        (
            term
            for matches in (
                lambda term: word in (term.term, *term.also),
                lambda term: wanted in map(anchor, (term.term, *term.also)),
                lambda term: wanted != "" and term.anchor.startswith(wanted),
            )
            for term in terms()
            if matches(term)
        ),
        None,
    )


def anchor(heading: str) -> str:
    """The link to a heading of a Markdown page, as GitHub makes it: lower case, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def terms() -> tuple[Term, ...]:
    def names(cell: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in cell.split(";") if name.strip())

    rows = [
        Term(row["term"], row["definition"], names(row["also"]), names(row["avoid"]), row["chapter"])
        for row in read("glossary")[1]
    ]
    return tuple(sorted(rows, key=lambda term: term.term.lower()))


def page(chapters: dict[str, str]) -> str:
    """notebooks/glossary.md. `chapters` maps a chapter's number, as "03", to its file, for links."""

    def entry(term: Term) -> str:
        number = term.chapter
        where = f"[{number}]({chapters[number]})" if number in chapters else number
        notes = [
            *([f"Also: {', '.join(term.also)}."] if term.also else []),
            *([f"Not to be called: {', '.join(term.avoid)}."] if term.avoid else []),
            f"First met in chapter {where}.",
        ]
        return f"### {term.term}\n\n{term.definition}\n\n*{' '.join(notes)}*\n"

    head = (
        "# Glossary\n\n"
        'The words of this course, each with one meaning. In a notebook, `gl.glossary("bubble")` shows one.\n'
    )
    return "\n".join([head, *map(entry, terms())])
