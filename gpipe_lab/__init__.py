"""gpipe_lab: pipeline parallelism as a real engine to look into, under an interactive course.

Importing the package is fast: what needs torch, matplotlib or ipywidgets is imported when first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .plan import formulas
from .plan.analysis import critical_path, speed_ups, take_apart
from .plan.errors import InputError, ScheduleError
from .plan.lowering import lower
from .plan.memory import (
    MemoryReport,
    MemoryRow,
    StageBytes,
    in_flight,
    peak_in_flight,
    simulate_memory,
)
from .plan.ops import Kind, Op
from .plan.recompute import with_recompute
from .plan.schedule import Schedule, dependencies
from .plan.schedules import (
    SCHEDULES,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    replicate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from .plan.simulate import Costs, costs_of, replay, simulate
from .plan.torch_csv import from_csv, to_csv
from .plan.trace import Event, Trace
from .plan.validate import validate

__version__ = "0.1.0"

# Names that cost an import of torch, matplotlib or ipywidgets, the reading of files, or are seldom used:
# found on first use.
_LAZY: dict[str, str] = {
    "Lab": "gpipe_lab.lab.lab",
    "Pace": "gpipe_lab.engine.pace",
    "PipelineLost": "gpipe_lab.lab.failures",
    "RankFailed": "gpipe_lab.lab.failures",
    "RunStopped": "gpipe_lab.lab.failures",
    "read_profile": "gpipe_lab.plan.torch_profile",
    "search": "gpipe_lab.planner.search",
    "batch": "gpipe_lab.engine.models",
    "corpus": "gpipe_lab.engine.models",
    "gpt": "gpipe_lab.engine.models",
    "load_weights": "gpipe_lab.engine.saving",
    "whole": "gpipe_lab.engine.batch",
    "next_token_loss": "gpipe_lab.engine.models",
    **dict.fromkeys(("check", "hint", "solution"), "gpipe_lab.course.grading"),
    **dict.fromkeys(("claim", "claims"), "gpipe_lab.course.claims"),
    "claims_table": "gpipe_lab.course.chapters",
    "doctor": "gpipe_lab.course.doctor",
    "glossary": "gpipe_lab.course.glossary",
    "predict": "gpipe_lab.course.predict",
    "progress": "gpipe_lab.course.progress",
    **dict.fromkeys(("tiny_batch", "tiny_gpt"), "gpipe_lab.course.workload"),
    "track": "gpipe_lab.course.loops",
    **dict.fromkeys(("plot_overlay", "plot_schedule", "plot_trace"), "gpipe_lab.view.gantt"),
    "plot_waiting": "gpipe_lab.view.waiting",
    **dict.fromkeys(("plot_in_flight", "plot_memory"), "gpipe_lab.view.memory"),
    **dict.fromkeys(("alt_text", "show"), "gpipe_lab.view.picture"),
    **dict.fromkeys(("explain_error", "summary_table"), "gpipe_lab.view.tables"),
    **dict.fromkeys(("plot_published", "published"), "gpipe_lab.view.published"),
    **dict.fromkeys(("estimate", "propose"), "gpipe_lab.planner.propose"),
    **dict.fromkeys(("DEVICES", "MODELS"), "gpipe_lab.planner.models"),
    **dict.fromkeys(("Device", "Model", "Precision"), "gpipe_lab.planner.models"),
    "Plan": "gpipe_lab.planner.estimate",
    "Plans": "gpipe_lab.planner.choose",
    "report": "gpipe_lab.reporting",
    **dict.fromkeys(("Explorer", "explore"), "gpipe_lab.view.explorer"),
    **dict.fromkeys(("bubble_table", "plot_bubble"), "gpipe_lab.view.apart"),
    **dict.fromkeys(("plot_race", "race_table"), "gpipe_lab.view.race"),
    "state_in_words": "gpipe_lab.view.moment",
    **dict.fromkeys(("estimated_peak", "lay_out"), "gpipe_lab.planner.estimate"),
    "tune": "gpipe_lab.planner.choose",
    "Dials": "gpipe_lab.view.dials",
    "plot_bubble_curve": "gpipe_lab.view.curves",
    **dict.fromkeys(("Calculator", "share_table"), "gpipe_lab.view.dials"),
    "plot_cut": "gpipe_lab.view.cut",
    "plot_lines": "gpipe_lab.view.lines",
    "plot_mesh": "gpipe_lab.view.mesh",
    "plot_stage_costs": "gpipe_lab.view.stage_costs",
    **dict.fromkeys(("Arrow", "plot_arrows"), "gpipe_lab.view.arrows"),
}


# What people try first works too: functions that build on a schedule or a trace, as methods of theirs.
for _function in (validate, lower, with_recompute, peak_in_flight, to_csv):
    setattr(Schedule, _function.__name__, _function)
for _analysis in (critical_path, speed_ups):
    setattr(Trace, _analysis.__name__, _analysis)


def _drawn_by(function: str) -> Callable[..., Any]:
    """The method `plot` of what `gl.function` draws; matplotlib is imported when a picture is wanted."""

    def plot(self: Any, *args: Any, **options: Any) -> Any:
        return __getattr__(function)(self, *args, **options)

    plot.__doc__ = f"Its picture; arguments are those of `gl.{function}`."
    return plot


for _class, _drawer in ((Schedule, "plot_schedule"), (Trace, "plot_trace"), (MemoryReport, "plot_memory")):
    setattr(_class, "plot", _drawn_by(_drawer))  # noqa: B010 (not known to the class itself)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Lab", "report"):  # what makes workers imports torch while this process does
        import_module("gpipe_lab.lab.forkserver").start_forkserver()
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "SCHEDULES",
    "Costs",
    "Event",
    "InputError",
    "Kind",
    "MemoryReport",
    "MemoryRow",
    "Op",
    "Schedule",
    "ScheduleError",
    "StageBytes",
    "Trace",
    "costs_of",
    "critical_path",
    "dependencies",
    "dualpipe_v",
    "forward_only",
    "formulas",
    "from_csv",
    "gpipe",
    "in_flight",
    "interleaved",
    "lower",
    "naive",
    "one_f_one_b",
    "peak_in_flight",
    "replay",
    "replicate",
    "simulate",
    "simulate_memory",
    "take_apart",
    "to_csv",
    "validate",
    "with_recompute",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    *_LAZY,
]
