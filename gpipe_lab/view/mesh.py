"""Ranks as a grid of replicas and stages, with the groups they talk in."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..planner.mesh import groups, place_of
from .picture import Picture, Sheet
from .style import INK, SOFT, Key, Line, Look, look

# Each kind of group differs in colour, hatch and place: lines down, arrows across, frames around.
STAGE = Look("a rank", "#d6e8f5", "#0072B2")
FIRST_OF_NODE = Look("a rank, its node's first", "#56B4E9", "#0072B2")
TENSOR = Look("tensor group", "white", "#00573F", "////")
PIPELINE = Line("pipeline group, across: activations and gradients", "-")
DATA = Line("data group, down: sums of gradients", (0, (1, 1.4)))
CELL, GAP, ROW = 0.8, 0.7, 1.0  # in units of the axes


def plot_mesh(
    num_replicas: int,
    num_stages: int,
    tensor_parallel: int = 1,
    *,
    ranks_per_node: int | None = None,
    title: str = "",
) -> Picture:
    """The ranks of D replicas (rows) × P stages (columns) × T parts of a stage (side by side in a frame).

    ranks_per_node: the first rank of each node is dark, so that one sees what stays within a node.
    """
    D, P, T = num_replicas, num_stages, tensor_parallel
    found = groups(D, P, T)
    keys: list[Key] = [STAGE, *([FIRST_OF_NODE] if ranks_per_node else []), *([TENSOR] if T > 1 else [])]
    keys += [PIPELINE] * (P > 1) + [DATA] * (D > 1)
    with look():
        sheet = Sheet(
            [0.36 * D + 0.1],
            headline=title or f"{D * P * T} ranks: {_sizes(D, P, T)}",
            subtitle="the number is the rank",
            legends=(keys,),
            left=1.0,
        )
        (axes,) = sheet.axes
        for rank in range(D * P * T):
            _cell(axes, rank, P, T, first=ranks_per_node is not None and rank % ranks_per_node == 0)
        _frames(axes, D, P, T)
        _links(axes, D, P, T)
        _dress(axes, D, P, T)
    shown = {kind: members for kind, members in found.items() if len(members[0]) > 1}
    listed = "; ".join(
        f"{kind} groups "
        + ", ".join("-".join(map(str, group)) for group in members[:4])
        + (f" and {len(members) - 4} more" if len(members) > 4 else "")
        for kind, members in shown.items()
    )
    node = f" {ranks_per_node} ranks a node." if ranks_per_node else ""
    sheet.picture.alt = f"Ranks as a grid: {_sizes(D, P, T)}. {listed}.{node}"
    return sheet.picture


def _sizes(D: int, P: int, T: int) -> str:
    words = [f"{D} replicas", f"{P} stages", *([f"{T} parts of a stage"] if T > 1 else [])]
    return " × ".join(words)


def _left(stage: int, tensor: int, T: int) -> float:
    return stage * (T * CELL + GAP) + tensor * CELL


def _cell(axes: Axes, rank: int, P: int, T: int, *, first: bool) -> None:
    place = place_of(rank, P, T)
    x, y = _left(place.pipeline, place.tensor, T), place.data * ROW
    style = FIRST_OF_NODE if first else STAGE
    axes.add_patch(
        Rectangle(
            (x, y - 0.3), CELL, 0.6, facecolor=style.face, edgecolor=style.edge, linewidth=0.8, zorder=3
        )
    )
    axes.text(x + CELL / 2, y, str(rank), ha="center", va="center", fontsize=8, color=INK, zorder=4)


def _frames(axes: Axes, D: int, P: int, T: int) -> None:
    if T == 1:
        return
    for replica in range(D):
        for stage in range(P):
            corner = (_left(stage, 0, T) - 0.1, replica * ROW - 0.39)
            axes.add_patch(
                Rectangle(
                    corner,
                    T * CELL + 0.2,
                    0.78,
                    facecolor=TENSOR.face,
                    edgecolor=TENSOR.edge,
                    hatch=TENSOR.hatch,
                    linewidth=0.8,
                    zorder=2,
                )
            )


def _links(axes: Axes, D: int, P: int, T: int) -> None:
    inset = 0.1 if T > 1 else 0.0
    for replica in range(D):
        for stage in range(P - 1):
            start, end = _left(stage, T, T) + inset, _left(stage + 1, 0, T) - inset
            axes.annotate(
                "",
                (end, replica * ROW),
                (start, replica * ROW),
                arrowprops={
                    "arrowstyle": "<|-|>",
                    "color": INK,
                    "linewidth": 0.8,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
    for stage in range(P if D > 1 else 0):
        for tensor in range(T):
            x = _left(stage, tensor, T) + CELL / 2
            axes.plot([x, x], [0, (D - 1) * ROW], color=INK, linestyle=DATA.dashes, linewidth=1.1, zorder=1)


def _dress(axes: Axes, D: int, P: int, T: int) -> None:
    axes.set_xlim(-0.2, max(_left(P - 1, T, T) + 0.2, 9.0))
    axes.set_ylim((D - 1) * ROW + 0.55, -0.55)
    axes.set_yticks([r * ROW for r in range(D)], [f"replica {r}" for r in range(D)], color=SOFT)
    middles = [_left(stage, 0, T) + T * CELL / 2 for stage in range(P)]
    axes.set_xticks(middles, [f"stage {stage}" for stage in range(P)])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
