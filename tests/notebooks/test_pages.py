"""Glossary links, the formula sheet and the table of claims agree with the executed chapters."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_lab.course.chapters import NOTEBOOKS, Chapter, chapters, claims_table
from gpipe_lab.course.claims import Claim
from gpipe_lab.course.glossary import anchor, terms
from gpipe_lab.course.pages import claims_page, formula_page, formulas, pages, write
from gpipe_lab.plan.data import read

CHAPTERS = chapters()
REMEDY = "run `python -m gpipe_lab.course.pages` (`make course` does)"


def source(chapter: Chapter) -> str:
    cells = json.loads(chapter.path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("name", pages(CHAPTERS))
def test_the_committed_page_is_the_one_that_is_made(name: str) -> None:
    assert (NOTEBOOKS / name).read_text(encoding="utf-8") == pages(CHAPTERS)[name], REMEDY


def test_pages_are_written_beside_the_chapters(tmp_path: Path) -> None:
    for chapter in CHAPTERS:
        shutil.copy(chapter.path, tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in write(tmp_path)} == pages(CHAPTERS)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)
def test_links_to_the_glossary_lead_to_a_term(chapter: Chapter) -> None:
    known = {term.anchor for term in terms()}
    links = re.findall(r"\]\(glossary\.md#([^)]*)\)", source(chapter))
    assert [link for link in links if link not in known] == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)
def test_a_chapter_says_what_it_is(chapter: Chapter) -> None:
    assert chapter.title and chapter.question.endswith("?")
    assert chapter.minutes is not None and chapter.minutes.total > 0
    if chapter.executed_s is not None:  # executed by `make course`
        assert chapter.executed_s <= 60 * chapter.minutes.run
        assert chapter.first_picture_s <= 5
        assert chapter.longest_cell_s <= 30
    assert all(name.startswith(chapter.number) for name in chapter.predictions)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)
def test_every_claim_of_a_chapter_is_recorded_and_holds(chapter: Chapter) -> None:
    named = set(re.findall(r"gl\.claim\(\s*\"([^\"]+)\"", source(chapter)))
    assert chapter.claims, "the last cell does not display gl.claims()"
    assert named <= {claim.name for claim in chapter.claims}
    assert [repr(claim) for claim in chapter.claims if not claim.holds] == []


def test_every_formula_is_measured_by_a_claim() -> None:
    known = {claim.name for chapter in CHAPTERS for claim in chapter.claims}
    assert [entry.claim for entry in formulas() if entry.claim not in known] == []
    assert all(entry.formula and entry.gives and entry.holds_when for entry in formulas())
    assert len(formulas()) == len(read("formulas")[1])
    assert len({(entry.formula, entry.gives) for entry in formulas()}) == len(formulas())


CLAIM = Claim("03 x", "a text", "a|b", 2, None, 3.5, 1, "ms", True)


def test_the_formula_sheet_shows_the_measured_figure() -> None:
    entry = replace(formulas()[0], formula="f", gives="g", holds_when="h", claim="03 x")
    page = formula_page((entry,), {"03 x": CLAIM}, {"03": "03_y.ipynb"})
    row = "| **f** | g | h | [03](03_y.ipynb) | a text: formula 2 ms, measured, paced 3.5 ms |"
    assert page.splitlines()[-1] == row
    without = formula_page((replace(entry, claim="03 z"),), {"03 x": CLAIM}, {"03": "03_y.ipynb"})
    assert (
        without.splitlines()[-1]
        == "| **f** | g | h | [03](03_y.ipynb) | no verdict when the chapters were last run |"
    )


def test_the_page_of_claims_says_what_missed() -> None:
    page = claims_page((CLAIM, replace(CLAIM, measured=2)), {"03": "03_y.ipynb"})
    assert "2 claims" in page and "1 hold" in page
    assert r"| a text | a\|b | 2 ms |  | 3.5 ms | measured, paced | off by 1.5 ms |" in page


def test_the_course_has_one_table_of_claims() -> None:
    recorded = [claim.name for chapter in CHAPTERS for claim in chapter.claims]
    assert [name for name in claims_table().name if name in recorded] == recorded
    assert len(set(recorded)) == len(recorded)


def test_headings_of_pages_can_be_linked() -> None:
    for text in pages(CHAPTERS).values():
        anchors = [anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
        assert len(set(anchors)) == len(anchors)
