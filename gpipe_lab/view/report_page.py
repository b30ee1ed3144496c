"""What `report` found, and the page that shows it."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..plan.analysis import Bubble, CriticalPath, critical_path, speed_ups, take_apart
from ..plan.memory import CATEGORIES, MemoryReport
from ..plan.trace import PACED, Trace
from ..plan.units import format_bytes
from ..planner.choose import Plans
from ..planner.estimate import Plan, Setting
from .apart import plot_bubble
from .gantt import plot_overlay, plot_trace
from .html_page import Section, figure, page, paragraph, table
from .picture import Picture
from .stage_costs import plot_stage_costs
from .tables import explain_error

if TYPE_CHECKING:
    import pandas

MOST_REJECTED = 200  # rows of the page's table


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was proposed and what else was tried; the run of it, measured; and the page that shows it all."""

    path: Path
    plans: Plans
    plan: Plan
    trace: Trace
    memory: MemoryReport
    makespans_ms: tuple[float, ...]
    failed: tuple[tuple[Setting, str], ...]  # settings that did not stay within the limit when they ran
    names: tuple[str, ...]
    layers: pandas.DataFrame = field(repr=False)
    device: str
    num_cores: int

    def frame(self) -> pandas.DataFrame:
        """Predicted beside measured: makespan, bubble, and each rank's peak, with the error in per cent."""
        import pandas

        pairs = {
            "makespan (ms)": (self.plan.trace.makespan_ms, self.trace.makespan_ms),
            "bubble (%)": (100 * self.plan.bubble_fraction, 100 * self.trace.bubble_fraction),
        }
        for rank in self.memory.ranks:
            held = self.plan.memory.peak_bytes(rank), self.memory.peak_bytes(rank)
            pairs[f"rank {rank}: peak (MiB)"] = (held[0] / 2**20, held[1] / 2**20)
        rows = [
            {"predicted": p, "measured": m, "error (%)": 100 * (p / m - 1) if m else None}
            for p, m in pairs.values()
        ]
        return pandas.DataFrame(rows, index=list(pairs))

    def memory_frame(self) -> pandas.DataFrame:
        """One row a category: for every rank at its peak, predicted and measured, in KiB."""
        import pandas

        columns = {}
        for rank in self.memory.ranks:
            for name, memory in (("predicted", self.plan.memory), ("measured", self.memory)):
                held = [memory.peak(rank).bytes.get(category, 0) / 2**10 for category in CATEGORIES]
                columns[f"rank {rank} {name}"] = [*held, sum(held)]
        frame = pandas.DataFrame(columns, index=[*CATEGORIES, "total"])
        return frame[frame.any(axis=1)]

    def __str__(self) -> str:
        measured = f"measured {self.trace.makespan_ms:.4g} ms a step"
        return f"proposed {self.plan}\n{measured}; the page is {self.path}"

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """A trace, what its step spent where, what to make quicker first; and the page that shows it all."""

    path: Path
    trace: Trace
    bubble: Bubble
    critical_path: CriticalPath
    speed_ups: pandas.DataFrame = field(repr=False)

    def __str__(self) -> str:
        return f"{in_short(self.trace, self.bubble, self.speed_ups)}\nthe page is {self.path}"

    __repr__ = __str__


def trace_report(trace: Trace, path: Path) -> TraceReport:
    """Take a trace apart; nothing is written."""
    return TraceReport(
        path=path,
        trace=trace,
        bubble=take_apart(trace),
        critical_path=critical_path(trace),
        speed_ups=speed_ups(trace),
    )


def in_short(trace: Trace, bubble: Bubble, gains: pandas.DataFrame) -> str:
    """Three sentences for whoever reads no more: the step, where its idle time is, what to make quicker."""
    first = gains.iloc[0]
    return "\n".join(
        [
            f"{trace.source} on {trace.device or 'no device'}: {trace.num_ranks} ranks, a step of "
            f"{trace.makespan_ms:.4g} ms, {100 * trace.bubble_fraction:.1f} % of all time idle",
            str(bubble),
            f"to make quicker first: {first['what']} of stage {first['stage']} (rank {first['rank']}); with "
            f"10 % less of it the step is {first['gain (%)']:.1f} % shorter",
        ]
    )


def trace_html(found: TraceReport) -> str:
    """The whole page of a trace."""
    trace = found.trace
    return page(
        f"Where a step of {trace.makespan_ms:.4g} ms goes",
        [
            Section(
                "In short",
                [paragraph(line) for line in in_short(trace, found.bubble, found.speed_ups).split("\n")],
            ),
            Section("What ran", [figure(plot_trace(trace))]),
            Section(
                "The bubble taken apart",
                [
                    figure(plot_bubble({"the step": trace})),
                    table(found.bubble.frame(), "Idle time of all ranks by cause"),
                ],
            ),
            Section(
                "The critical path",
                [
                    paragraph(
                        "The chain of operations and messages that decides when the step ends: "
                        f"{found.critical_path}."
                    ),
                    table(found.critical_path.frame(), "Every stretch of it", index=False, folded=True),
                ],
            ),
            Section(
                "What to make quicker",
                [
                    table(
                        found.speed_ups,
                        "How much sooner the step would end, simulated from its own times, were one stage's "
                        "operations of a kind 10 % quicker",
                        index=False,
                    )
                ],
            ),
            Section("Operations", [table(trace.frame(), "Every operation", index=False, folded=True)]),
        ],
    )


