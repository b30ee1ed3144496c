"""A figure that carries its own description and shows itself once, on white, with its description."""

from __future__ import annotations

import html
import sys
import textwrap
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO, StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.transforms import Affine2D
from PIL import Image

from .style import DPI, INK, PAPER, SOFT, WIDTH, Key, glyphs, look, swatch

COLORS = 160  # of a saved picture: enough for its fills and their soft edges
KEY_SIZE = 8  # points of a legend's words


class Picture(Figure):
    """A matplotlib Figure outside pyplot, so that nothing displays it twice or keeps it alive.

    `alt` says in words what it shows, with its main numbers.
    """

    alt: str = ""

    def png(self, *, quick: bool = False) -> bytes:
        """The picture as PNG on an opaque white background; `quick` takes less time and more bytes."""
        return _png(self, quick=quick)

    def svg(self) -> str:
        """The picture as SVG on white, with its description; the same text for the same picture."""
        return _svg(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        return _bundle(self)

    def _ipython_display_(self) -> None:
        show(self)


def alt_text(figure: Figure) -> str:
    """What the figure shows, in words with its main numbers."""
    if isinstance(figure, Picture) and figure.alt:
        return figure.alt
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    return "Figure. " + ". ".join(titles) if titles else "Figure without a description."


def show(figure: Figure) -> None:
    """Display a figure on an opaque background, its description folded beneath it, and close it.

    The description is the image's alt text too, in the output's metadata; JupyterLab drops that, so the
    words stand on the page as well.
    """
    data, metadata = _bundle(figure)
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    from IPython.display import HTML, display

    display(data, metadata=metadata, raw=True)
    display(HTML(_words(alt_text(figure))))


def _bundle(figure: Figure) -> tuple[dict, dict]:
    """The picture as PNG, with its alt text beside it and in its metadata."""
    alt = alt_text(figure)
    described = {"alt": alt, "needs_background": "light"}
    data = {"image/png": b64encode(_png(figure)).decode(), "text/plain": alt}
    return data, {"image/png": described, "needs_background": "light"}


def _words(alt: str) -> str:
    return f"<details><summary>The figure in words</summary><p>{html.escape(alt)}</p></details>"


def img(figure: Figure, *, quick: bool = False) -> str:
    """HTML that shows the figure with its alt text, on white; `quick` takes less time and more bytes."""
    png = _png(figure, quick=quick)
    width, height = (round(inches * DPI) for inches in figure.get_size_inches())
    return (
        f'<img alt="{html.escape(alt_text(figure), quote=True)}" width="{width}" height="{height}" '
        'style="max-width:100%;height:auto;background:white" '
        f'src="data:image/png;base64,{b64encode(png).decode()}">'
    )


def _png(figure: Figure, *, quick: bool = False) -> bytes:
    drawn = BytesIO()
    with look():
        figure.savefig(
            drawn,
            format="png",
            dpi=DPI,
            facecolor=PAPER,
            transparent=False,
            pil_kwargs={"compress_level": 1},
        )
    if quick:
        return drawn.getvalue()
    small = BytesIO()
    image = Image.open(drawn).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def _svg(figure: Figure) -> str:
    drawn = StringIO()
    with look(), rc_context({"svg.hashsalt": "gpipe_lab"}):  # else every file has other ids
        figure.savefig(drawn, format="svg", facecolor=PAPER, transparent=False, metadata={"Date": None})
    label = html.escape(alt_text(figure), quote=True)
    return drawn.getvalue().replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


class Sheet:
    """Bands of axes under a title, laid out in inches, on one shared time axis."""

    def __init__(
        self,
        heights: Sequence[float],
        *,
        headline: str,
        subtitle: str = "",
        legends: Sequence[Sequence[Key]] = ((),),
        legend_above: Sequence[int] = (0,),
        width: float = WIDTH,
        left: float = 0.75,
        right: float = 0.15,
        gap: float = 0.09,
        share_x: bool = True,
    ) -> None:
        """`legends[i]` stands above band number `legend_above[i]`."""
        self.width, self.left, self.right = width, left, right
        lines = textwrap.wrap(subtitle, int((width - left - right) * 14.5)) or []
        top = 0.33 + 0.19 * len(lines)
        keys = {
            band: _rows(entries, width - left - right)
            for band, entries in zip(legend_above, legends, strict=True)
        }
        key_height = {band: 0.06 + 0.21 * len(rows) if rows else 0.05 for band, rows in keys.items()}
        bottom = 0.5
        total = top + sum(heights) + sum(key_height.values()) + gap * (len(heights) - 1) + bottom
        self.picture = Picture(figsize=(width, total), dpi=DPI)
        FigureCanvasAgg(self.picture)
        self.axes: list[Axes] = []
        self._text(0.1, total - 0.22, headline, size=11, weight="bold")
        for index, line in enumerate(lines):
            self._text(0.1, total - 0.42 - 0.19 * index, line, size=8.5, color=SOFT)
        y = total - top
        for band, height in enumerate(heights):
            if band in keys:
                for index, row in enumerate(keys[band]):
                    self._legend(row, y - 0.03 - 0.21 * index)
                y -= key_height[band]
            y -= height
            shared = self.axes[0] if self.axes and share_x else None
            place = (left / width, y / total, (width - left - right) / width, height / total)
            self.axes.append(self.picture.add_axes(place, sharex=shared))
            y -= gap

    @property
    def inner_points(self) -> float:
        """The width of the axes in points."""
        return (self.width - self.left - self.right) * 72

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        height = self.picture.get_figheight()
        self.picture.text(x / self.width, y / height, text, ha="left", va="baseline", **style)

    def _legend(self, entries: Sequence[Key], y: float) -> None:
        """A line of keys. By hand, since a matplotlib Legend takes a fifth of a quick redraw.

        Its words recur in every picture, so they are drawn as outlines, which are worked out once.
        """
        x = self.left
        place = self.picture.dpi_scale_trans
        for entry in entries:
            text, start, color = (entry, x, SOFT) if isinstance(entry, str) else (entry.label, x + 0.235, INK)
            if not isinstance(entry, str):
                self.picture.add_artist(swatch(entry, (x, y - 0.11), (0.18, 0.11), place))
            path, width = glyphs(text, KEY_SIZE)
            words = PathPatch(path, color=color, linewidth=0, label=text)
            words.set_transform(Affine2D().scale(1 / 72).translate(start + width / 144, y - 0.06) + place)
            self.picture.add_artist(words)
            x += _key_width(entry)


def _rows(entries: Sequence[Key], width: float) -> list[list[Key]]:
    """Legend entries broken into lines that fit `width` inches."""
    rows: list[list[Key]] = []
    used = width
    for entry in entries:
        need = _key_width(entry)
        if used + need > width:
            rows.append([])
            used = 0.0
        rows[-1].append(entry)
        used += need
    return rows


def _key_width(entry: Key) -> float:
    """The room that a legend's entry takes, in inches."""
    if isinstance(entry, str):
        return glyphs(entry, KEY_SIZE)[1] / 72 + 0.14
    return 0.235 + glyphs(entry.label, KEY_SIZE)[1] / 72 + 0.17
