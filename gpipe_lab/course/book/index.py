"""The site's search: every section of every page, and for every word the sections that hold it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass

from bs4 import BeautifulSoup

TITLE_WEIGHT = 8  # a word in a section's heading counts as much as so many in its text
MOST_HITS = 9


@dataclass(frozen=True)
class Section:
    """From one heading to the next. `url` leads to the heading."""

    url: str
    title: str
    page: str
    text: str


def sections(name: str, page: str, html: str) -> list[Section]:
    """The sections of one page of the site, file `name`, title `page`."""
    soup = BeautifulSoup(html, "html.parser")
    for left_out in soup.select("script, style, math annotation, a.anchor, .output_html table"):
        left_out.decompose()
    parts: list[tuple[str, str, list[str]]] = [(name, page, [])]
    for node in soup.descendants:
        tag = getattr(node, "name", None)
        if tag in ("h1", "h2", "h3", "h4"):
            parts.append((f"{name}#{node.get('id', '')}", node.get_text(" ", strip=True), []))  # type: ignore[attr-defined]
        elif tag is None:
            parts[-1][2].append(str(node))
    return [
        Section(url, title, page, " ".join(" ".join(texts).split()))
        for url, title, texts in parts
        if "".join(texts).strip()
    ]


def words(text: str) -> list[str]:
    """What can be searched for: words of two letters or more in lower case, hyphenated ones also in parts."""
    found = re.findall(r"[^\W_]+(?:-[^\W_]+)*", text.lower())
    parts = [part for word in found if "-" in word for part in word.split("-")]
    return [word for word in (*found, *parts) if len(word) > 1]


def index_js(found: list[Section]) -> str:
    """search_index.js: `SECTIONS` and, for every word, [section, weight, section, weight, ...]."""
    weights: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number, section in enumerate(found):
        for word in words(section.title):
            weights[word][number] += TITLE_WEIGHT
        for word in words(section.text):
            weights[word][number] = min(weights[word][number] + 1, TITLE_WEIGHT + MOST_HITS)
    listed = [{"url": s.url, "title": s.title, "page": s.page, "text": s.text[:160]} for s in found]
    index = {
        word: [part for pair in sorted(by_section.items()) for part in pair]
        for word, by_section in sorted(weights.items())
    }
    return f"const SECTIONS = {_json(listed)};\nconst WORDS = {_json(index)};\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
