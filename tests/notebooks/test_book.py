"""`make book`: pages that hang together, need no network, are described, and can be searched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup

from gpipe_lab.course.book.index import index_js, sections, words
from gpipe_lab.course.book.render import in_site, markdown_html
from gpipe_lab.course.book.site import write
from gpipe_lab.course.chapters import chapters
from gpipe_lab.course.glossary import terms


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, BeautifulSoup]:
    return {path.name: BeautifulSoup(path.read_text("utf-8"), "html.parser") for path in site.glob("*.html")}


def is_elsewhere(url: str) -> bool:
    return url.startswith(("https://", "data:", "mailto:"))


def test_every_chapter_and_page_is_there(pages: dict[str, BeautifulSoup]) -> None:
    expected = {f"{chapter.path.stem}.html" for chapter in chapters()}
    beside = {"index", "glossary", "formula_sheet", "claims", "instructor"}
    assert pages.keys() == expected | {f"{name}.html" for name in beside}


def test_no_link_is_broken(site: Path, pages: dict[str, BeautifulSoup]) -> None:
    anchors = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}
    links = [
        (name, str(tag.get("href") or tag.get("src")))
        for name, page in pages.items()
        for tag in page.find_all(["a", "img", "link", "script"])
        if tag.get("href") or tag.get("src")
    ]
    broken = []
    for name, url in links:
        if is_elsewhere(url):
            continue
        path, _, fragment = url.partition("#")
        target = path or name
        if not (site / target).is_file() or (fragment and fragment not in anchors[target]):
            broken.append(f"{name}: {url}")
    assert len(links) > 100
    assert broken == []


def test_nothing_comes_from_the_network(pages: dict[str, BeautifulSoup]) -> None:
    """Only links that a reader follows may lead elsewhere."""
    for name, page in pages.items():
        loaded = [*page.find_all(["script", "img", "iframe"], src=True), *page.find_all("link")]
        urls = [str(tag.get("src") or tag.get("href")) for tag in loaded]
        assert [url for url in urls if "//" in url and not url.startswith("data:")] == [], name


def test_ids_are_unique_and_headings_can_be_linked(pages: dict[str, BeautifulSoup]) -> None:
    for name, page in pages.items():
        ids = [tag["id"] for tag in page.find_all(id=True)]
        assert sorted(set(ids)) == sorted(ids), name
        assert len(page.find_all("h1")) == 1, name


def test_every_image_is_described(pages: dict[str, BeautifulSoup]) -> None:
    images = [(name, image) for name, page in pages.items() for image in page.find_all("img")]
    assert len(images) > 20
    assert [name for name, image in images if len(str(image.get("alt", "")).split()) < 3] == []


def test_no_widget_is_left_and_each_panel_is_announced(pages: dict[str, BeautifulSoup]) -> None:
    for name, page in pages.items():
        assert "widget-view" not in str(page), name
    panels = [name for name, page in pages.items() if "a live panel stands here" in page.get_text()]
    assert len(panels) >= 4


def test_formulas_are_drawn_by_the_browser_itself(pages: dict[str, BeautifulSoup]) -> None:
    chapter = pages["03_micro_batches.html"]
    assert len(chapter.find_all("math")) > 10
    for name, page in pages.items():
        for left_out in page.find_all(["pre", "code"]):
            left_out.decompose()
        assert "$" not in page.get_text(), name


def test_links_stay_in_the_site() -> None:
    assert in_site("03_micro_batches.ipynb#the-idea") == "03_micro_batches.html#the-idea"
    assert in_site("glossary.md#bubble") == "glossary.html#bubble"
    assert in_site("../README.md") == "index.html"
    assert in_site("#here") == "#here"
    assert in_site("../data/train.toml#L3") == "repository/data/train.toml#L3"
    assert in_site("https://a.b/c.md") == "https://a.b/c.md"


def test_markdown_becomes_mathml_and_anchors() -> None:
    html = markdown_html("## The *idea*, told\n\n$$a_b$$ and $x < y$ [w](glossary.md#bubble)")
    assert 'id="the-idea-told"' in html
    assert html.count("<math") == 2 and 'display="block"' in html
    assert "&lt;" in html or "&#x0003C;" in html
    assert 'href="glossary.html#bubble"' in html
    assert 'id="why"' in (twice := markdown_html("## Why?\n\n## Why?")) and 'id="why-1"' in twice


def test_sections_and_their_words() -> None:
    page = '<p>before</p><h1 id="a">Title</h1><p>one two</p><h2 id="b">In-flight</h2><p>two two two</p>'
    found = sections("p.html", "Page", page)
    assert [(s.url, s.title, s.text) for s in found] == [
        ("p.html", "Page", "before"),
        ("p.html#a", "Title", "one two"),
        ("p.html#b", "In-flight", "two two two"),
    ]
    assert words("The In-flight 1F1B, a") == ["the", "in-flight", "1f1b", "a", "in", "flight"]
    index = json.loads(index_js(found).splitlines()[1].removeprefix("const WORDS = ").removesuffix(";"))
    assert index["two"] == [1, 1, 2, 3]
    assert index["flight"] == [2, 8]


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = launched.new_context(offline=True)
        yield context
        launched.close()


def test_pages_load_without_network_and_without_a_complaint(site: Path, browser: Any) -> None:
    complaints: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: complaints.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"{page.url}: {request.url[:100]}"))
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        unseen = "document.querySelectorAll('img').values().filter(i => !i.naturalWidth).toArray().length"
        assert page.evaluate(unseen) == 0, path.name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path.name} is too wide"
    assert complaints == []
    page.close()


def test_search_finds_a_term_and_leads_to_it(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("bubble frac")
    first = page.locator("#found a").first
    assert first.inner_text() == "Glossary: bubble fraction"
    first.click()
    page.wait_for_url("**/glossary.html#bubble-fraction")
    assert page.locator("#bubble-fraction").is_visible()
    page.fill("#search", "no-such-word-anywhere")
    assert page.locator("#found a").count() == 0
    assert page.locator("#found-count").inner_text() == "nothing found"
    page.close()


def test_search_finds_every_term_of_the_glossary(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    hits = page.evaluate(
        "names => names.map(name => find(name).map(hit => hit.url))", [t.term for t in terms()]
    )
    missed = [
        term.term
        for term, urls in zip(terms(), hits, strict=True)
        if f"glossary.html#{term.anchor}" not in urls
    ]
    assert missed == []
    page.close()
