"""What a panel shows, without widgets: plain figures, and tables of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plan.errors import require
from .lanes import measured_lanes, simulated_lanes
from .picture import show
from .runner import Runner
from .scene import Wording, draw
from .settings import Settings, problem, simulated
from .tables import summary_table

if TYPE_CHECKING:
    import pandas


def static(
    choices: Sequence[Settings], wording: Wording, *, runner: Runner | None, display: bool
) -> pandas.DataFrame:
    """A figure for each of `choices`, two where there is a `runner` to measure it; one table of all."""
    import pandas

    tables = {}
    for settings in choices:
        reason = problem(settings)
        require(reason is None, reason or "", got=repr(settings), where="Explorer.static")
        trace = simulated(settings)
        run = runner.run(settings, lambda _: None) if runner is not None else None
        until = None if run is None else max(trace.makespan_ms, run.trace.makespan_ms)
        if display:
            show(draw(settings, trace, None, wording, until=until))
            if run is not None:
                show(draw(settings, run.trace, run.memory, wording, until=until))
        key = _key(settings, varied={choice.ratio for choice in choices})
        tables[key] = summary_table(trace, run.trace if run is not None else None)
    return pandas.concat(tables, names=["settings", "quantity"])


def static_race(
    settings: Settings, names: Sequence[str], *, runner: Runner | None, display: bool
) -> pandas.DataFrame:
    """The race as a figure and a table with one row a schedule."""
    lanes = (
        simulated_lanes(settings, names)
        if runner is None
        else measured_lanes(settings, names, runner, lambda phase: None)
    )
    picture = lanes.picture()
    if display and picture is not None:
        show(picture)
    return lanes.table()


def _key(settings: Settings, varied: set[float]) -> str:
    key = f"{settings.schedule}, P = {settings.num_stages}, M = {settings.num_microbatches}"
    key += "" if settings.checkpoint == "never" else f", checkpoint {settings.checkpoint}"
    return key + (f", ratio {settings.ratio:g}" if len(varied) > 1 else "")
