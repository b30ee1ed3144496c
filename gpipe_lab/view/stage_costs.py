"""Cuts side by side: what every stage costs, layer by layer, and which stage sets the pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from ..plan.errors import require
from .picture import Picture, Sheet
from .style import ALARM, FAINT, PAPER, SOFT, Look, binary_step, glyphs, look, number, size_of

ROW_HEIGHT = 0.24  # inches
LAYER = Look("a layer", "#56B4E9", "white")
COSTLIEST = Look("in the costliest stage", "#E07B1F", "white", "////")
LABEL_SIZE = 7.5

Stages = list[list[float]]  # the layers' costs, stage by stage
Show = Callable[[float], str]


def plot_stage_costs(
    cuts: Mapping[str, Sequence[int]],
    costs: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    title: str,
    unit: str = "ms",
    names: Sequence[str] | None = None,
    subtitle: str = "",
) -> Picture:
    """One bar a stage, made of its layers; of every cut the costliest stage stands out.

    cuts: {name: layers of each stage}. costs: of each layer, in `unit` ("B" for bytes), for all cuts or cut
    by cut. names: of the layers, shown where they fit. All other stages wait for the costliest one, so the
    cut with the shortest orange bar is the fastest. Where all stages cost the same, none stands out.
    """
    by_cut = dict(costs) if isinstance(costs, Mapping) else dict.fromkeys(cuts, costs)
    for name, sizes in cuts.items():
        require(
            name in by_cut and sum(sizes) == len(by_cut[name]) and min(sizes, default=0) > 0,
            "a cut puts every layer into one stage",
            got=f"{name}: {list(sizes)} for {len(by_cut.get(name, ()))} layers",
            where="plot_stage_costs",
            remedy='plot_stage_costs({"uniform": [4, 4]}, costs_of_8_layers, title="...")',
        )
    require(bool(cuts), "a picture of cuts has at least one", got="none", where="plot_stage_costs")
    show = size_of if unit == "B" else lambda value: _counted(value, unit)
    stages = {name: _stages(sizes, by_cut[name]) for name, sizes in cuts.items()}
    highest = max(sum(stage) for found in stages.values() for stage in found)
    with look():
        sheet = Sheet(
            [ROW_HEIGHT * len(found) for found in stages.values()],
            headline=title,
            subtitle=subtitle,
            legends=([LAYER, COSTLIEST],),
            left=2.0,
            right=0.9,
            gap=0.12,
        )
        for axes, (name, found) in zip(sheet.axes, stages.items(), strict=True):
            _draw(axes, name, found, names, show, sheet.inner_points / (1.02 * highest or 1.0))
            axes.set_xlim(0, 1.02 * highest or 1.0)
            axes.tick_params(labelbottom=axes is sheet.axes[-1])
            if unit == "B":
                axes.xaxis.set_major_locator(MultipleLocator(binary_step(highest)))
        sheet.axes[-1].xaxis.set_major_formatter(lambda x, _: show(x))
        sheet.picture.alt = _words(title, stages, show)
    return sheet.picture


def _stages(sizes: Sequence[int], costs: Sequence[float]) -> Stages:
    found: Stages = []
    start = 0
    for size in sizes:
        found.append(list(costs[start : start + size]))
        start += size
    return found


def _draw(
    axes: Axes, name: str, stages: Stages, names: Sequence[str] | None, show: Show, points_per_unit: float
) -> None:
    totals = [sum(stage) for stage in stages]
    worst = totals.index(max(totals)) if max(totals) > min(totals) or len(totals) == 1 else None
    labels_left = list(names or [""] * sum(map(len, stages)))
    for row, stage in enumerate(stages):
        key = COSTLIEST if row == worst else LAYER
        labels, labels_left = labels_left[: len(stage)], labels_left[len(stage) :]
        left = 0.0
        for cost, label in zip(stage, labels, strict=True):
            axes.add_patch(
                Rectangle((left, row + 0.12), cost, 0.76, facecolor=key.face, edgecolor=PAPER, linewidth=0.8)
            )
            if label and glyphs(label, LABEL_SIZE)[1] + 3 <= cost * points_per_unit:
                axes.text(
                    left + cost / 2,
                    row + 0.5,
                    label,
                    ha="center",
                    va="center",
                    size=LABEL_SIZE,
                    zorder=5,  # above the hatch, on ground of its own
                    bbox={"facecolor": key.face, "edgecolor": "none", "pad": 1.2},
                )
            left += cost
        if row == worst:  # hatched as well, for eyes and printers without colour
            axes.add_patch(
                Rectangle(
                    (0, row + 0.12), left, 0.76, facecolor="none", edgecolor=PAPER, hatch=COSTLIEST.hatch
                )
            )
        weight = "bold" if row == worst else "normal"
        color = ALARM if row == worst else SOFT
        axes.annotate(
            show(left),
            (left, row + 0.5),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            weight=weight,
            color=color,
            annotation_clip=False,
        )
    axes.set_ylim(len(stages), 0)
    axes.set_yticks([row + 0.5 for row in range(len(stages))], [f"stage {row}" for row in range(len(stages))])
    axes.annotate(
        name,
        (0, 0.5),
        xycoords="axes fraction",
        xytext=(-54, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        size=9,
        weight="bold",
    )
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _counted(value: float, unit: str) -> str:
    """A number and its unit, which may be a plural such as "layers": "1 layer", "8 layers", "3.5 ms"."""
    plural = len(unit) > 2 and unit.endswith("s")
    return f"{number(value)} {unit[:-1] if plural and value == 1 else unit}"


def _words(title: str, stages: Mapping[str, Stages], show: Show) -> str:
    lines = [f"{title}."]
    for name, found in stages.items():
        each = [f"stage {k} {show(sum(stage))}, layers: {len(stage)}" for k, stage in enumerate(found)]
        lines.append(f"{name}: {'; '.join(each)}.")
    return " ".join(lines)
