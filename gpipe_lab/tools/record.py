"""What a benchmark leaves: figures with their spread, and the table that sets them beside torch's."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

OURS, TORCH, PACED = "gpipe_lab", "torch", ", paced"
LONGER = "torch's time over gpipe_lab's"


@dataclass(frozen=True)
class Figure:
    """One measured value: the median of `repeats`, with the smallest and the largest."""

    what: str
    engine: str
    value: float
    unit: str
    least: float
    most: float
    repeats: int


def figure(what: str, engine: str, values: list[float], unit: str) -> Figure:
    return Figure(what, engine, median(values), unit, min(values), max(values), len(values))


def origin() -> str:
    """Where a record comes from, in one line."""
    return (
        f"{time.strftime('%Y-%m-%d')}; python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}"
    )


def write(figures: Iterable[Figure], path: Path) -> None:
    """As CSV, its origin in the first line."""
    import pandas

    table = pandas.DataFrame([asdict(f) for f in figures])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {origin()}\n" + table.to_csv(index=False, float_format="%.4f"), encoding="utf-8")


def read(path: Path) -> list[Figure]:
    import pandas

    table = pandas.read_csv(path, comment="#")
    return [Figure(*row) for row in table.itertuples(index=False)]


def markdown(figures: Iterable[Figure]) -> str:
    """The medians as a table: a row for what was measured, columns for the engines and for their ratio."""
    rows: dict[str, dict[str, str]] = {}
    for f in figures:
        rows.setdefault(f.what, {})[f.engine.removesuffix(PACED)] = in_words(f)
    columns = OURS, TORCH, LONGER
    lines = [
        " | ".join(["", what, *(row.get(c, "") for c in columns), ""]).strip() for what, row in rows.items()
    ]
    head = f"| medians | {OURS} | torch.distributed.pipelining | torch's time over it, turn by turn |"
    return "\n".join([head, "|---|---|---|---|", *lines])


def in_words(figure: Figure) -> str:
    """The median, to three digits and with its unit."""
    match figure.unit:
        case "x":
            return f"{figure.value:.2f}×"
        case "ratio":
            return f"{figure.value:.3f}"
        case "1/s":
            return f"{figure.value / 1e6:.2f} million/s"
        case "us":
            return f"{figure.value:.0f} µs"
        case "ms" if figure.value >= 1000:
            return f"{figure.value / 1000:.2f} s"
        case unit:
            return f"{figure.value:#.3g}".rstrip(".") + f" {unit}"
