"""What papers published, beside what this package predicts for it; nothing is tuned to a row.

Where a paper's own measured times would be needed and are not published, nothing is predicted and `why`
says what is missing. Where a prediction misses, `why` follows from how it misses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .catalogue import read
from .comparison import Comparison, reason
from .gpipe_tables import gpipe_sizes, gpipe_speeds
from .memory import peak_in_flight
from .schedules import SCHEDULES
from .simulate import Costs, simulate
from .zero_bubble_tables import zero_bubble


def comparisons() -> tuple[Comparison, ...]:
    """Every published value of `data/tables`, table by table."""
    return (*zero_bubble(), *gpipe_sizes(), *gpipe_speeds(), *torchgpipe(), *schedule_formulas())


def torchgpipe() -> Iterator[Comparison]:
    for row in read("tables/torchgpipe")[1]:
        if row["partitions"] == "baseline":
            continue
        micro = f", m = {row['microbatches']}" if row["microbatches"] else ""
        yield Comparison(
            "torchgpipe", f"{row['model']}, n = {row['partitions']}{micro}", "throughput", "samples/s",
            float(row["samples_per_s"]), None,
            "cannot be predicted without the times of a convolutional net's layers on a P40",
        )  # fmt: skip


def schedule_formulas(p: int = 4, m: int = 12) -> Iterator[Comparison]:
    """The published closed forms at one P and M, beside the simulated bubble time and the counted peak."""
    forward, inputs, weights, v = 3.0, 3.0, 2.0, 2
    names = {
        "GPipe": "gpipe",
        "1F1B": "one_f_one_b",
        "Interleaved (v chunks)": "interleaved",
        "ZB-H1": "zero_bubble_h1",
        "ZB-H2": "zero_bubble_h2",
    }
    letters = {"p": p, "m": m, "F": forward, "B": inputs, "W": weights, "v": v, "M": 1}
    for row in read("tables/schedule_formulas")[1]:
        name = row["schedule"]
        case = f"{name}, p = {p}, m = {m}"
        if name not in names:
            missing = "the time of a forward and a backward that overlap (F&B), and of whole pairs of them"
            yield Comparison(
                f"formulas ({row['source']})", case, "peak activations", "",
                evaluate(row["peak_activation"], letters), None, f"cannot be predicted without {missing}",
            )  # fmt: skip
            continue
        chunks = v if name.startswith("Interleaved") else 1
        schedule = SCHEDULES[names[name]](p, m)
        trace = simulate(
            schedule,
            Costs(
                forward=forward / chunks,
                backward=(inputs + weights) / chunks,
                backward_input=inputs,
                backward_weight=weights,
            ),
        )
        rows = [[e for e in trace.computations if e.rank == rank] for rank in range(p)]
        longest = max(row[-1].end_ms - row[0].start_ms for row in rows)
        bubble = longest - m * (forward + inputs + weights)
        held = max(peak_in_flight(schedule)) / chunks
        for quantity, text, predicted in (
            ("bubble time", row["bubble_time"], bubble),
            ("peak activations", row["peak_activation"], held),
        ):
            published = evaluate(text, letters)
            differs = "the simulated schedule is not the published one"
            why = reason(published, predicted, differs, differs)
            yield Comparison(f"formulas ({row['source']})", case, quantity, "", published, predicted, why)


def evaluate(formula: str, letters: dict[str, float]) -> float:
    """The value of a formula as papers write it: "(p-1)(F+B-2W)", with a number for each letter."""
    spelled = re.sub(r"(?<=[\d)])(?=[A-Za-z(])", "*", formula)
    assert re.fullmatch(r"[\d\s.()+*/A-Za-z-]+", spelled) is not None, formula
    return float(eval(spelled, {"__builtins__": {}}, dict(letters)))
