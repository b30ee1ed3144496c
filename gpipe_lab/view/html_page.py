"""One HTML page that holds everything: pictures inside it, each with its words, and tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .picture import Picture, img

if TYPE_CHECKING:
    import pandas

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: white; max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #dfe1e5; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 0.8rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #dfe1e5; text-align: right; }
th { text-align: left; } caption { text-align: left; color: #5f6368; padding: 0.3rem 0; }
figure { margin: 1rem 0; } figcaption { font-size: 0.85rem; color: #5f6368; max-width: 60rem; }
details > summary { cursor: pointer; } .wide { overflow-x: auto; } td:last-child { text-align: left; }
"""


class Section(NamedTuple):
    """A heading and what stands under it: paragraphs (plain text), and HTML made by the functions here."""

    heading: str
    parts: Sequence[str]


def page(title: str, sections: Sequence[Section]) -> str:
    body = "\n".join(
        f"<section><h2>{html.escape(section.heading)}</h2>\n" + "\n".join(section.parts) + "</section>"
        for section in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main><h1>{html.escape(title)}</h1>\n{body}\n</main></body></html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def figure(picture: Picture) -> str:
    """The picture with its description as alt text and as a caption on the page."""
    return f"<figure>{img(picture)}<figcaption>{html.escape(picture.alt)}</figcaption></figure>"


def table(frame: pandas.DataFrame, caption: str, *, index: bool = True, folded: bool = False) -> str:
    shown = frame.to_html(index=index, border=0, na_rep="", float_format=lambda x: f"{x:.4g}")
    shown = shown.replace(">", f"><caption>{html.escape(caption)}</caption>", 1)
    if folded:
        return f"<details><summary>{html.escape(caption)}</summary><div class=wide>{shown}</div></details>"
    return f"<div class=wide>{shown}</div>"
