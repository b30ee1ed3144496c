"""python -m gpipe_lab show: a schedule, checked, simulated and drawn, from torch's CSV or by name.

python -m gpipe_lab show schedule.csv
python -m gpipe_lab show gpipe 4 8 --svg -o gpipe.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .plan.errors import InputError
from .plan.memory import peak_in_flight
from .plan.ops import WORDS
from .plan.schedule import Schedule
from .plan.schedules import SCHEDULES
from .plan.simulate import Costs, simulate
from .plan.torch_csv import from_csv

VALID, INVALID, USAGE = 0, 1, 2  # exit codes


def main(arguments: list[str] | None = None) -> int:
    """0 for a schedule that can run, 1 for one that cannot, 2 where nothing was found to look at,
    or no folder to write into."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.source not in SCHEDULES and not Path(given.source).is_file():
        names = ", ".join(SCHEDULES)
        print(f"no file {given.source!r}, and no schedule of that name: there are {names}", file=sys.stderr)
        return USAGE
    if given.out and not given.out.parent.is_dir():
        print(f"no folder {str(given.out.parent)!r} to write {given.out.name} into", file=sys.stderr)
        return USAGE
    try:
        schedule = _schedule(given.source, given.numbers)
        words = _in_words(schedule, Costs(forward=given.forward, backward=given.backward))
    except InputError as error:
        print(f"{error}\n\nverdict: {given.source} cannot run")
        return INVALID
    kind = given.kind or (given.out.suffix.lstrip(".") if given.out else "text")
    if kind in ("svg", "png"):
        path = given.out or Path(f"{Path(given.source).stem}.{kind}")
        path.write_bytes(_picture(schedule, kind))
        words = f"{words}\ndrawn in {path}"
    elif given.out:
        given.out.write_text(f"{schedule.grid()}\n", encoding="utf-8")
    print(words)
    return VALID


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab", description="look at a pipeline schedule")
    show = parser.add_subparsers(required=True).add_parser("show", help="check, simulate and draw a schedule")
    show.add_argument("source", help=f"a CSV file as torch writes it, or one of {', '.join(SCHEDULES)}")
    show.add_argument("numbers", nargs="*", type=int, help="for a name: P and M, and for interleaved chunks")
    kinds = show.add_mutually_exclusive_group()
    for kind in ("text", "svg", "png"):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
    show.add_argument("-o", "--out", type=Path, help="where to; its ending chooses the kind")
    show.add_argument("--forward", type=float, default=1.0, help="ms of a stage's forward (default 1)")
    show.add_argument("--backward", type=float, default=2.0, help="ms of a stage's backward (default 2)")
    return parser


def _schedule(source: str, numbers: list[int]) -> Schedule:
    """Raises `InputError` for a schedule that cannot run, or numbers that do not fit the name."""
    if source not in SCHEDULES:
        return from_csv(Path(source), name=Path(source).stem)
    try:
        return SCHEDULES[source](*numbers)
    except TypeError:  # too few or too many numbers
        raise InputError(
            f"{source} takes the number of stages and of micro-batches",
            got=f"{len(numbers)} numbers",
            where="show",
            remedy=f"python -m gpipe_lab show {source} 4 8",
        ) from None


def _in_words(schedule: Schedule, costs: Costs) -> str:
    trace = simulate(schedule, costs)
    peaks = " ".join(map(str, peak_in_flight(schedule)))
    return "\n".join(
        [
            f"{schedule.name}, {_ranks(schedule)}, M = {schedule.num_microbatches}",
            schedule.grid(),
            f"key: {_key(schedule)}",
            f"simulated: makespan {trace.makespan_ms:g} ms, bubble {trace.bubble_fraction:.1%}",
            f"in flight at the peak, by rank: {peaks}",
            "verdict: can run; every operation once, every dependency ahead of its use, no circle of waiting",
        ]
    )


def _ranks(schedule: Schedule) -> str:
    """P, and the stages where ranks hold several: a schedule asked for by P is answered with that P."""
    stages = "" if schedule.has_one_stage_a_rank else f" ({schedule.num_stages} stages)"
    return f"P = {schedule.num_ranks}{stages}"


def _key(schedule: Schedule) -> str:
    """What the letters of the grid stand for: those that occur in it."""
    kinds = {op.kind for row in schedule.ops for op in row}
    letters = ", ".join(f"{kind.value} {words}" for kind, words in WORDS.items() if kind in kinds)
    numbers = "its micro-batch" if schedule.has_one_stage_a_rank else "its stage ahead and its micro-batch"
    return f"{letters}, with {numbers} behind; a dot is a slot without work"


def _picture(schedule: Schedule, kind: str) -> bytes:
    from .view.gantt import plot_schedule

    picture = plot_schedule(schedule)
    return picture.png() if kind == "png" else picture.svg().encode()


if __name__ == "__main__":
    sys.exit(main())
