"""Files to save from a panel: pictures, tables and traces as links that hold what they link to."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..plan.memory import MemoryReport
from ..plan.trace import Trace
from .picture import Picture
from .style import size_of


class File(NamedTuple):
    """A name with what is in it."""

    name: str
    mime: str
    data: bytes


MakeFile = Callable[
    [], File
]  # a large picture takes a second, so that whoever makes several can show how far


def files_of(name: str, picture: Picture, trace: Trace, memory: MemoryReport | None) -> list[MakeFile]:
    """A trace as PNG, SVG, CSV and Perfetto's JSON, and its memory as CSV; all named after `name`."""
    stem = _stem(name)
    found: list[MakeFile] = [
        *pictures_of(name, picture),
        lambda: File(f"{stem}.csv", "text/csv", trace.frame().to_csv(index=False).encode()),
        lambda: File(f"{stem}.perfetto.json", "application/json", _perfetto(trace)),
    ]
    if memory is not None and memory.rows:
        table = memory.frame
        found.append(lambda: File(f"{stem}_memory.csv", "text/csv", table().to_csv(index=False).encode()))
    return found


def pictures_of(name: str, picture: Picture) -> list[MakeFile]:
    """A picture as PNG and as SVG."""
    stem = _stem(name)
    return [
        lambda: File(f"{stem}.png", "image/png", picture.png()),
        lambda: File(f"{stem}.svg", "image/svg+xml", picture.svg().encode()),
    ]


def bar(done: int, total: int) -> str:
    """HTML: how many files are made."""
    return f'<progress max="{total}" value="{done}"></progress> {done} of {total} files made'


def _stem(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def links(files: list[File]) -> str:
    """HTML: a link for each file that saves it under its name. Nothing is asked of the kernel again."""
    items = (
        f'<li><a style="text-decoration:underline" download="{html.escape(file.name)}" '
        f'href="data:{file.mime};base64,{b64encode(file.data).decode()}">{html.escape(file.name)}</a> '
        f"({size_of(len(file.data))})</li>"
        for file in files
    )
    return f'<ul style="line-height:1.6;margin:4px 0">{"".join(items)}</ul>'


def _perfetto(trace: Trace) -> bytes:
    with TemporaryDirectory() as folder:
        return trace.to_chrome(Path(folder) / "trace.json").read_bytes()
