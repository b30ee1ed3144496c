"""One answer graded in a process of its own: python -m gpipe_lab.course.grade_one JOB REPLY, both JSON files.

Whatever the learner's code does, it does here: it may never end, or end the process.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from .grading import FAILED, check


def grade(source: str, path: Path, exercise: str, name: str) -> dict[str, str]:
    """The verdict on function `name` of `source`; `path` is where the source is kept, for error messages."""
    path.write_text(source, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    error = ""
    try:
        exec(compile(source, str(path), "exec"), namespace)
    except Exception:
        error = traceback.format_exc(limit=1).strip().splitlines()[-1]
    if not callable(namespace.get(name)):
        return {"verdict": FAILED, "detail": error or f"{name} is not a function"}
    result = check(exercise, namespace[name])
    return {"verdict": result.status, "detail": result.detail}


def main(job: Path, reply: Path) -> None:
    given = json.loads(job.read_text(encoding="utf-8"))
    found = grade(given["source"], job.parent / "answer.py", given["exercise"], given["name"])
    reply.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
