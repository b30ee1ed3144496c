"""What a learner has done, in one local JSON file: exercises passed, predictions made, claims checked."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from . import mode

FILE_NAME = ".gpipe_lab_progress.json"
FILE_VARIABLE = "GPIPE_LAB_PROGRESS"
PASSED, PREDICTED, CLAIMED = "passed", "predicted", "claimed"


@dataclass(frozen=True)
class Kept:
    """By kind the names of what was done, each with the time (ISO) of the first time."""

    passed: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, str] = field(default_factory=dict)
    claimed: dict[str, str] = field(default_factory=dict)


def record(kind: str, name: str) -> str:
    """Note that the exercise, prediction or claim `name` is done. Returns "" or why it could not be kept.

    A headless run keeps nothing, unless GPIPE_LAB_PROGRESS says where. What another notebook has noted
    meanwhile stays.
    """
    if mode.headless() and FILE_VARIABLE not in os.environ:
        return ""
    path = file_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            kept, aside = _read_or_set_aside(path)
            done: dict[str, str] = getattr(kept, kind)
            if name not in done:
                done[name] = datetime.now().isoformat(timespec="seconds")
                _write(path, kept)
    except OSError as error:
        return f"not recorded: {error.strerror} ({path}); set {FILE_VARIABLE} to another path"
    return aside


def file_path() -> Path:
    """Beside the notebook, wherever its cells go with os.chdir, or where GPIPE_LAB_PROGRESS says."""
    return mode.STARTED_IN / Path(os.environ.get(FILE_VARIABLE) or FILE_NAME).expanduser()


def read() -> Kept:
    """What is kept; a file that is damaged or somebody else's counts as empty."""
    try:
        return _parsed(file_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Kept()


def _parsed(text: str) -> Kept:
    """Raises `ValueError` for a text that `_write` has not written."""
    content = json.loads(text)
    try:
        kinds = {kind: content.get(kind, {}) for kind in (PASSED, PREDICTED, CLAIMED)}
        return Kept(**{k: {str(name): str(when) for name, when in done.items()} for k, done in kinds.items()})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no record of progress: {error}") from error


def _read_or_set_aside(path: Path) -> tuple[Kept, str]:
    """What is kept, and a sentence where the file was damaged: it is renamed, never overwritten."""
    try:
        return _parsed(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return Kept(), ""
    except ValueError:
        aside = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%d-%H%M%S-%f}")
        os.replace(path, aside)
        return Kept(), f"the record of progress was damaged; it is kept as {aside.name} and begun anew"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. The folder itself is locked, so no further file lies about."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _write(path: Path, kept: Kept) -> None:
    """Replace the file in one step, so that nobody ever reads half of one."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as new:
        json.dump(asdict(kept), new, indent=1)
    os.replace(new.name, path)
