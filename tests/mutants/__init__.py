"""Wrong answers to the exercises, by exercise and name: what the grading has to refuse.

They grade the graders, so they stand here and not beside the exercises.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

MUTANTS: dict[str, dict[str, Any]] = {
    exercise: mutants
    for module in sorted(m.name for m in iter_modules(__path__))
    for exercise, mutants in import_module(f"{__name__}.{module}").MUTANTS.items()
}
