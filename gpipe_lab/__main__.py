"""python -m gpipe_lab show: a schedule, checked, simulated and drawn, from torch's CSV or by name; or a step
that was trained elsewhere, from the profiles of its ranks;
python -m gpipe_lab check: whether the engine keeps its promises on this machine.

python -m gpipe_lab show schedule.csv
python -m gpipe_lab show gpipe 4 8 --svg -o gpipe.svg
python -m gpipe_lab show rank*.json -o page.html
python -m gpipe_lab check --out check.json
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .plan.errors import InputError
from .plan.memory import peak_in_flight
from .plan.ops import WORDS
from .plan.schedule import Schedule
from .plan.schedules import SCHEDULES
from .plan.simulate import Costs, simulate
from .plan.torch_csv import from_csv
from .plan.trace import Trace

VALID, INVALID, USAGE = 0, 1, 2  # exit codes
PICTURES = ("svg", "png")
PAGE = "html"  # of a profile alone
ENDINGS = {".txt": "text", ".svg": "svg", ".png": "png", ".html": PAGE}
PROFILES = (".json", ".json.gz")


def main(arguments: list[str] | None = None) -> int:
    """0 for a schedule that can run and a machine on which all holds, else 1; 2 for a command that cannot be
    followed."""
    given = _parser().parse_args(arguments)
    return given.run(given)


def _check(given: argparse.Namespace) -> int:
    from .tools.check import check

    if not given.out.parent.is_dir():
        print(f"no folder {str(given.out.parent)!r} to write {given.out.name} into", file=sys.stderr)
        return USAGE
    return check(given.out, short=given.short, sanitize=given.sanitize)


def _show(given: argparse.Namespace) -> int:
    if given.source.endswith(PROFILES):
        return _show_profile(given)
    try:
        kind = _kind(given.kind, given.out)
        if kind == PAGE:
            raise Usage(f"a page is made of a profile; {given.source} is drawn as svg or png")
        costs = _usable(lambda: Costs(forward=given.forward, backward=given.backward))
        make = _maker(given.source, _numbers(given.more))
    except Usage as wrong:
        print(wrong, file=sys.stderr)
        return USAGE
    try:
        schedule = make()
        words = _in_words(schedule, costs)
    except InputError as error:
        _say(f"{error}\n\nverdict: {given.source} cannot run")
        return INVALID
    try:
        if kind in PICTURES:
            path = given.out or Path(f"{Path(given.source).stem}.{kind}")
            path.write_bytes(_picture(schedule, kind))
            words = f"{words}\ndrawn in {path}"
        elif given.out:
            given.out.write_text(f"{schedule.grid()}\n", encoding="utf-8")
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE
    _say(words)
    return VALID


def _show_profile(given: argparse.Namespace) -> int:
    """What a profiled step spent where, in words; with -o as a picture or a page."""
    from .plan.analysis import critical_path, speed_ups, take_apart
    from .plan.torch_profile import read_profile
    from .view.report_page import in_short, trace_html, trace_report

    try:
        kind = _kind(given.kind, given.out)
        trace = read_profile([given.source, *given.more])
    except Usage as wrong:
        print(wrong, file=sys.stderr)
        return USAGE
    except InputError as error:
        _say(f"{error}\n\nverdict: cannot be read as a pipeline's step")
        return INVALID
    gains = speed_ups(trace)
    words = [
        in_short(trace, take_apart(trace), gains),
        f"critical path: {critical_path(trace)}",
        gains.to_string(index=False, float_format="{:.3g}".format),
    ]
    try:
        if kind == PAGE:
            given.out.write_text(trace_html(trace_report(trace, given.out)), encoding="utf-8")
        elif kind in PICTURES:
            path = given.out or Path(f"profile.{kind}")
            path.write_bytes(_picture(trace, kind))
            words.append(f"drawn in {path}")
        elif given.out:
            given.out.write_text("\n".join(words) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE
    _say("\n".join(words))
    return VALID


class Usage(Exception):
    """A command that cannot be followed, in a sentence."""


def _say(words: str) -> None:
    """Print; a reader that has seen enough, as `head`, may close the pipe."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what the interpreter still flushes


