"""The map of the course: what each chapter holds, how long it takes, and what is done of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .chapters import SHORT_PATH, SITTING, Chapter, chapters, short_minutes
from .kept import Kept, file_path, read


@dataclass(frozen=True)
class Progress:
    """The course as a map. `path` is where what is done is kept."""

    kept: Kept
    chapters: tuple[Chapter, ...]
    exercises: tuple[str, ...]
    path: Path

    @property
    def passed(self) -> dict[str, str]:
        """exercise -> when it passed (ISO time)."""
        return self.kept.passed

    def __str__(self) -> str:
        lines = []
        for chapter in self.chapters:
            lines.append(f"{self._star(chapter)} {chapter.number} · {chapter.title}: {self._words(chapter)}")
            lines += [f"    {'[x]' if name in self.passed else '[ ]'} {name}" for name in self._of(chapter)]
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        done = sum(name in self.passed for name in self.exercises)
        short = short_minutes(self.chapters)
        return (
            f"{done} of {len(self.exercises)} exercises passed; kept in {self.path}. "
            f"* the short path, read and run in {short} minutes{SITTING}"
        )

    def _repr_html_(self) -> str:
        columns = ("", "chapter", "minutes", "exercises", "predictions", "claims")
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in columns)
        rows = "".join(f"<tr>{''.join(map(_cell, self._row(chapter)))}</tr>" for chapter in self.chapters)
        return f"<table><tr>{head}</tr>{rows}</table><p>{escape(self.summary)}</p>"

    def _row(self, chapter: Chapter) -> tuple[str, ...]:
        marks = (f"{'✔' if name in self.passed else '○'} {name}" for name in self._of(chapter))
        return (
            self._star(chapter),
            f"{chapter.number} · {chapter.title}",
            chapter.minutes_in_words,
            "\n".join(marks),
            self._predictions(chapter),
            self._claims(chapter),
        )

    def _words(self, chapter: Chapter) -> str:
        return (
            f"{chapter.minutes_in_words}; predictions {self._predictions(chapter)}, "
            f"claims {self._claims(chapter)}"
        )

    def _of(self, chapter: Chapter) -> list[str]:
        return [name for name in self.exercises if name.startswith(chapter.number)]

    def _star(self, chapter: Chapter) -> str:
        return "*" if chapter.number in SHORT_PATH else " "

    def _predictions(self, chapter: Chapter) -> str:
        return _count(chapter.predictions, self.kept.predicted)

    def _claims(self, chapter: Chapter) -> str:
        return _count(chapter.claim_names, self.kept.claimed)


def _count(names: tuple[str, ...], done: dict[str, str]) -> str:
    return f"{sum(name in done for name in names)} of {len(names)}"


def _cell(text: str) -> str:
    return f"<td style='text-align:left;white-space:pre-line'>{escape(text)}</td>"


def progress(*, reset: bool = False) -> Progress:
    """The map of the course. `reset=True` forgets everything first.

    The file is .gpipe_lab_progress.json beside the notebook, or what GPIPE_LAB_PROGRESS names.
    """
    from .exercises import names

    if reset:
        file_path().unlink(missing_ok=True)
    return Progress(read(), chapters(), names(), Path(os.path.relpath(file_path())))
