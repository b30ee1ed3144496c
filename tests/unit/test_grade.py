"""Grading a folder of notebooks: each answer one row with a verdict, whatever the learner's code does."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from gpipe_lab.course.chapters import NOTEBOOKS
from gpipe_lab.course.exercises import all_exercises, find
from gpipe_lab.course.grade import Grade, grade_folder, learners, main, run_apart
from gpipe_lab.course.submission import Unreadable, read

CHAPTER = NOTEBOOKS / "00_laundry.ipynb"
EXERCISE = find("00-finish-time")
NAME = EXERCISE.starter.__name__
SOLUTION = EXERCISE.solution_source
MUTANT = f"""
def {NAME}(*args):
    return 0
"""
LOUD = (
    SOLUTION.replace(f"def {NAME}", "def _right", 1)
    + f"\n\ndef {NAME}(*args):\n    print('x' * 1_000_000)\n    return _right(*args)\n"
)


def hand_in(folder: Path, learner: str, answer: str | None) -> Path:
    """The chapter with the learner's own function in place of the starter; None leaves the starter."""
    notebook = json.loads(CHAPTER.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if answer is not None and f"def {NAME}" in "".join(cell["source"]):
            cell["source"] = answer
    path = folder / learner / CHAPTER.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def test_every_learner_gets_a_verdict(tmp_path: Path) -> None:
    answers = {
        "right": SOLUTION,
        "untouched": None,
        "wrong": MUTANT,
        "broken": f"def {NAME}(minutes:\n    return 0",
        "leaves": f"import os\n\ndef {NAME}(*args):\n    os._exit(0)",
        "exits": f"import sys\n\ndef {NAME}(*args):\n    sys.exit('enough')",
        "loud": LOUD,
        "endless": f"def {NAME}(*args):\n    while True:\n        pass",
        "nameless": "answer = 7",
        "needs": f"import no_such_package as p\n\ndef {NAME}(*args):\n    return p.answer(*args)",
    }
    for learner, answer in answers.items():
        hand_in(tmp_path, learner, answer)
    (tmp_path / "absent").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CHAPTER.name).write_text("not a notebook")
    out = tmp_path / "grades.csv"
    assert main([str(tmp_path), "-o", str(out), "--chapters", "00", "-j", "2", "--timeout", "250"]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert {learner: row["verdict"] for learner, row in rows.items()} == {
        "absent": "missing",
        "broken": "syntax error",
        "endless": "failed",
        "exits": "failed",
        "leaves": "crashed",
        "loud": "passed",
        "nameless": "missing",
        "needs": "failed",
        "other": "unreadable",
        "right": "passed",
        "untouched": "not done yet",
        "wrong": "failed",
    }
    assert list(rows) == sorted(rows)
    assert "fails at" in rows["wrong"]["detail"]
    assert "no_such_package" in rows["needs"]["detail"]
    assert "never closed" in rows["broken"]["detail"]
    assert "exit code 0" in rows["leaves"]["detail"]
    assert rows["right"]["notebook"] == CHAPTER.name and float(rows["right"]["seconds"]) > 0


def test_an_answer_that_never_ends_is_ended() -> None:
    looping = f"def {NAME}(*args):\n    while True:\n        pass\n"
    verdict, detail = run_apart(looping, EXERCISE.name, NAME, 3)
    assert (verdict, detail) == ("timed out", "no end after 3 s")


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    fatal = f"import os, signal\n\ndef {NAME}(*args):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    assert run_apart(fatal, EXERCISE.name, NAME, 250) == ("crashed", "the process was killed by SIGKILL")


def test_missing_notebooks_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "absent").mkdir()
    grades = list(grade_folder(tmp_path))
    assert grades == [
        Grade("absent", name, "missing", "no notebook of this chapter") for name in all_exercises()
    ]


def test_a_folder_of_notebooks_is_one_learner(tmp_path: Path) -> None:
    shutil.copy(CHAPTER, tmp_path)
    assert learners(tmp_path) == [tmp_path]
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "ada").mkdir()
    assert learners(tmp_path) == [tmp_path / "ada"]


# Reading a notebook.


def notebook(tmp_path: Path, *cells: str) -> Path:
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    return path


def test_only_definitions_are_taken_out(tmp_path: Path) -> None:
    found = read(
        notebook(
            tmp_path,
            "%matplotlib inline\nimport math\nlab = open_lab()\nWIDTH = 8",
            "@cache\ndef f(x):\n    # a remark\n    return x + WIDTH\n\nf(3)\ng = lambda x: x",
            "%%time\nlong()",
            'gl.check("00-a", f); check("00-b", g)\ngl.check("00-c", find().solution)',
        )
    )
    assert [definition.text for definition in found.definitions] == [
        "import math",
        "WIDTH = 8",
        "@cache\ndef f(x):\n    # a remark\n    return x + WIDTH",
        "g = lambda x: x",
    ]
    assert found.checked == {"00-a": "f", "00-b": "g"}
    assert found.broken == ()


