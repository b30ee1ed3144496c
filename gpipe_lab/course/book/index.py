"""The site's search: every section of every page, and for every word the sections that hold it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from bs4 import BeautifulSoup, NavigableString, Tag

HEADINGS = ["h1", "h2", "h3", "h4"]
TITLE_WEIGHT = 8  # a word in a section's heading counts as much as so many in its text
MOST_IN_TEXT = 4  # more often than this a word says no more about a section


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
    for left_out in soup.select("script, style, math, a.anchor, .output_html table"):
        left_out.decompose()
    found = [Section(name, page, page, "")]
    texts: list[list[str]] = [[]]
    titles: set[int] = set()  # what belongs to a heading is no text
    for node in soup.descendants:
        if isinstance(node, Tag) and node.name in HEADINGS:
            found.append(Section(f"{name}#{node['id']}", node.get_text(" ", strip=True), page, ""))
            texts.append([])
            titles.update(map(id, node.descendants))
        elif isinstance(node, NavigableString) and id(node) not in titles:
            texts[-1].append(node)
    whole = [" ".join(" ".join(parts).split()) for parts in texts]
    return [replace(section, text=text) for section, text in zip(found, whole, strict=True) if text]


def words(text: str) -> list[str]:
    """What can be searched for: words in lower case, hyphenated ones also in parts."""
    found = re.findall(r"[^\W_]+(?:-[^\W_]+)*", text.lower())
    parts = [part for word in found if "-" in word for part in word.split("-")]
    return [*found, *parts]


def index_js(found: list[Section]) -> str:
    """search_index.js: `SECTIONS` and, for every word, [section, weight, section, weight, ...]."""
    weights: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number, section in enumerate(found):
        for word in words(section.title):
            weights[word][number] += TITLE_WEIGHT
        for word, times in Counter(words(section.text)).items():
            weights[word][number] += min(times, MOST_IN_TEXT)
    listed = [{"url": s.url, "title": s.title, "page": s.page, "text": s.text[:160]} for s in found]
    index = {
        word: [part for pair in sorted(by_section.items()) for part in pair]
        for word, by_section in sorted(weights.items())
    }
    return f"const SECTIONS = {_json(listed)};\nconst WORDS = {_json(index)};\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
