"""The one visual language: what a colour, a hatch and a number mean in every picture."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Transform

from ..plan.ops import Kind

INK = "#1a1a1a"
SOFT = "#5f6368"
FAINT = "#dfe1e5"
PAPER = "white"
ALARM = "#D55E00"


class Look(NamedTuple):
    """How one thing is filled. `edge` colours the outline and the hatch, `ink` the number on it."""

    label: str
    face: str
    edge: str
    hatch: str = ""
    ink: str = INK


class Line(NamedTuple):
    """A line in a legend."""

    label: str
    dashes: Any
    width: float = 1.1


Key = Look | Line | str  # what a legend can hold; a string is a heading


# Okabe-Ito, so chosen that forward (dark), recompute (hatched) and backward (light) stay apart in grey.
KINDS: dict[Kind, Look] = {
    Kind.F: Look("forward (F)", "#0072B2", "white", ink="white"),
    Kind.B: Look("backward (B)", "#F2B134", "white"),
    Kind.I: Look("backward_input (I)", "#E07B1F", "white"),
    Kind.W: Look("backward_weight (W)", "#FBE0A8", "#B8741A", "...."),
    Kind.R: Look("recompute (R)", "#5CBF9F", "#00573F", "////"),
}
WAITING = Look("waiting for a message", "white", "#a3a8ae", "\\\\\\\\")
IDLE = Look("idle", "white", "#c4c8cc")

# What is held, in the colour of the operation that made it.
CATEGORY_LOOKS: dict[str, Look] = {
    "parameters": Look("parameters", "#6b6f75", "white"),
    "gradients": Look("gradients", "#E07B1F", "white"),
    "optimizer": Look("optimizer", "#b3b7bd", "#4a4d52", "xx"),
    "buffers": Look("buffers", "#d9dbde", "#85898f", ".."),
    "communication": Look("communication", "#CC79A7", "#7d3a5e", "\\\\"),
    "boundary": Look("boundary", "#004B75", "#8cc5e8", "||"),
    "recomputed": Look("recomputed", "#5CBF9F", "#00573F", "////"),
    "saved": Look("saved", "#56B4E9", "white"),
    "outputs": Look("outputs", "#F0E442", "#8a8200", "--"),
    "deferred": Look("deferred", "#FBE0A8", "#B8741A", "...."),
}

# The parts of the idle time, as `take_apart` names them.
PARTS: dict[str, Look] = {
    "fill": Look("fill", "#9ecae9", "#1f5f8b", "//"),
    "middle": Look("middle", "#4a6f8a", "white", ink="white"),
    "drain": Look("drain", "#d6e6f2", "#1f5f8b", "\\\\"),
    "imbalance": Look("imbalance", "#E07B1F", "white", "", "white"),
    "communication": Look("communication", "#CC79A7", "#7d3a5e", "xx"),
    "recompute": Look("recompute", "#5CBF9F", "#00573F", "...."),
}

# Curves that stand side by side: colour, dashes and marker all differ.
CURVES = (
    ("#0072B2", "-", "o"),
    ("#E07B1F", "--", "s"),
    ("#007A5A", "-.", "^"),
    ("#8E4A73", ":", "D"),
    ("#1a1a1a", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#6b6f75", (0, (1, 1)), "P"),
)

DPI = 110
WIDTH = 9.5  # inches: a notebook's column
SIZES = (8.5, 7.5, 6.5, 5.5)  # points of the numbers in cells, largest first

_RC: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.hinting": "none",  # letters keep their true widths, and are drawn in three quarters of the time
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8.5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "savefig.transparent": False,
}


_drawing = threading.RLock()  # matplotlib's settings belong to the process, so one thread draws at a time
_NO_LOOK = ("backend", "interactive", "toolbar", "webagg", "tk", "timezone", "date.epoch", "savefig.dir")
# Beginning with matplotlib's own defaults, so that nothing of the learner's settings changes a picture.
_LOOK = {k: v for k, v in dict.items(matplotlib.rcParamsDefault) if not k.startswith(_NO_LOOK)} | _RC


@contextmanager
def look() -> Iterator[None]:
    """Draw within this: fonts, line widths and an opaque white background, whatever the learner's theme.

    The learner's settings are back afterwards, as they were.
    """
    with _drawing:
        before = dict.copy(matplotlib.rcParams)
        try:
            dict.update(matplotlib.rcParams, _LOOK)  # checked when they were made: half a picture's time
            yield
        finally:
            dict.update(matplotlib.rcParams, before)


def swatch(
    key: Look | Line, corner: tuple[float, float], size: tuple[float, float], transform: Transform
) -> Artist:
    """The sample beside a legend's text, with its lower left corner at `corner`."""
    (x, y), (width, height) = corner, size
    if isinstance(key, Line):
        middle = [y + height / 2] * 2
        return Line2D(
            [x, x + width], middle, color=INK, linestyle=key.dashes, linewidth=key.width, transform=transform
        )
    edge = key.edge if key.hatch or key is IDLE else key.face
    return Rectangle(
        corner,
        width,
        height,
        facecolor=key.face,
        edgecolor=edge,
        hatch=key.hatch or None,
        linewidth=0.6,
        transform=transform,
    )


@lru_cache(maxsize=2048)
def glyphs(text: str, size: float) -> tuple[Path, float]:
    """`text` as an outline centred on the origin, in points, and its width."""
    path = TextPath((0, 0), text, size=size, prop=FontProperties(family="DejaVu Sans"))
    box = path.get_extents()
    height = size * 0.73  # of a digit, so that all numbers share one base line
    centred = path.vertices - [(box.x0 + box.x1) / 2, height / 2]
    return Path(centred, path.codes), box.width


def fitting_size(labels: Sequence[str], widths: Sequence[float], sizes: Sequence[float]) -> float | None:
    """The largest size at which nine in ten of the labels fit their cells (widths in points), if any."""
    for size in sizes:
        fits = sum(glyphs(label, size)[1] + 2.5 <= width for label, width in zip(labels, widths, strict=True))
        if fits >= 0.9 * len(labels):
            return size
    return None


def number(value: float) -> str:
    """Three significant digits, without an exponent: 14, 3.25, 333."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size_of(num_bytes: float) -> str:
    """Bytes for reading: 512 B, 1.5 KiB, 20 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}" if abs(num_bytes) < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def binary_step(highest: float, most: int = 6) -> float:
    """The distance of ticks up to `highest` bytes: a power of two, at most so many, and over half as many."""
    return 2.0 ** math.ceil(math.log2(max(highest, 1.0) / most))


def join(parts: Iterable[str]) -> str:
    return " · ".join(part for part in parts if part)
