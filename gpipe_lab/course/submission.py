"""A learner's notebook, read without running it: the definitions that an exercise's answer needs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Unreadable(Exception):
    """A file that is no notebook."""


@dataclass(frozen=True)
class Submission:
    """`source` has every import, function, class and literal of the cells; `checked` maps exercise to answer.

    `broken` has the cells that Python cannot parse, with the reason.
    """

    source: str
    checked: dict[str, str]
    broken: tuple[tuple[str, str], ...]

    def why_missing(self, name: str) -> str:
        """Why there is no function `name`: "" unless a cell that would define it cannot be parsed."""
        return next(
            (why for cell, why in self.broken if re.search(rf"^def {name}\b", cell, re.MULTILINE)), ""
        )


def read(path: Path) -> Submission:
    """Raises `Unreadable` for a file that is not a notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"not a notebook: {type(error).__name__}: {error}") from error
    kept: list[str] = []
    checked: dict[str, str] = {}
    broken: list[tuple[str, str]] = []
    for code in codes:
        try:
            code = _without_magics(code)
            tree = ast.parse(code)
        except (SyntaxError, ValueError) as error:
            broken.append((code, f"{type(error).__name__}: {error}"))
            continue
        kept += [_source(code, node) for node in tree.body if _defines(node)]
        checked |= dict(_checks(tree))
    return Submission("\n\n".join(kept) + "\n", checked, tuple(broken))


def _source(code: str, node: ast.stmt) -> str:
    """A definition as it was written, comments and all, so that an untouched starter is known as one."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.unparse(node)
    first = min(line.lineno for line in (node, *node.decorator_list))
    return "\n".join(code.splitlines()[first - 1 : node.end_lineno])


def _without_magics(code: str) -> str:
    """Jupyter's own lines emptied, so that the numbers of the others stay."""
    if code.lstrip().startswith("%%"):
        return ""
    return re.sub(r"^(\s*)[%!?].*$", r"\1pass", code, flags=re.MULTILINE)


def _defines(node: ast.stmt) -> bool:
    """Whether a statement of a cell makes a name and runs nothing: a definition, an import, a literal."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return isinstance(node.value, ast.Lambda) or _is_literal(node.value)
    return isinstance(node, DEFINITIONS)


def _is_literal(node: ast.expr | None) -> bool:
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _checks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(exercise, the name of what is checked) for every gl.check("exercise", name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "check":
            match node.args:
                case [ast.Constant(value=str(exercise)), ast.Name(id=name)]:
                    yield exercise, name
