"""A model's layers on their stages."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..plan.ops import Kind
from ..plan.partition import uniform
from .picture import Picture, Sheet
from .style import INK, KINDS, SOFT, Look, look

LAYER = Look("a layer", "#d6e8f5", "#0072B2")
STAGE = Look("a stage, on one rank", "white", "#5f6368")
GAP = 0.09  # between stages, as a share of the width


def plot_cut(num_layers: int, num_stages: int, *, title: str = "") -> Picture:
    """`num_layers` equal layers cut into `num_stages` stages of neighbours, and what passes between them.

    Raises `InputError` where there are fewer layers than stages.
    """
    stages = uniform(num_layers, num_stages)
    width = (1 - GAP * (num_stages - 1)) / num_stages
    with look():
        sheet = Sheet(
            [1.35],
            headline=title or f"{num_layers} layers on {num_stages} stages",
            subtitle="to the right: activations, forward · to the left: their gradients, backward",
            legends=([LAYER],),
            left=0.2,
        )
        (axes,) = sheet.axes
        for index, layers in enumerate(stages):
            x = index * (width + GAP)
            _stage(axes, x, width, layers, f"stage {index}, rank {index}")
            if index:
                _arrow(axes, x - GAP, x, 0.62, KINDS[Kind.F])
                _arrow(axes, x, x - GAP, 0.38, KINDS[Kind.B])
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.2, 1.2)
        axes.set_axis_off()
    held = ", ".join(f"stage {i}: layers {r.start} to {r.stop - 1}" for i, r in enumerate(stages))
    sheet.picture.alt = (
        f"{num_layers} layers cut into {num_stages} stages. {held}. Activations pass from each stage to the "
        "next, gradients back; no other stages talk."
    )
    return sheet.picture


def _stage(axes: Axes, x: float, width: float, layers: range, name: str) -> None:
    axes.add_patch(
        Rectangle((x, 0.15), width, 0.7, facecolor=STAGE.face, edgecolor=STAGE.edge, linewidth=1.2)
    )
    each = width / (len(layers) + 1)
    for index in range(len(layers)):
        corner = (x + each * (index + 0.5) + each * 0.12, 0.25)
        axes.add_patch(
            Rectangle(corner, each * 0.76, 0.5, facecolor=LAYER.face, edgecolor=LAYER.edge, linewidth=0.8)
        )
    middle = x + width / 2
    axes.text(middle, 0.98, name, ha="center", va="center", color=INK)
    span = f"layers {layers.start}–{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
    axes.text(middle, 0.02, span, ha="center", va="center", fontsize=8, color=SOFT)


def _arrow(axes: Axes, start: float, end: float, y: float, style: Look) -> None:
    axes.annotate(
        "",
        (end, y),
        (start, y),
        arrowprops={"arrowstyle": "-|>", "color": style.face, "linewidth": 2, "shrinkA": 2, "shrinkB": 2},
    )
