"""Who waits for whom: a schedule's operations in program order, and the circle in which it hangs."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..plan.ops import COMPUTE, TRANSFERS, Op
from ..plan.schedule import Schedule
from ..plan.walk import Walk
from .picture import Picture, Sheet
from .style import ALARM, FAINT, INK, KINDS, PAPER, SOFT, Look, join, look

MOST_OPS = 24  # in a row, so that their names can be read
FEWEST_OPS = 8  # that a row has room for

RAN = Look("sent or received", "#d9dbde", "#85898f")
HELD_UP = Look("not reached, or posted and not begun", PAPER, "#85898f", "..")
IN_CIRCLE = Look("waits in the circle", "#FBE3D3", ALARM)
HEIGHT = 0.52  # of an operation, where rows are 1 apart: room for arrows between them


def plot_waiting(schedule: Schedule, *, title: str | None = None) -> Picture:
    """Every rank's operations from left to right in program order, as far as they come.

    What could run is filled, what could not is pale. In a schedule that hangs, the operations that wait for
    each other in a circle are outlined, with an arrow from each to the one that it waits for. It is the
    circle that `validate` names. The horizontal axis is the order on each rank, not time.
    """
    walked = schedule.walked
    circle = walked.circle
    shown = [row[:MOST_OPS] for row in schedule.ops]
    kinds = {op.kind for row in shown for op in row if op.kind in COMPUTE}
    with look():
        sheet = Sheet(
            [0.75 * schedule.num_ranks],
            headline=title or f"{schedule.name}: {'a circle of waiting' if circle else 'every rank ends'}",
            subtitle=_subtitle(schedule, walked),
            legends=[
                [
                    *(KINDS[kind] for kind in KINDS if kind in kinds),
                    RAN,
                    *([HELD_UP, IN_CIRCLE] if circle else []),
                ]
            ],
        )
        (axes,) = sheet.axes
        _dress(axes, shown)
        done = set(walked.ops)
        for rank, row in enumerate(shown):
            for place, op in enumerate(row):
                _draw_op(axes, op, place, rank, schedule, ran=op in done, circled=op in circle)
        places = {op: (place + 0.5, rank) for rank, row in enumerate(shown) for place, op in enumerate(row)}
        for op, awaited in zip(circle, circle[1:] + circle[:1], strict=True):
            if op in places and awaited in places:
                _draw_arrow(axes, places[op], places[awaited])
    sheet.picture.alt = _describe(schedule, walked, circle)
    return sheet.picture


def _subtitle(schedule: Schedule, walked: Walk) -> str:
    total = sum(len(row) for row in schedule.ops)
    return join(
        [
            f"P = {schedule.num_stages}, M = {schedule.num_microbatches}",
            f"{len(walked.ops)} of {total} operations run",
            "left to right: each rank's own order, not time",
            f"the first {MOST_OPS} of a row" if max(map(len, schedule.ops)) > MOST_OPS else "",
        ]
    )


def _dress(axes: Axes, rows: list[tuple[Op, ...]]) -> None:
    axes.set_xlim(0, max(FEWEST_OPS, *map(len, rows)))
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xticks([])
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_op(
    axes: Axes, op: Op, place: int, rank: int, schedule: Schedule, *, ran: bool, circled: bool
) -> None:
    filled = RAN if op.kind in TRANSFERS else KINDS[op.kind]
    face = IN_CIRCLE.face if circled else filled.face if ran else PAPER
    axes.add_patch(
        Rectangle(
            (place + 0.05, rank - HEIGHT / 2),
            0.9,
            HEIGHT,
            facecolor=face,
            edgecolor=ALARM if circled else SOFT if ran else FAINT,
            linewidth=2.4 if circled else 0.7,
            hatch=None if ran or circled else HELD_UP.hatch,
            zorder=3 if circled else 2,
        )
    )
    label = schedule.label(op).replace("SEND_", "send\n").replace("RECV_", "recv\n")
    ink = filled.ink if ran else INK
    paper = None if ran or circled else {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
    axes.text(
        place + 0.5, rank, label, ha="center", va="center", fontsize=7.5, color=ink, bbox=paper, zorder=4
    )


def _draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From an operation to the one that it waits for: down on the right, up on the left, or along its row."""
    (x, row), (to_x, to_row) = start, end
    way = 1 if (to_row, to_x) > (row, x) else -1
    if row == to_row:
        ends = (x + 0.4 * way, row), (to_x - 0.4 * way, row)
    else:
        ends = (x + 0.2 * way, row + way * HEIGHT / 2), (to_x + 0.2 * way, to_row - way * HEIGHT / 2)
    axes.add_patch(
        FancyArrowPatch(
            *ends,
            arrowstyle="-|>",
            shrinkA=0,
            shrinkB=0,
            mutation_scale=11,
            color=ALARM,
            linewidth=1.6,
            zorder=5,
        )
    )


def _describe(schedule: Schedule, walked: Walk, circle: list[Op]) -> str:
    total = sum(len(row) for row in schedule.ops)
    start = (
        f"Each rank's operations in program order. {schedule.name}, P = {schedule.num_stages}, "
        f"M = {schedule.num_microbatches}; {len(walked.ops)} of {total} operations run. "
    )
    if not circle:
        return start + "Every rank ends."
    waits = "; ".join(
        f"rank {schedule.rank_of[op]} stands at {op} and waits for {awaited} "
        f"of rank {schedule.rank_of[awaited]}"
        for op, awaited in zip(circle, circle[1:] + circle[:1], strict=True)
    )
    return start + f"A circle: {waits}."
