"""What a learner has done, in one local JSON file: exercises passed, predictions made, claims checked."""

from __future__ import annotations

import json
import os
import tempfile
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

    A headless run keeps nothing, unless GPIPE_LAB_PROGRESS says where.
    """
    if mode.headless() and FILE_VARIABLE not in os.environ:
        return ""
    kept = read()
    done: dict[str, str] = getattr(kept, kind)
    if name in done:
        return ""
    done[name] = datetime.now().isoformat(timespec="seconds")
    try:
        _write(kept)
    except OSError as error:
        return f"not recorded: {error.strerror} ({file_path()}); set {FILE_VARIABLE} to another path"
    return ""


def file_path() -> Path:
    return Path(os.environ.get(FILE_VARIABLE) or FILE_NAME).absolute()


def read() -> Kept:
    """What is kept; a file that is damaged or somebody else's counts as empty."""
    try:
        content = json.loads(file_path().read_text(encoding="utf-8"))
        kinds = {kind: content.get(kind, {}) for kind in (PASSED, PREDICTED, CLAIMED)}
        return Kept(**{k: {str(name): str(when) for name, when in done.items()} for k, done in kinds.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return Kept()


def _write(kept: Kept) -> None:
    """Replace the file in one step, so that two notebooks never leave half of one."""
    path = file_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as new:
        json.dump(asdict(kept), new, indent=1)
    os.replace(new.name, path)
