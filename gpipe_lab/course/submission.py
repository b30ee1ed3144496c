"""A learner's notebook, read without running it: the definitions that an exercise's answer needs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON_MAGICS = ("capture", "prun", "time", "timeit")  # what follows them is Python all the same
PURE_CALLS = frozenset(
    {"partial", "range", "dict", "list", "set", "tuple", "frozenset", "float", "int", "str"}
)
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

    `broken` has the cells that Python cannot parse, with the reason; `left_out` the names that other
    statements make, which grading does not run.
    """

    definitions: tuple[Definition, ...]
    checked: dict[str, str]
    broken: tuple[tuple[str, str], ...]
    left_out: frozenset[str] = frozenset()

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

    def why_undefined(self, detail: str) -> str:
        """A sentence where a verdict's detail comes from a name that was not taken along, else ""."""
        found = re.search(r"NameError: name '(\w+)' is not defined", detail)
        if found is None or found[1] not in self.left_out:
            return ""
        return f"uses a name that is not taken along: {found[1]}; grading takes definitions and constants"


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
    left_out: set[str] = set()
    for code in codes:
        try:
            code = _without_magics(code)
            tree = ast.parse(code)
        except (SyntaxError, ValueError) as error:
            broken.append((code, f"{type(error).__name__}: {error}"))
            continue
        kept += [_definition(code, node) for node in tree.body if _defines(node)]
        left_out |= {name for node in tree.body if not _defines(node) for name in _makes(node)}
        checked |= dict(_checks(tree))
    made = {name for definition in kept for name in definition.makes}
    return Submission(tuple(kept), checked, tuple(broken), frozenset(left_out - made))


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
        case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.stmt):
                    yield from _makes(inner)
                elif isinstance(inner, ast.ExceptHandler):
                    yield from (name for statement in inner.body for name in _makes(statement))


def _source(code: str, node: ast.stmt) -> str:
    """A definition as it was written, comments and all, so that an untouched starter is known as one."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.unparse(node)
    first = min(line.lineno for line in (node, *node.decorator_list))
    return "\n".join(code.split("\n")[first - 1 : node.end_lineno])


def _without_magics(code: str) -> str:
    """Jupyter's own lines emptied, so that the numbers of the others stay; "" for a cell in no Python."""
    code = re.sub(r"\r\n?", "\n", code)
    first = code.lstrip()
    if first.startswith("%%"):
        magic = re.match(r"%%(\w*)", first)
        if magic is None or magic[1] not in PYTHON_MAGICS:
            return ""
    return re.sub(r"^(\s*)[%!?].*$", r"\1pass", code, flags=re.MULTILINE)


def _defines(node: ast.stmt) -> bool:
    """Whether a statement of a cell makes names and does no work: a definition, an import, a constant.

    A choice between such statements counts too, as `try: import numpy`.
    """
    match node:
        case ast.Assign() | ast.AnnAssign():
            return isinstance(node.value, ast.Lambda) or _is_constant(node.value)
        case ast.If():
            return _is_constant(node.test) and _all_define([*node.body, *node.orelse])
        case ast.Try():
            handled = [statement for handler in node.handlers for statement in handler.body]
            return _all_define([*node.body, *handled, *node.orelse, *node.finalbody])
    return isinstance(node, DEFINITIONS)


def _all_define(statements: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass) or _defines(statement) for statement in statements)


def _is_constant(node: ast.expr | None) -> bool:
    """Whether an expression only names things or works them out of numbers and words: it runs no work.

    Of calls those of PURE_CALLS count, as `partial(max, 3)` and `range(4)`.
    """
    if node is None:
        return False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func).split(".")[-1] not in PURE_CALLS:
            return False
        if isinstance(inner, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.comprehension):
            return False
    return True


def _checks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(exercise, the name of what is checked) for every gl.check("exercise", name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "check":
            match node.args:
                case [ast.Constant(value=str(exercise)), ast.Name(id=name)]:
                    yield exercise, name