def report_html(found: Report) -> str:
    """The whole page."""
    return page(
        f"How to run this model on {found.plan.setting.num_stages} ranks",
        [
            Section("In short", _summary(found)),
            Section("The cut", [figure(picture) for picture in _cut_pictures(found)]),
            Section("What ran", [figure(plot_trace(found.trace, found.memory))]),
            Section(
                "Predicted beside measured",
                [
                    figure(plot_overlay([found.plan.trace, found.trace], ["predicted", "measured"])),
                    table(found.frame(), "Predicted (simulated) over measured"),
                    paragraph(str(explain_error(found.trace, found.plan.trace))),
                ],
            ),
            Section(
                "Memory",
                [
                    table(found.memory_frame(), "Each rank at its peak, by category (KiB)"),
                    paragraph(
                        "The prediction counts messages at their most, and as saved what a split backward "
                        "keeps for its weights; the ledger counts each from when it exists."
                    ),
                ],
            ),
            Section("Alternatives", _alternatives(found)),
            Section("Layers", [table(found.layers, _layers_caption(found), index=False, folded=True)]),
        ],
    )


def _layers_caption(found: Report) -> str:
    rows = found.plan.setting.microbatch_size
    return f"Each layer on micro-batches of {rows} rows, measured on {found.device}"


def _summary(found: Report) -> list[str]:
    limit, setting = found.plans.limit_bytes, found.plan.setting
    measured = max(found.memory.peak_bytes(rank) for rank in found.memory.ranks)
    told = [
        f"Proposed: {setting}.",
        f"A step: predicted (simulated from measured layers) {found.plan.trace.makespan_ms:.4g} ms, "
        f"{found.trace.source} {found.trace.makespan_ms:.4g} ms. The fullest rank: predicted "
        f"{format_bytes(found.plan.peak_bytes)}, measured {format_bytes(measured)}; "
        + ("no limit was given." if limit is None else f"the limit is {format_bytes(limit)} a rank."),
        f"Measured on {found.device}: {platform.platform()}, Python {platform.python_version()}, "
        f"{found.num_cores} cores. Layer times are medians, each layer alone on one rank; the makespan is "
        f"the median of {len(found.makespans_ms)} steps.",
    ]
    if found.trace.source == PACED:
        told.append(
            "There are more ranks than cores, so the run was paced: order, messages and memory are real; "
            "times were set to the measured ones, scaled by how many ranks share a core. It says nothing "
            "about speed."
        )
    return [paragraph(text) for text in told]


def _alternatives(found: Report) -> list[str]:
    plans = found.plans
    frame = plans.frame()
    fits = frame[frame["why not"] == ""]
    rejected = frame[frame["why not"] != ""].head(MOST_REJECTED)
    setting = ["P", "m", "M", "schedule", "checkpoint"]
    counts = (
        f"The {len(plans.ranked)} fastest settings that fit, all simulated; {plans.num_slower} others are "
        f"slower. {len(plans.rejected)} were rejected."
    )
    parts = [
        paragraph(counts),
        table(
            fits[[*setting, "step (ms)", "samples/s", "bubble (%)", "peak (MiB)"]],
            "Settings that fit, simulated, the fastest first",
            index=False,
        ),
    ]
    parts += [paragraph(f"Ran over the limit: {setting}: {why}") for setting, why in found.failed]
    if len(rejected):
        parts.append(
            table(
                rejected[[*setting, "peak (MiB)", "why not"]], "Rejected, and why", index=False, folded=True
            )
        )
    return parts


def _cut_pictures(found: Report) -> tuple[Picture, Picture]:
    """The layers' time, by which they are cut, and what they keep; both of one micro-batch."""
    layers = found.layers
    sizes = {"by time": [len(span) for span in found.plan.spans]}
    cut = f"{len(found.names)} layers on {len(found.plan.spans)} stages"
    subtitle = f"measured on {found.device} · micro-batches of {found.plan.setting.microbatch_size} rows"
    time = plot_stage_costs(
        sizes,
        list(layers["forward_ms"] + layers["backward_ms"]),
        title=f"{cut}: forward and backward of one micro-batch",
        names=found.names,
        subtitle=subtitle,
    )
    saved = plot_stage_costs(
        sizes,
        list(layers["saved_bytes"]),
        title=f"{cut}: saved for the backward of one micro-batch",
        unit="B",
        names=found.names,
        subtitle=subtitle,
    )
    return time, saved
