"""The lanes of a race: each schedule simulated or measured under the same settings, and why some are out."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..plan.memory import MemoryReport
from ..plan.trace import Trace
from .picture import Picture
from .race import plot_race, race_table
from .runner import MEASURING, Runner, does_not_fit
from .runs import Phase, Tell
from .settings import Settings, problem, simulated, simulated_memory

if TYPE_CHECKING:
    import pandas

OVERHEAD_S = 0.5  # of a measured lane besides its pace: workers, the warm-up step


@dataclass
class Lanes:
    """Traces and memory by schedule, and for each that is out the reason."""

    settings: Settings
    traces: dict[str, Trace] = field(default_factory=dict)
    memories: dict[str, MemoryReport] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)

    def picture(self) -> Picture | None:
        """None where every lane is out."""
        if not self.traces:
            return None
        words = f"Race: P = {self.settings.num_stages}, M = {self.settings.num_microbatches}"
        title = ", ".join([words, *self.settings.costs.split(", limit")[:1]])
        limit = self.settings.memory_limit
        return plot_race(self.traces, self.memories, limit_bytes=limit, title=title)

    def table(self) -> pandas.DataFrame:
        """`race_table`, with a last column for why a lane is out."""
        import pandas

        if not self.traces:
            return pandas.DataFrame({"out": self.out})
        table = race_table(self.traces, self.memories, limit_bytes=self.settings.memory_limit)
        return table.reindex([*table.index, *self.out]).assign(
            out=[self.out.get(name, "") for name in [*table.index, *self.out]]
        )

    def reasons(self) -> str:
        """HTML: a line for each lane that is out."""
        lines = (f"<li><b>{html.escape(name)}</b>: {html.escape(why)}</li>" for name, why in self.out.items())
        return f"<p>Out of the race:</p><ul>{''.join(lines)}</ul>" if self.out else ""


def simulated_lanes(settings: Settings, names: Sequence[str]) -> Lanes:
    """Every schedule of `names` simulated; one that these settings do not allow is out."""
    lanes = Lanes(settings)
    for name in names:
        lane = replace(settings, schedule=name)
        reason = problem(lane)
        if reason is not None:
            lanes.out[name] = reason
            continue
        lanes.traces[name] = simulated(lane)
        lanes.memories[name] = simulated_memory(lane, lanes.traces[name])
    return lanes


def measured_lanes(settings: Settings, names: Sequence[str], runner: Runner, tell: Tell) -> Lanes:
    """Every schedule of `names` run for real, one after another; one that passes the limit is out."""
    expected = simulated_lanes(settings, names)
    lanes = Lanes(settings, out=expected.out)
    seconds = {name: OVERHEAD_S + trace.makespan_ms / 1000 for name, trace in expected.traces.items()}
    whole, before = sum(seconds.values()), 0.0
    for name, needed in seconds.items():
        done, until = before / whole, (before + needed) / whole
        before += needed

        def progress(text: str, name: str = name, done: float = done, until: float = until) -> None:
            moving = seconds[name] if text == MEASURING else 0.0
            tell(Phase(text=f"{name}: {text}", done=done, until=until, seconds=moving))

        try:
            run = runner.run(replace(settings, schedule=name), progress)
        except Exception as error:
            if not does_not_fit(error):
                raise
            lanes.out[name] = str(error.__cause__)
            continue
        assert run.memory is not None, "a schedule that trains leaves a memory report"
        lanes.traces[name], lanes.memories[name] = run.trace, run.memory
    return lanes
