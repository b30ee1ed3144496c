"""The exercises: one module a chapter, each with a tuple EXERCISES."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ...plan.errors import require
from ..exercise import Exercise


@cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its name, in the order of the chapters."""
    modules = sorted(m.name for m in iter_modules(__path__) if m.name.startswith("ch"))
    found = [e for name in modules for e in import_module(f"{__name__}.{name}").EXERCISES]
    return {exercise.name: exercise for exercise in found}


def names() -> tuple[str, ...]:
    return tuple(all_exercises())


def find(name: str) -> Exercise:
    """The exercise of that name, or `InputError` with the names there are."""
    require(
        name in all_exercises(),
        "an exercise is one of " + ", ".join(names()),
        got=f"{name!r}",
        where="check, hint, solution",
        remedy=f"gl.check({names()[0]!r}, ...)",
    )
    return all_exercises()[name]
