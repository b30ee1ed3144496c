"""The glossary: one table, looked up in a cell, and the page that is made from it."""

from __future__ import annotations

import re

import pytest

from gpipe_lab import glossary
from gpipe_lab.course.chapters import NOTEBOOKS, chapters
from gpipe_lab.course.glossary import PAGE, Term, anchor, page, terms
from gpipe_lab.plan.data import read
from gpipe_lab.plan.errors import InputError


def test_the_page_is_made_from_the_table() -> None:
    files = {chapter.number: chapter.path.name for chapter in chapters()}
    assert (NOTEBOOKS / PAGE).read_text(encoding="utf-8") == page(files), (
        "run `python -m gpipe_lab.course.pages`"
    )


def test_terms_are_told_apart() -> None:
    names = [name.lower() for term in terms() for name in (term.term, *term.also) if len(name) > 1]
    assert sorted(set(names)) == sorted(names)
    anchors = [term.anchor for term in terms()]
    assert sorted(set(anchors)) == sorted(anchors)
    assert all(re.fullmatch(r"[a-z0-9-]+", found) for found in anchors)


def test_a_term_is_a_sentence_without_a_name_to_avoid() -> None:
    for term in terms():
        assert term.definition.endswith((".", ".)")) and len(term.definition.split()) > 4, term
        assert re.fullmatch(r"\d\d", term.chapter), term
        assert not set(term.avoid) & set(term.also), term


def test_no_row_of_the_table_is_lost() -> None:
    assert len(terms()) == len(read("glossary")[1])
    assert all(set(row) == {"term", "definition", "also", "avoid", "chapter"} for row in read("glossary")[1])


@pytest.mark.parametrize("term", terms(), ids=lambda term: term.anchor)
def test_every_name_is_found(term: Term) -> None:
    for name in (term.term, *term.also):
        assert glossary(name) is term


@pytest.mark.parametrize(
    ("word", "term"),
    [
        ("M", "number of micro-batches"),
        ("m", "micro-batch size"),
        ("in flight", "in-flight"),
        ("1f1b", "1F1B"),
        ("Bubble", "bubble"),
        ("tensor par", "tensor parallel"),
    ],
)
def test_a_word_is_found_however_it_is_written(word: str, term: str) -> None:
    assert glossary(word).term == term


def test_an_unknown_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"gl\.glossary\('bubble'\)"):
        glossary("bubbel")
    with pytest.raises(InputError, match=r"remedy: gl\.glossary\(\)"):
        glossary("")


def test_what_a_cell_shows() -> None:
    everything = glossary()
    assert all(term.term in repr(everything) for term in terms())
    shown = Term("a < b", "c & d", ("e",), (), "00")._repr_html_()
    assert "<b>a &lt; b</b>" in shown and "c &amp; d" in shown and "Also: e." in shown


def test_anchors_are_those_of_github() -> None:
    assert anchor("Bubble fraction") == "bubble-fraction"
    assert anchor("send, receive (P2P)") == "send-receive-p2p"
    headings = re.findall(r"^### (.+)$", page({}), re.MULTILINE)
    assert [anchor(heading) for heading in headings] == [term.anchor for term in terms()]
