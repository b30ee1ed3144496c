"""What `report` found, and the page that shows it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.patches import Rectangle

from ..plan.choosing import Plans
from ..plan.costing import Plan, Setting
from ..plan.memory import CATEGORIES, MemoryReport
from ..plan.trace import PACED, Trace
from ..plan.units import format_bytes
from .gantt import plot_overlay, plot_trace
from .html_page import Section, figure, page, paragraph, table
from .picture import Picture, Sheet
from .style import INK, SOFT, Look, look, number, size_of
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


def report_html(found: Report) -> str:
    """The whole page."""
    return page(
        f"How to run this model on {found.plan.setting.num_stages} ranks",
        [
            Section("In short", _summary(found)),
            Section("The cut", [figure(_cut_picture(found))]),
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
                        "The prediction holds gradients from the start, and counts as saved what a split "
                        "backward keeps for its weights; the ledger counts each from when it exists."
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
        f"{plans.num_fitting} settings fit; {len(plans.ranked)} of them, the fastest by their closed forms, "
        f"were simulated. {len(plans.rejected)} were rejected."
    )
    parts = [
        paragraph(counts),
        table(
            fits[[*setting, "step (ms)", "samples/s", "bubble (%)", "peak (GiB)"]],
            "Settings that fit, simulated, the fastest first",
            index=False,
        ),
    ]
    parts += [paragraph(f"Ran over the limit: {setting}: {why}") for setting, why in found.failed]
    if len(rejected):
        parts.append(
            table(
                rejected[[*setting, "peak (GiB)", "why not"]], "Rejected, and why", index=False, folded=True
            )
        )
    return parts


def _cut_picture(found: Report) -> Picture:
    layers = found.layers
    time = layers["forward_ms"] + layers["backward_ms"]

    def bars(values: pandas.Series) -> list[Bar]:
        return [
            Bar(f"stage {k}", [(found.names[i], float(values[i])) for i in span])
            for k, span in enumerate(found.plan.spans)
        ]

    return plot_bars(
        bars(time),
        bars(layers["saved_bytes"]),
        title=f"{len(found.names)} layers on {len(found.plan.spans)} stages, cut by time",
        subtitle=f"measured on {found.device} · micro-batches of {found.plan.setting.microbatch_size} rows",
    )


class Bar(NamedTuple):
    """A stage as it is drawn: the name and, layer by layer, a value."""

    name: str
    layers: Sequence[tuple[str, float]]

    @property
    def total(self) -> float:
        return sum(value for _, value in self.layers)


FILLS = (Look("", "#0072B2", "white", ink="white"), Look("", "#6BAED6", "white"))  # by turns


def plot_bars(time: Sequence[Bar], size: Sequence[Bar], *, title: str, subtitle: str) -> Picture:
    """A cut: for every stage its layers' time (ms) above, what they keep for one micro-batch beneath."""
    with look():
        sheet = Sheet(
            [0.3 * len(time) + 0.1, 0.3 * len(size) + 0.1],
            headline=title,
            subtitle=subtitle,
            legends=[["forward and backward of one micro-batch (ms)"], ["saved for its backward"]],
            legend_above=[0, 1],
            gap=0.4,
            right=0.9,
            share_x=False,
        )
        for axes, bars, show in zip(
            sheet.axes, (time, size), (lambda x: f"{number(x)} ms", size_of), strict=True
        ):
            most = max(bar.total for bar in bars) or 1.0
            for row, bar in enumerate(bars):
                left = 0.0
                for index, (name, value) in enumerate(bar.layers):
                    fill = FILLS[index % len(FILLS)]
                    axes.add_patch(
                        Rectangle(
                            (left, row - 0.36),
                            value,
                            0.72,
                            facecolor=fill.face,
                            edgecolor="white",
                            linewidth=0.8,
                        )
                    )
                    if value / most * sheet.inner_points > 5.2 * len(name) + 4:
                        axes.text(left + value / 2, row, name, ha="center", va="center", fontsize=7,
                                  color="white" if fill.ink == "white" else INK)  # fmt: skip
                    left += value
                axes.annotate(
                    show(bar.total),
                    (left, row),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color=SOFT,
                    annotation_clip=False,
                )
            axes.set_xlim(0, most)
            axes.set_ylim(len(bars) - 0.5, -0.5)
            axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
            axes.set_xticks([])
            axes.tick_params(length=0)
            for side in axes.spines.values():
                side.set_visible(False)
    told = "; ".join(
        f"{ms.name}: {len(ms.layers)} layers, {number(ms.total)} ms, {size_of(held.total)}"
        for ms, held in zip(time, size, strict=True)
    )
    sheet.picture.alt = f"{title}. {subtitle}. For one micro-batch: {told}."
    return sheet.picture
