"""From a notebook or a Markdown page to HTML that needs no network: nbconvert, with formulas as MathML."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert as mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

from ..glossary import anchor

FILES = "repository/"  # where the site has those files of the repository that a page leads to
PANEL = "*In the notebook a live panel stands here. The same views follow as figures.*"


class PageRenderer(IPythonRenderer):
    """Markdown with formulas as MathML, headings with GitHub's anchors, and links that stay in the site."""

    def __init__(self, seen: Counter[str], **options: Any) -> None:
        """`seen` counts the anchors of the page: a second one of a name gets -1, as on GitHub."""
        super().__init__(escape=False, **options)
        self._seen = seen

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        plain = anchor(re.sub(r"<[^>]+>", "", text))
        name = f"{plain}-{self._seen[plain]}" if self._seen[plain] else plain
        self._seen[plain] += 1
        link = f'<a class="anchor" href="#{name}" aria-label="link to here">¶</a>'
        return f'<h{level} id="{name}">{text}{link}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, in_site(url), title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return super().image(text, in_site(url), title)

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, display="block")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display="block")


def in_site(url: str) -> str:
    """Where a link of a chapter leads: to another page's HTML, a file's copy, or, unchanged, elsewhere.

    >>> in_site("03_micro_batches.ipynb#the-idea"), in_site("glossary.md#bubble"), in_site("https://a.b/c.md")
    ('03_micro_batches.html#the-idea', 'glossary.html#bubble', 'https://a.b/c.md')
    >>> in_site("../data/train.toml")
    'repository/data/train.toml'
    """
    path, mark, fragment = url.partition("#")
    if not _is_local(url) or not path:
        return url
    if Path(path).suffix not in (".ipynb", ".md"):
        return FILES + posixpath.normpath(posixpath.join("notebooks", path)) + mark + fragment
    page = "index" if Path(path).name == "README.md" else Path(path).stem
    return f"{page}.html{mark}{fragment}"


def _is_local(url: str) -> bool:
    return re.match(r"[a-z]+:", url) is None


def markdown_html(text: str, seen: Counter[str] | None = None) -> str:
    """A page's Markdown, or a part of it if `seen` goes from part to part."""
    return MarkdownWithMath(renderer=PageRenderer(Counter() if seen is None else seen)).render(text)


def notebook_html(path: Path) -> str:
    """The cells of an executed notebook, outputs included, as a fragment of HTML."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [shown for cell in notebook.cells for shown in _with_panel_named(cell)]
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.register_filter("markdown2html", partial(markdown_html, seen=Counter()))
    # Code is what is cleaned here, and pygments has escaped it; cleaning would take a quarter of all time.
    exporter.register_filter("clean_html", lambda html: html)
    fragment, _ = exporter.from_notebook_node(notebook)
    return fragment


def _with_panel_named(cell: Any) -> list[Any]:
    """A live panel cannot work on a page: a sentence says so, and the static twin follows in the chapter."""
    if cell.cell_type == "code" and re.search(r"gl\.(Explorer|explore)\b", cell.source) and not cell.outputs:
        return [cell, nbformat.v4.new_markdown_cell(PANEL)]
    return [cell]


def code_css() -> str:
    """The colors of highlighted code."""
    return HtmlFormatter(style="default").get_style_defs(".highlight")


Renderer = Callable[[Path], str]
RENDERERS: dict[str, Renderer] = {
    ".ipynb": notebook_html,
    ".md": lambda path: markdown_html(path.read_text(encoding="utf-8")),
}
