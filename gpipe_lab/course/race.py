"""Schedules really run, one after another, with the same times for the same share of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan.memory import peak_in_flight
from ..plan.ops import Kind
from ..plan.schedule import Schedule
from ..plan.simulate import simulate
from ..plan.trace import Trace, messages
from .loops import track

if TYPE_CHECKING:
    import pandas
    import torch

    from ..engine.pace import Pace
    from ..lab.lab import Lab
    from ..lab.run import Run

KEPT = ("saved", "deferred")  # what micro-batches in flight keep, for I or B, and for a W put off


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """The times of one rank's share of the model, in ms: a rank with v stages takes 1/v of them for each.

    So schedules with several stages a rank and with one compare: the same work takes the same time.
    """

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    link_ms: float = 0.0

    def of(self, schedule: Schedule) -> Pace:
        from ..engine.pace import Pace

        share = share_of_a_rank(schedule)
        return Pace(
            forward_ms=share * self.forward_ms,
            backward_ms=share * (self.backward_input_ms + self.backward_weight_ms),
            backward_input_ms=share * self.backward_input_ms,
            backward_weight_ms=share * self.backward_weight_ms,
            link_ms=self.link_ms,
        )

    def simulate(self, schedule: Schedule) -> Trace:
        return simulate(schedule, self.of(schedule).costs())


def share_of_a_rank(schedule: Schedule) -> float:
    """What part of a rank's layers one of its stages has, where all stages are equal."""
    return schedule.num_ranks / schedule.num_stages


def held_at_the_peak(schedule: Schedule) -> float:
    """The most that a rank holds, in micro-batches of its whole share of the model: 1F1B's unit."""
    return max(peak_in_flight(schedule)) * share_of_a_rank(schedule)


@dataclass(frozen=True)
class Race:
    """What every schedule came to. `runs` and `simulated` are by name, fastest measured first."""

    runs: dict[str, Run]
    simulated: dict[str, Trace]

    def frame(self) -> pandas.DataFrame:
        """One row a schedule, ranked by the measured makespan; what it holds, and how much it sends."""
        import pandas

        rows = {}
        for name, run in self.runs.items():
            schedule = run.trace.schedule
            assert schedule is not None, "a measured trace carries its schedule"
            ranks = range(schedule.num_ranks)
            rows[name] = {
                "simulated (ms)": self.simulated[name].makespan_ms,
                "measured, paced (ms)": run.trace.makespan_ms,
                "bubble (%)": 100 * run.trace.bubble_fraction,
                "in flight": held_at_the_peak(schedule),
                "kept (KiB)": max(run.memory.peak_bytes(rank, KEPT) for rank in ranks) / 1024,
                "messages": len(messages(run.trace)),
                "split": "yes" if any(op.kind is Kind.W for op in schedule.rank_of) else "no",
            }
        table = pandas.DataFrame(rows).T.infer_objects()
        return table.rename_axis("schedule")


def race(
    lab: Lab,
    schedules: Mapping[str, Schedule],
    model: Any,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    loss_fn: Callable,
    pace: RankPace,
    repeats: int = 1,
) -> Race:
    """Run every schedule on the lab's ranks, paced, and rank them by the measured makespan."""
    runs = {}
    for name in track(list(schedules)):
        schedule = schedules[name]
        runs[name] = lab.run(
            schedule, model, inputs, targets, loss_fn=loss_fn, pace=pace.of(schedule), repeats=repeats
        )
    ranked = sorted(runs, key=lambda name: runs[name].trace.makespan_ms)
    return Race(
        {name: runs[name] for name in ranked}, {name: pace.simulate(schedules[name]) for name in ranked}
    )
