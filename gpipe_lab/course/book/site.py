"""A folder of pages: a start page with the map, the chapters, glossary, formula sheet, claims, search."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from ...plan.data import PACKAGE
from ..chapters import NOTEBOOKS, Chapter, chapters, map_markdown
from .index import index_js, sections
from .render import FILES, RENDERERS, code_css, markdown_html

ASSETS = Path(__file__).parent / "assets"
ALT = (
    "A Gantt chart of GPipe with four stages and eight micro-batches, measured and paced; beneath it what "
    "each rank held."
)
INTRODUCTION = f"""# gpipe_lab

An interactive course on GPipe pipeline parallelism in which what is claimed is run. These pages show the
chapters as they were last executed. To move the sliders and to be graded, open the notebooks: `make lab`.

![{ALT}](../data/runs/gpipe_p4_m8.png)

## Map of the course

"""


@dataclass(frozen=True)
class Page:
    """One page: its file in the site, its title in the navigation, its HTML."""

    name: str
    title: str
    content: str


def write(folder: Path, notebooks: Path = NOTEBOOKS) -> list[Path]:
    """Write the site into `folder`, over an earlier one that may be there. Returns the pages' paths."""
    made = chapters(notebooks)
    pages = [
        Page("index.html", "Start", markdown_html(INTRODUCTION + map_markdown(made))),
        *_pages(made, notebooks),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for asset in ("book.css", "search.js"):
        shutil.copy(ASSETS / asset, folder)
    with (folder / "book.css").open("a", encoding="utf-8") as css:
        css.write(code_css())
    for page in pages:
        _copy_files(page.content, folder)
    found = [section for page in pages for section in sections(page.name, page.title, page.content)]
    (folder / "search_index.js").write_text(index_js(found), encoding="utf-8")
    shell = Template((ASSETS / "page.html").read_text(encoding="utf-8"))
    for page in pages:
        text = shell.substitute(
            title=escape(page.title), navigation=_navigation(pages, page), content=page.content
        )
        (folder / page.name).write_text(text, encoding="utf-8")
    return [folder / page.name for page in pages]


def _copy_files(content: str, folder: Path) -> None:
    """What a page leads to outside the notebooks. Raises FileNotFoundError for a link to nothing."""
    for name in re.findall(rf'(?:href|src)="{FILES}([^"#]+)', content):
        copy = folder / FILES / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE.parent / name, copy)


def _pages(made: tuple[Chapter, ...], notebooks: Path) -> list[Page]:
    titles = {chapter.path: f"{chapter.number} · {chapter.title}" for chapter in made}
    titles |= {path: _title(path) for path in sorted(notebooks.glob("*.md"))}
    return [Page(f"{path.stem}.html", title, RENDERERS[path.suffix](path)) for path, title in titles.items()]


def _title(path: Path) -> str:
    """The first heading of a Markdown page."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _navigation(pages: list[Page], current: Page) -> str:
    def item(page: Page) -> str:
        mark = ' aria-current="page"' if page is current else ""
        return f'<li><a href="{page.name}"{mark}>{escape(page.title)}</a></li>'

    items = map(item, pages)
    return "\n".join(["<ul>", *items, "</ul>"])
