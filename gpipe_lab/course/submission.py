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
class Definition:
    """A statement that makes names ("*" where they are not known), and the names that it uses."""

    text: str
    makes: frozenset[str]
    uses: frozenset[str]


@dataclass(frozen=True)
class Submission:
    """The imports, functions, classes and literals of the cells; `checked` maps exercise to answer.

    `broken` has the cells that Python cannot parse, with the reason.
    """

    definitions: tuple[Definition, ...]
    checked: dict[str, str]
    broken: tuple[tuple[str, str], ...]

    def needed_by(self, name: str) -> str:
        """The source of `name` and of all that it reaches: an import that it never uses may take seconds."""
        needed = {name}
        while True:
            kept = [d for d in self.definitions if d.makes & (needed | {"*"})]
            reached = needed.union(*(d.uses for d in kept))
            if reached == needed:
                return "\n\n".join(d.text for d in kept) + "\n"
            needed = reached

    def defines(self, name: str) -> bool:
        return any(name in definition.makes for definition in self.definitions)

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
    kept: list[Definition] = []
    checked: dict[str, str] = {}
    broken: list[tuple[str, str]] = []
    for code in codes:
        try:
            code = _without_magics(code)
            tree = ast.parse(code)
        except (SyntaxError, ValueError) as error:
            broken.append((code, f"{type(error).__name__}: {error}"))
            continue
        kept += [_definition(code, node) for node in tree.body if _defines(node)]
        checked |= dict(_checks(tree))
    return Submission(tuple(kept), checked, tuple(broken))


def _definition(code: str, node: ast.stmt) -> Definition:
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    uses = frozenset(n.id for n in names if isinstance(n.ctx, ast.Load))
    return Definition(_source(code, node), frozenset(_makes(node)), uses)


def _makes(node: ast.stmt) -> Iterator[str]:
    """The names that a definition makes."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


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
