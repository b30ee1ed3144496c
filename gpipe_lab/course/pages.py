"""The pages made from tables and executed chapters: glossary, formula sheet, claims. `make course` ends here.

python -m gpipe_lab.course.pages writes them into notebooks/; none is written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..plan.data import read
from .chapters import NOTEBOOKS, Chapter, chapters
from .claims import Claim, number
from .glossary import PAGE as GLOSSARY
from .glossary import page as glossary_page

FORMULAS = "formula_sheet.md"
CLAIMS = "claims.md"


@dataclass(frozen=True)
class Formula:
    """One row of the formula sheet. `claim` names the claim that measured it."""

    formula: str
    gives: str
    holds_when: str
    claim: str


def formulas() -> tuple[Formula, ...]:
    """The formulas of data/formulas.csv, in its order."""
    return tuple(Formula(**row) for row in read("formulas")[1])


def pages(made: tuple[Chapter, ...]) -> dict[str, str]:
    """File name -> Markdown of every page, from these chapters."""
    files = {chapter.number: chapter.path.name for chapter in made}
    claims = {claim.name: claim for chapter in made for claim in chapter.claims}
    return {
        GLOSSARY: glossary_page(files),
        FORMULAS: formula_page(formulas(), claims, files),
        CLAIMS: claims_page(tuple(claims.values()), files),
    }


def formula_page(sheet: tuple[Formula, ...], claims: dict[str, Claim], files: dict[str, str]) -> str:
    """The formula sheet, with the figures of the claims."""
    rows = [
        (
            f"**{entry.formula}**",
            entry.gives,
            entry.holds_when,
            _link(entry.claim[:2], files),
            _measured(claims.get(entry.claim)),
        )
        for entry in sheet
    ]
    head = (
        "# Formula sheet\n\n"
        "Every formula, when it holds, and what a chapter measured. P stages, M micro-batches, B rows in a "
        "batch, m in a micro-batch; Tf and Tb are the times of a stage's forward and backward of one "
        "micro-batch. Where bytes are counted, N ranks (D replicas) share L blocks of width h and T tokens; "
        "b is the bytes of a number or of a boundary, S and A those of the tensor named in the row. "
        f"See also the [glossary]({GLOSSARY}) and all [claims we checked]({CLAIMS}).\n"
    )
    columns = ("formula", "what it gives", "holds when", "chapter", "what was measured")
    return "\n".join([head, _markdown_table(columns, rows), ""])


def _measured(claim: Claim | None) -> str:
    """A chapter gives no verdict where the machine was too busy for one."""
    if claim is None:
        return "no verdict when the chapters were last run"
    return (
        f"{claim.text}: formula {_with_unit(claim.predicted, claim)}, "
        f"{claim.source} {_with_unit(claim.measured, claim)}"
    )


def claims_page(claims: tuple[Claim, ...], files: dict[str, str]) -> str:
    """Claims we checked, in the order of the chapters."""
    rows = [
        (
            _link(claim.chapter, files),
            claim.text,
            claim.formula,
            _with_unit(claim.predicted, claim),
            "" if claim.simulated is None else _with_unit(claim.simulated, claim),
            _with_unit(claim.measured, claim),
            claim.source,
            claim.verdict,
        )
        for claim in claims
    ]
    holding = sum(claim.holds for claim in claims)
    head = (
        "# Claims we checked\n\n"
        f"{len(claims)} claims, each measured by a cell of its chapter; {holding} hold. "
        "A *measured, paced* run shows order, messages, waiting and results; its times are set, so it is no "
        "evidence of speed. The figures are those of the machine on which the chapters were last run.\n"
    )
    columns = ("chapter", "claim", "formula", "predicted", "simulated", "measured", "how", "verdict")
    return "\n".join([head, _markdown_table(columns, rows), ""])


def _with_unit(value: float, claim: Claim) -> str:
    return f"{number(value)} {claim.unit}".rstrip()


def _link(chapter: str, files: dict[str, str]) -> str:
    return f"[{chapter}]({files[chapter]})"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bar would end the cell


def write(folder: Path = NOTEBOOKS) -> list[Path]:
    """Write every page into the folder of the chapters."""
    written = []
    for name, text in pages(chapters(folder)).items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    print(*write(), sep="\n")
