"""Which exercises have passed, kept in one local JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path

from . import mode

FILE_NAME = ".gpipe_lab_progress.json"
FILE_VARIABLE = "GPIPE_LAB_PROGRESS"


@dataclass(frozen=True)
class Progress:
    """The course as a map: every exercise, and when it passed. `path` is where this is kept."""

    passed: dict[str, str]  # exercise -> ISO time
    exercises: tuple[str, ...]
    path: Path

    def __str__(self) -> str:
        rows = (f"{'[x]' if name in self.passed else '[ ]'} {name}" for name in self.exercises)
        return "\n".join([*rows, self.summary])

    @property
    def summary(self) -> str:
        done = sum(name in self.passed for name in self.exercises)
        return f"{done} of {len(self.exercises)} exercises passed; kept in {self.path}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✔' if name in self.passed else '○'}</td>"
            f"<td style='text-align:left'>{escape(name)}</td>"
            f"<td>{escape(self.passed.get(name, 'not yet'))}</td></tr>"
            for name in self.exercises
        )
        head = "<tr><th></th><th style='text-align:left'>exercise</th><th>passed</th></tr>"
        return f"<table>{head}{rows}</table><p>{escape(self.summary)}</p>"


def progress(*, reset: bool = False) -> Progress:
    """The map of the course. `reset=True` forgets everything first.

    The file is .gpipe_lab_progress.json in the current folder, or what GPIPE_LAB_PROGRESS names.
    """
    from .exercises import names

    if reset:
        file_path().unlink(missing_ok=True)
    return Progress(_read(), names(), Path(os.path.relpath(file_path())))


def record(exercise: str) -> str:
    """Note that `exercise` has passed. Returns "" or, where it could not be kept, why not.

    A headless run keeps nothing, unless GPIPE_LAB_PROGRESS says where.
    """
    if mode.headless() and FILE_VARIABLE not in os.environ:
        return ""
    passed = _read()
    passed.setdefault(exercise, datetime.now().isoformat(timespec="seconds"))
    try:
        _write(passed)
    except OSError as error:
        return f"not recorded: {error.strerror} ({file_path()}); set {FILE_VARIABLE} to another path"
    return ""


def file_path() -> Path:
    return Path(os.environ.get(FILE_VARIABLE) or FILE_NAME).absolute()


def _read() -> dict[str, str]:
    """What has passed; a file that is damaged or somebody else's counts as empty."""
    try:
        passed = json.loads(file_path().read_text(encoding="utf-8"))["passed"]
        return {str(name): str(when) for name, when in passed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(passed: dict[str, str]) -> None:
    """Replace the file in one step, so that two notebooks never leave half of one."""
    path = file_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as new:
        json.dump({"passed": passed}, new, indent=1)
    os.replace(new.name, path)
