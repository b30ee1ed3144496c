"""What every committed chapter keeps to, checked without running it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpipe_lab.course.exercises import all_exercises

FOLDER = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(FOLDER.glob("*.ipynb"))
MAX_OUTPUT_BYTES = 200_000
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# The course speaks of itself alone, and never tells a reader that a thing is easy.
UNWELCOME = re.compile(r"\b(issues?|agents?|sessions?|simply|TODO|FIXME)\b", re.IGNORECASE)
IMAGES = ("image/png", "image/jpeg", "image/svg+xml")

Notebook = dict[str, Any]
Rule = Callable[[Notebook], Iterator[str]]


def text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: Notebook) -> Iterator[tuple[int, Notebook, Notebook]]:
    for index, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", ()):
            yield index, cell, output


def may_raise(cell: Notebook) -> bool:
    return "raises-exception" in cell["metadata"].get("tags", ())


def one_title(notebook: Notebook) -> Iterator[str]:
    titles = [
        line
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
        for line in re.sub(r"```.*?```", "", text(cell["source"]), flags=re.DOTALL).splitlines()
        if re.match(r"# \S", line)
    ]
    if len(titles) != 1:
        yield f"{len(titles)} headings of the first level: {titles}"
    if titles and not text(notebook["cells"][0]["source"]).startswith("# "):
        yield "the heading of the first level is not at the top"


def doctor_first(notebook: Notebook) -> Iterator[str]:
    cells = code_cells(notebook)
    if not cells or "gl.doctor(" not in text(cells[0]["source"]):
        yield "the first code cell does not call gl.doctor()"


def was_executed(notebook: Notebook) -> Iterator[str]:
    counts = [cell["execution_count"] for cell in code_cells(notebook) if text(cell["source"]).strip()]
    if counts != list(range(1, len(counts) + 1)):
        yield f"not executed from top to bottom in one go: {counts}"


def no_errors(notebook: Notebook) -> Iterator[str]:
    for index, cell, output in outputs(notebook):
        if output["output_type"] == "error" and not may_raise(cell):
            yield f"cell {index} shows an error: {output['ename']}"
        if output.get("name") == "stderr":
            yield f"cell {index} writes to stderr: {text(output['text'])[:200]}"
        if output.get("name") == "stdout" and re.search(r"\w+Warning\b", text(output["text"])):
            yield f"cell {index} shows a warning: {text(output['text'])[:200]}"


def expected_errors_happened(notebook: Notebook) -> Iterator[str]:
    for index, cell in enumerate(notebook["cells"]):
        if may_raise(cell) and not any(o["output_type"] == "error" for o in cell["outputs"]):
            yield f"cell {index} is tagged raises-exception and shows no error"
    if code_cells(notebook) and may_raise(code_cells(notebook)[-1]):
        yield "the last code cell is tagged raises-exception, so nothing would notice if it raised nothing"


def small_outputs(notebook: Notebook) -> Iterator[str]:
    for index, _, output in outputs(notebook):
        size = len(json.dumps(output).encode())
        if size >= MAX_OUTPUT_BYTES:
            yield f"cell {index} has an output of {size} bytes (at most {MAX_OUTPUT_BYTES})"


def images_have_text(notebook: Notebook) -> Iterator[str]:
    for index, cell, output in outputs(notebook):
        for kind in IMAGES:
            if kind in output.get("data", {}) and not output.get("metadata", {}).get(kind, {}).get("alt"):
                yield f"cell {index} shows an image without alt text"
        for page in (text(output.get("data", {}).get("text/html", "")), text(cell["source"])):
            if re.search(r"<img(?![^>]*\balt=(\"[^\"]|'[^']))", page):
                yield f"cell {index} holds an <img> without alt text"
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown" and re.search(r"!\[\s*\]\(", text(cell["source"])):
            yield f"cell {index} holds an image without alt text"


def widget_state_is_valid(notebook: Notebook) -> Iterator[str]:
    widgets = notebook["metadata"].get("widgets")
    if widgets is not None and "state" not in widgets.get(WIDGET_STATE, {}):
        yield "metadata.widgets has no state, which breaks viewers: run `make course`"


def steady_metadata(notebook: Notebook) -> Iterator[str]:
    if any("execution" in cell["metadata"] for cell in notebook["cells"]):
        yield "cells carry times of execution: run `make course`"
    if "version" in notebook["metadata"].get("language_info", {}):
        yield "the metadata names a Python version: run `make course`"


def welcome_words(notebook: Notebook) -> Iterator[str]:
    for index, cell in enumerate(notebook["cells"]):
        for found in UNWELCOME.finditer(text(cell["source"])):
            yield f"cell {index} says {found.group()!r}"


def no_shell_installs(notebook: Notebook) -> Iterator[str]:
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code" and re.search(
            r"^\s*[%!]\s*(pip|conda|apt)", text(cell["source"]), re.M
        ):
            yield f"cell {index} installs something: requirements.txt is where that goes"


RULES: tuple[Rule, ...] = (
    one_title,
    doctor_first,
    was_executed,
    no_errors,
    expected_errors_happened,
    small_outputs,
    images_have_text,
    widget_state_is_valid,
    steady_metadata,
    welcome_words,
    no_shell_installs,
)


def load(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(path: Path, rule: Rule) -> None:
    problems = list(rule(load(path)))
    assert not problems, "\n".join([path.name, *problems])


def defined_functions(notebook: Notebook) -> dict[str, str]:
    """Name -> source of every function and class that the cells define."""
    found = {}
    for cell in code_cells(notebook):
        lines = [
            line for line in text(cell["source"]).splitlines() if not line.lstrip().startswith(("!", "%"))
        ]
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name] = ast.unparse(node)
    return found


def test_no_definition_is_shared_between_chapters() -> None:
    """A helper that two chapters define belongs in the package."""
    seen: dict[str, str] = {}
    for path in CHAPTERS:
        for name, source in defined_functions(load(path)).items():
            assert source not in seen, f"{name} is defined in {seen[source]} and in {path.name}"
            seen[source] = path.name


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_exercises_are_asked_and_start_from_their_starter(path: Path) -> None:
    notebook = load(path)
    code = "\n".join(text(cell["source"]) for cell in code_cells(notebook))
    defined = defined_functions(notebook)
    for exercise in all_exercises().values():
        if exercise.chapter != path.name[:2]:
            continue
        assert f'gl.check("{exercise.name}"' in code, f"{path.name} never checks {exercise.name}"
        starter = next(iter(defined_functions({"cells": [_code(exercise.starter_source)]}).values()))
        assert defined.get(exercise.starter.__name__) == starter, (
            f"{exercise.name} starts from another starter"
        )


# The rules themselves: each is broken once and must say so.


def _code(source: str, **more: Any) -> Notebook:
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": 1}
    return cell | more


def _shows(output: Notebook, **more: Any) -> Notebook:
    return _good(_code("import gpipe_lab as gl; gl.doctor()", outputs=[output], **more))


def _good(*cells: Notebook, metadata: Notebook | None = None) -> Notebook:
    title = {"cell_type": "markdown", "source": "# A chapter", "metadata": {}}
    doctor = _code("import gpipe_lab as gl; gl.doctor()")
    return {"metadata": metadata or {}, "cells": [title, *(cells or (doctor,))]}


PNG = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {}}
ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}
TAGGED = {"tags": ["raises-exception"]}
BROKEN: list[tuple[Rule, Notebook]] = [
    (one_title, _good({"cell_type": "markdown", "source": "# Another", "metadata": {}})),
    (one_title, {"metadata": {}, "cells": []}),
    (doctor_first, _good(_code("print(1)"))),
    (was_executed, _good(_code("1", execution_count=None))),
    (was_executed, _good(_code("1", execution_count=7))),
    (no_errors, _shows(ERROR)),
    (no_errors, _shows({"output_type": "stream", "name": "stderr", "text": "oh"})),
    (no_errors, _shows({"output_type": "stream", "name": "stdout", "text": ["x: UserWarning: oh"]})),
    (expected_errors_happened, _good(_code("1", metadata=TAGGED), _code("2"))),
    (expected_errors_happened, _shows(ERROR, metadata=TAGGED)),
    (small_outputs, _shows({"output_type": "stream", "name": "stdout", "text": "x" * MAX_OUTPUT_BYTES})),
    (images_have_text, _shows(PNG)),
    (images_have_text, _shows({"output_type": "display_data", "data": {"text/html": "<img src='x'>"}})),
    (images_have_text, _good({"cell_type": "markdown", "source": "![](a.png)", "metadata": {}})),
    (widget_state_is_valid, _good(metadata={"widgets": {}})),
    (steady_metadata, _good(_code("1", metadata={"execution": {}}))),
    (steady_metadata, _good(metadata={"language_info": {"name": "python", "version": "3.11.7"}})),
    (welcome_words, _good({"cell_type": "markdown", "source": "You simply run it.", "metadata": {}})),
    (no_shell_installs, _good(_code("!pip install torch"))),
]


@pytest.mark.parametrize(("rule", "notebook"), BROKEN)
def test_rule_sees_a_broken_chapter(rule: Rule, notebook: Notebook) -> None:
    assert list(rule(notebook))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_a_good_chapter(rule: Rule) -> None:
    alt = "Four stages, eight micro-batches."
    described = PNG | {"metadata": {"image/png": {"alt": alt}}}
    page = described | {"data": {"image/png": "AAAA", "text/html": f'<img alt="{alt}" src="data:x">'}}
    assert not list(rule(_good()))
    assert not list(rule(_shows(described)))
    assert not list(rule(_shows(page)))


def test_every_rule_is_broken_once() -> None:
    assert {rule for rule, _ in BROKEN} == set(RULES)
