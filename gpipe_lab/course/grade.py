"""Grade a folder of learners' notebooks: python -m gpipe_lab.course.grade FOLDER -o grades.csv

The folder holds one folder for each learner, with the learner's notebooks in it. No notebook is run as a
whole: the function that an exercise asks for is taken out, with the definitions beside it, and checked in a
process of its own that has `--timeout` seconds. Nothing that a learner's code does stops the grading. It does
run with your rights, so grade strangers' notebooks in a container.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from .chapters import CHAPTER_NAME
from .exercises import all_exercises
from .grading import FAILED, NOT_DONE, PASSED
from .kept import FILE_VARIABLE
from .submission import Submission, Unreadable, read

MISSING, UNREADABLE, SYNTAX = "missing", "unreadable", "syntax error"
TIMED_OUT, CRASHED = "timed out", "crashed"
BEST_FIRST = (PASSED, FAILED, TIMED_OUT, CRASHED, SYNTAX, NOT_DONE, MISSING, UNREADABLE)


@dataclass(frozen=True)
class Grade:
    """One row: `verdict` is passed, failed, not done yet, or one of the words above."""

    learner: str
    exercise: str
    verdict: str
    detail: str = ""
    notebook: str = ""
    seconds: float = 0.0


def grade_folder(
    folder: Path, *, chapters: Sequence[str] = (), timeout_s: float = 120.0, num_jobs: int = 1
) -> Iterator[Grade]:
    """A grade for every learner and every exercise of the chapters (all, unless some are named).

    Learners come in alphabetical order, each with the exercises in the course's order.
    """
    wanted = [e.name for e in all_exercises().values() if not chapters or e.chapter in chapters]
    with ThreadPoolExecutor(num_jobs) as pool:
        for learner in learners(folder):
            grade = partial(grade_exercise, learner.name, notebooks_of(learner), timeout_s)
            yield from pool.map(grade, wanted)


def learners(folder: Path) -> list[Path]:
    """The folders in it, one a learner; a folder without any is one learner's own."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return inside or [folder]


def notebooks_of(learner: Path) -> dict[Path, Submission | Unreadable]:
    """What the learner handed in; autosaved copies do not count."""
    paths = sorted(path for path in learner.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    return {path: _read(path) for path in paths}


def _read(path: Path) -> Submission | Unreadable:
    try:
        return read(path)
    except Unreadable as error:
        return error


def grade_exercise(
    learner: str, notebooks: dict[Path, Submission | Unreadable], timeout_s: float, exercise: str
) -> Grade:
    """The best verdict among the notebooks that may hold the answer; the others are named in the detail.

    A notebook counts that checks the exercise or is named after its chapter. The one with the chapter's own
    name comes first, so that copies (`-Copy1`, ` (1)`) are graded only where it did not pass.
    """
    known = all_exercises()[exercise]

    def is_copy(path: Path) -> bool:
        return not (CHAPTER_NAME.fullmatch(path.name) and path.name.startswith(known.chapter))

    grades: list[Grade] = []
    for path in sorted(notebooks, key=lambda path: (is_copy(path), path)):
        grade = _grade_notebook(learner, path, notebooks[path], timeout_s, exercise)
        if grade is not None:
            grades.append(grade)
        if grade is not None and grade.verdict == PASSED:
            break
    if not grades:
        return Grade(learner, exercise, MISSING, "no notebook of this chapter")
    best = min(grades, key=lambda grade: BEST_FIRST.index(grade.verdict))  # of equals the first
    others = [f"{grade.notebook} ({grade.verdict})" for grade in grades if grade is not best]
    if not others:
        return best
    return replace(best, detail=f"{best.detail}\nalso handed in: {', '.join(others)}".strip())


def _grade_notebook(
    learner: str, path: Path, submission: Submission | Unreadable, timeout_s: float, exercise: str
) -> Grade | None:
    """What one notebook is worth; None where it has nothing to do with the exercise."""
    known = all_exercises()[exercise]
    is_chapter = path.name.startswith(known.chapter)
    if isinstance(submission, Unreadable):
        return Grade(learner, exercise, UNREADABLE, str(submission), path.name) if is_chapter else None
    if exercise not in submission.checked and not is_chapter:
        return None
    name = submission.checked.get(exercise, known.starter.__name__)
    why = submission.why_missing(name)
    if why:
        return Grade(learner, exercise, SYNTAX, why, path.name)
    if not submission.defines(name):
        return Grade(learner, exercise, MISSING, f"no function {name} in a code cell", path.name)
    began = time.monotonic()
    verdict, detail = run_apart(submission.needed_by(name), exercise, name, timeout_s)
    detail = "\n".join(filter(None, [submission.why_undefined(detail), detail]))
    return Grade(learner, exercise, verdict, detail, path.name, round(time.monotonic() - began, 1))


def run_apart(source: str, exercise: str, name: str, timeout_s: float) -> tuple[str, str]:
    """(verdict, detail) of an answer, run in a process group of its own; its output is dropped."""
    with tempfile.TemporaryDirectory(prefix="gpipe_lab-grade-", ignore_cleanup_errors=True) as folder:
        job, reply = Path(folder) / "job.json", Path(folder) / "reply.json"
        job.write_text(json.dumps({"source": source, "exercise": exercise, "name": name}), encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if k != FILE_VARIABLE} | {
            "GPIPE_LAB_HEADLESS": "1",
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "gpipe_lab.course.grade_one", str(job), str(reply)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"no end after {timeout_s:g} s"
        finally:
            _end_group(process)
        if not reply.exists():
            return CRASHED, _ending(code)
        found = json.loads(reply.read_text(encoding="utf-8"))
        return found["verdict"], found["detail"]


def _end_group(process: subprocess.Popen) -> None:
    """Whatever the answer has started ends with it."""
    with suppress(ProcessLookupError):  # all have ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code} before there was a verdict"


def write_csv(grades: Iterable[Grade], path: Path) -> Counter[str]:
    """Write every row as soon as it is known; how often each verdict was given."""
    counts: Counter[str] = Counter()
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Grade)])
        rows.writeheader()
        for grade in grades:
            rows.writerow(asdict(grade))
            file.flush()
            counts[grade.verdict] += 1
            print(f"{grade.learner}: {grade.exercise}: {grade.verdict}", file=sys.stderr)
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab.course.grade", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("grades.csv"))
    parser.add_argument("--chapters", nargs="+", default=[], metavar="NN", help="only these, as 03 04")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer (default 120)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="answers graded at once (default 1)")
    given = parser.parse_args(arguments)
    if not given.folder.is_dir():
        parser.error(f"no folder {given.folder}")
    if not given.out.absolute().parent.is_dir() or given.out.is_dir():
        parser.error(f"-o names a file in a folder that is there, as grades.csv; got {given.out}")
    if given.jobs < 1 or given.timeout <= 0:
        parser.error(f"--jobs is at least 1 and --timeout above 0; got {given.jobs} and {given.timeout:g}")
    known = sorted({exercise.chapter for exercise in all_exercises().values()})
    if unknown := sorted(set(given.chapters) - set(known)):
        parser.error(f"no exercises in chapter {', '.join(unknown)}: there are {', '.join(known)}")
    grades = grade_folder(given.folder, chapters=given.chapters, timeout_s=given.timeout, num_jobs=given.jobs)
    counts = write_csv(grades, given.out)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()), "in", given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