def test_a_broken_cell_spoils_only_what_it_defines(tmp_path: Path) -> None:
    found = read(notebook(tmp_path, "def f(:\n    pass", "def g():\n    pass"))
    assert found.defines("g") and not found.defines("f")
    assert "SyntaxError" in found.why_missing("f") and found.why_missing("g") == ""


def test_an_answer_comes_with_what_it_reaches_and_nothing_else(tmp_path: Path) -> None:
    found = read(
        notebook(
            tmp_path,
            "import torch\nfrom os.path import join as j, split\nimport a.b\nfrom math import *",
            "A, B = 1, 2\nC: int = 3\nUNUSED = 4",
            "class Base: pass\n\n\nclass Kind(Base):\n    value = C",
            "def helper(x=B):\n    return j(x) + twice(x)",
            "def twice(x):\n    return x + a.b.c(Kind)",
            "def f(x):\n    return helper(x)\n\n\ndef g(x):\n    return torch.sum(x)",
        )
    )
    needed = found.needed_by("f")
    for kept in (
        "os.path",
        "import a.b",
        "math import *",
        "A, B",
        "C: int",
        "Base",
        "Kind",
        "helper",
        "twice",
        "def f",
    ):
        assert kept in needed
    for dropped in ("torch", "UNUSED", "def g"):
        assert dropped not in needed
    assert "torch" in found.needed_by("g") and "helper" not in found.needed_by("g")
    assert found.needed_by("nobody") == "from math import *\n"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [{}]}', "\x00"])
def test_what_is_no_notebook_says_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(content)
    with pytest.raises(Unreadable):
        read(path)


def test_a_chapter_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "-o", str(tmp_path / "grades.csv"), "--chapters", "03", "77"])
    assert "no exercises in chapter 77: there are 00, 01" in capsys.readouterr().err
    assert not (tmp_path / "grades.csv").exists()


# Copies of a notebook, and what an answer takes along.


def verdict_of(folder: Path, learner: str = "ada") -> Grade:
    wanted = {g.exercise: g for g in grade_folder(folder, chapters=["00"]) if g.learner == learner}
    return wanted[EXERCISE.name]


@pytest.mark.parametrize("copy", ["00_laundry-Copy1.ipynb", "00_laundry (1).ipynb", "00_a_draft.ipynb"])
@pytest.mark.parametrize("content", [None, "", "wrong"])
def test_a_copy_never_costs_the_original(tmp_path: Path, copy: str, content: str | None) -> None:
    path = hand_in(tmp_path, "ada", SOLUTION)
    extra = path.with_name(copy)
    if content is None:  # an untouched chapter
        shutil.copy(CHAPTER, extra)
    elif content:
        extra.write_text(hand_in(tmp_path, "other", MUTANT).read_text())
    else:
        extra.write_text(content)
    grade = verdict_of(tmp_path)
    assert (grade.verdict, grade.notebook) == ("passed", CHAPTER.name)


def test_the_best_of_several_counts_and_the_others_are_named(tmp_path: Path) -> None:
    path = hand_in(tmp_path, "ada", MUTANT)
    path.with_name("00_laundry-Copy1.ipynb").write_text(hand_in(tmp_path, "other", SOLUTION).read_text())
    grade = verdict_of(tmp_path)
    assert (grade.verdict, grade.notebook) == ("passed", "00_laundry-Copy1.ipynb")
    assert f"also handed in: {CHAPTER.name} (failed)" in grade.detail


@pytest.mark.parametrize(
    "around",
    [
        "%%time\n{answer}",
        "%%capture out\n{answer}",
        "# a remark with a line separator \u2028 and a form feed \x0c in it\n{answer}",
        "ONE = 2 - 1\nbiggest = max\n{answer}",
        "try:\n    import no_such_package as np\nexcept ImportError:\n    np = None\n{answer}",
        "if True:\n    def unused():\n        return 0\n{answer}",
        "from functools import partial\nbound = partial(max, 0)\n{answer}",
        "{answer}\r\n",
    ],
)
def test_right_answers_pass_however_their_cell_is_written(tmp_path: Path, around: str) -> None:
    used = "ONE; biggest" if "ONE" in around else "bound" if "bound" in around else "0"
    body = SOLUTION.replace(f"def {NAME}", "def _right", 1)
    answer = f"{body}\n\ndef {NAME}(*args):\n    {used}\n    return _right(*args)"
    hand_in(tmp_path, "ada", around.format(answer=answer))
    grade = verdict_of(tmp_path)
    assert grade.verdict == "passed", grade.detail


def test_a_name_that_is_not_taken_along_is_told(tmp_path: Path) -> None:
    hand_in(tmp_path, "ada", f"SIZES = measure()\n\ndef {NAME}(*args):\n    return SIZES[args]")
    grade = verdict_of(tmp_path)
    assert grade.verdict == "failed"
    assert "uses a name that is not taken along: SIZES" in grade.detail


@pytest.mark.parametrize("options", [["-j", "0"], ["-o", "no/such/g.csv"], ["-o", "."], ["--timeout", "0"]])
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada").mkdir()
    with pytest.raises(SystemExit) as refused:
        main([str(tmp_path), "-o", str(tmp_path / "grades.csv"), *options])
    assert refused.value.code == 2 and "got" in capsys.readouterr().err