def _kind(asked: str | None, out: Path | None) -> str:
    """What to make: as asked for, or as the file's ending says; the two may not contradict."""
    if out is None:
        return asked or "text"
    if out.is_dir():
        raise Usage(f"{str(out)!r} is a folder; -o names a file, as {out / 'schedule.svg'}")
    if not out.parent.is_dir():
        raise Usage(f"no folder {str(out.parent)!r} to write {out.name} into")
    ending = ENDINGS.get(out.suffix.lower())
    if ending is None:
        raise Usage(f"{out.name} ends in none of {', '.join(ENDINGS)}, so there is nothing to write it as")
    if asked not in (None, ending):
        raise Usage(f"--{asked} and -o {out.name} contradict each other")
    return ending


def _numbers(given: list[str]) -> list[int]:
    try:
        return [int(one) for one in given]
    except ValueError:
        raise Usage(f"behind a schedule's name come numbers; got {' '.join(given)}") from None


def _usable(make: Callable[[], Costs]) -> Costs:
    try:
        return make()
    except InputError as error:
        raise Usage(f"{error.rule}; got {error.got}") from None


def _maker(source: str, numbers: list[int]) -> Callable[[], Schedule]:
    """What makes the schedule asked for. Raises `Usage` where nothing is there to make it from."""
    if source in SCHEDULES:
        constructor = SCHEDULES[source]
        try:
            inspect.signature(constructor).bind(*numbers)
        except TypeError:
            numbers_of = ", ".join(inspect.signature(constructor).parameters)
            told = f"{source} takes {numbers_of}; got {len(numbers)} numbers"
            raise Usage(f"{told}: python -m gpipe_lab show {source} 4 8") from None
        return lambda: constructor(*numbers)
    path = Path(source)
    if not path.is_file():
        raise Usage(f"no file {source!r}, and no schedule of that name: there are {', '.join(SCHEDULES)}")
    if numbers:
        raise Usage(f"a file says by itself how many ranks and micro-batches it has; got {numbers} as well")
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Usage(f"{source} is no text in UTF-8, so it is no CSV that torch or gl.to_csv wrote") from None
    except OSError as error:
        raise Usage(f"cannot read {source}: {error.strerror}") from None
    return lambda: from_csv(path, name=path.stem)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpipe_lab", description="a schedule, or this machine")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="whether the engine keeps its promises on this machine")
    check.set_defaults(run=_check)
    check.add_argument("-o", "--out", type=Path, default=Path("gpipe_lab_check.json"), help="the record")
    check.add_argument("--short", action="store_true", help="fewer settings of each part")
    check.add_argument("--sanitize", action="store_true", help="under torch's CUDA sanitizer, which is slow")
    show = commands.add_parser("show", help="check, simulate and draw a schedule")
    show.set_defaults(run=_show)
    show.add_argument(
        "source",
        help=f"a CSV file as torch writes it, one of {', '.join(SCHEDULES)}, or torch.profiler's JSON files, "
        "one a rank",
    )
    show.add_argument(
        "more",
        nargs="*",
        help="for a name: P, M, and what else it takes; of profiles the other files",
    )
    kinds = show.add_mutually_exclusive_group()
    for kind in ("text", *PICTURES):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
    show.add_argument(
        "-o", "--out", type=Path, help="where to; its ending (txt, svg, png; html of profiles) says what"
    )
    show.add_argument("--forward", type=float, default=1.0, help="ms of a stage's forward (default 1)")
    show.add_argument("--backward", type=float, default=2.0, help="ms of a stage's backward (default 2)")
    return parser


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


def _picture(drawn: Schedule | Trace, kind: str) -> bytes:
    from .view.gantt import plot_schedule, plot_trace

    picture = plot_schedule(drawn) if isinstance(drawn, Schedule) else plot_trace(drawn)
    return picture.png() if kind == "png" else picture.svg().encode()


if __name__ == "__main__":
    sys.exit(main())
