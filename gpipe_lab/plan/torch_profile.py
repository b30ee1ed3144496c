"""Profiles that torch.profiler wrote, one file a rank of a pipeline, read as one measured trace."""

from __future__ import annotations

import glob
import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InputError, require
from .ops import Kind, Op
from .schedule import Schedule, dependencies
from .trace import COMPUTE_LANE, MEASURED, Event, Trace
from .validate import validate

WHERE = "read_profile"
MESSAGES = ("c10d::", "gloo:", "nccl", "record_param_comms")  # how operators that send and receive begin
BACKWARD_NODE = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer."
SLACK_US = 50.0  # by how much times that two processes took of one moment may differ

# How the operations of a step are named in profiles.
LABELS = (
    re.compile(r"(?P<word>Forward|Backward) (?P<microbatch>\d+)"),  # torch, one stage a rank
    re.compile(r"PP:(?P<stage>\d+)(?P<kind>[FBIW])(?P<microbatch>\d+)"),  # torch, several stages a rank
    re.compile(  # this package
        r"(?P<kind>[FBIWR]) stage (?P<stage>\d+) micro-batch (?P<microbatch>\d+)( segment (?P<segment>\d+))?"
    ),
)
TWO_AT_ONCE = re.compile(r"PP:\(.*\)OVERLAP_F_B")


class Slice(NamedTuple):
    """What a profile says ran from `start` to `end`, in µs of its own clock."""

    name: str
    start: float
    end: float
    thread: Any


class Done(NamedTuple):
    """An operation and when it ran; its stage is None where a label does not say it."""

    kind: Kind
    stage: int | None
    microbatch: int
    segment: int
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """One rank's file."""

    path: Path
    rank: int
    groups: list[list[int]]  # the ranks of each process group; empty where the file does not say
    host: str
    device: str
    annotations: list[Slice]
    operators: list[Slice]  # of the host, those inside others left out
    kernels: list[tuple[float, Slice]]  # of a GPU, each with the time of its launch


def read_profile(files: str | Path | Iterable[str | Path], *, step: int = -1) -> Trace:
    """The trace of one training step that torch.profiler recorded on every rank of a pipeline.

    files: one file a rank, as `prof.export_chrome_trace` writes it (JSON, or gzipped), or a pattern such as
    "profiles/rank*.json". Those of one pipeline: of several replicas, the ranks of one.
    step: which of the recorded steps, the last one unless said otherwise.

    Read are the names that torch.distributed.pipelining's schedules give their operations, and those of
    this package's own profiles. torch's Schedule1F1B names none: there a run of operators between messages
    is one operation, and a file holds one step.

    An operation lasts from its first operator to its last one that is no message, on a GPU from its first
    kernel to its last one. What a rank waits within its label is therefore idle time. Clocks of different
    hosts are brought together by the messages: none arrives before it was sent.

    Raises `InputError`, with the file and the reason, for what is no such profile.
    """
    profiles = sorted(map(_read, _paths(files)), key=lambda profile: profile.rank)
    ranks = [profile.rank for profile in profiles]
    require(
        len(set(ranks)) == len(ranks),
        "every file is of another rank",
        got=f"ranks {ranks}",
        where=WHERE,
        remedy="name the files by rank, as rank0.json, or give those of one step only",
    )
    groups = profiles[0].groups
    require(
        not groups or ranks in groups,
        "the files are those of one process group, a pipeline's",
        got=f"files of ranks {ranks}; the groups are {', '.join(map(str, groups))}",
        where=WHERE,
        remedy='read_profile("rank*.json")',
    )
    steps = [_steps(profile, position) for position, profile in enumerate(profiles)]
    counts = [len(found) for found in steps]
    require(
        len(set(counts)) == 1 and -counts[0] <= step < counts[0],
        "every rank has recorded the step that is read",
        got=f"step {step} of files with {', '.join(map(str, counts))} steps",
        where=WHERE,
        remedy="step=-1",
    )
    rows = [_ops(found[step], position) for position, found in enumerate(steps)]
    schedule = _schedule([tuple(row) for row in rows])
    shifts = _shifts(rows, schedule, [profile.host for profile in profiles])
    return _trace(rows, shifts, schedule, profiles[0].device)


def _paths(files: str | Path | Iterable[str | Path]) -> list[Path]:
    given: list[str | Path] = [files] if isinstance(files, str | Path) else list(files)
    found = [Path(path) for one in given for path in (sorted(glob.glob(str(one))) or [str(one)])]
    require(
        bool(found), "a trace is read from one file a rank", got="no file", where=WHERE, remedy='"rank*.json"'
    )
    return found


def _read(path: Path) -> Profile:
    try:
        content = path.read_bytes()
        document = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        events = document["traceEvents"]
        slices = [event for event in events if event.get("ph") == "X"]
        base = float(document.get("baseTimeNanoseconds", 0)) / 1000
        return _profile(path, document, slices, base)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        reason = f"it is no JSON: {error}"
    except (KeyError, TypeError, AttributeError):
        reason = "it is JSON, but no trace in torch.profiler's format"
    raise InputError(
        "a profile is a file that torch.profiler's export_chrome_trace wrote",
        got=f"{path}: {reason}",
        where=WHERE,
        remedy='prof.export_chrome_trace(f"rank{dist.get_rank()}.json")',
    )


def _profile(path: Path, document: dict[str, Any], events: list[dict[str, Any]], base: float) -> Profile:
    named: dict[str, list[Slice]] = defaultdict(list)
    launched: dict[Any, float] = {}
    ran: list[tuple[Any, Slice]] = []
    for event in events:
        start = base + event["ts"]
        here = Slice(str(event["name"]), start, start + event["dur"], event["tid"])
        if not (math.isfinite(here.start) and math.isfinite(here.end)):
            raise TypeError("times are numbers")
        category, launch = event.get("cat"), event.get("args", {}).get("correlation")
        if str(category).endswith(("_runtime", "_driver")):
            launched[launch] = start
        elif category == "kernel" and not here.name.startswith(MESSAGES):
            ran.append((launch, here))
        named[str(category)].append(here)
    digits = re.findall(r"\d+", path.name)
    world = document.get("distributedInfo", {})
    rank = world.get("rank", int(digits[-1]) if digits else 0)
    groups = [sorted(group["ranks"]) for group in world.get("pg_config", [])]
    devices = [str(device.get("name")) for device in document.get("deviceProperties", [])]
    return Profile(
        path=path,
        rank=int(rank),
        groups=[list(range(world["world_size"])), *groups] if world else [],
        host=str(document.get("host_name", "")),
        device=devices[0] if devices else "CPU",
        annotations=sorted(named["user_annotation"], key=lambda s: s.start),
        operators=list(_outermost(named["cpu_op"])),
        kernels=sorted((launched[launch], kernel) for launch, kernel in ran if launch in launched),
    )


def _outermost(operators: Sequence[Slice]) -> Iterator[Slice]:
    """Those that no other of their thread calls, in the order in which they start."""
    until: dict[Any, float] = defaultdict(float)
    for operator in sorted(operators, key=lambda s: (s.start, -s.end)):
        if operator.start >= until[operator.thread]:
            until[operator.thread] = operator.end
            yield operator


def _steps(profile: Profile, position: int) -> list[list[Done]]:
    """The operations of each recorded step, in order; a label that comes again begins the next step."""
    steps: list[list[Done]] = []
    seen: set[tuple] = set()
    for done in _labelled(profile) or _between_messages(profile, position):
        if not steps or done[:4] in seen:
            steps.append([])
            seen.clear()
        seen.add(done[:4])
        steps[-1].append(done)
    require(
        bool(steps),
        "a profile names the operations of a pipeline's step",
        got=f"{profile.path}: neither a label of torch.distributed.pipelining or gpipe_lab "
        "nor forwards and backwards between messages",
        where=WHERE,
        remedy="with torch.profiler.profile() as prof: schedule.step(...)",
    )
    return steps


def _labelled(profile: Profile) -> list[Done]:
    found = []
    for annotation in profile.annotations:
        require(
            not TWO_AT_ONCE.match(annotation.name),
            "an operation has a time of its own",
            got=f"{profile.path}: {annotation.name}, a forward and a backward that run as one",
            where=WHERE,
        )
        match = next((m for pattern in LABELS if (m := pattern.fullmatch(annotation.name))), None)
        if match is None:
            continue
        label = match.groupdict()
        kind = Kind(label.get("kind") or label["word"][0])
        stage = label.get("stage")
        span = _span(profile, annotation)
        found.append(
            Done(
                kind,
                None if stage is None else int(stage),
                int(label["microbatch"]),
                int(label.get("segment") or 0),
                *span,
            )
        )
    return found


def _span(profile: Profile, label: Slice) -> tuple[float, float]:
    """When the operation under a label computed: without the messages that it waited for first."""
    if profile.kernels:
        return _kernels_of(profile, label)
    within = [
        operator
        for operator in profile.operators
        if operator.thread == label.thread
        and label.start <= operator.start <= label.end
        and not operator.name.startswith(MESSAGES)
    ]
    return _hull(within, label)


def _kernels_of(profile: Profile, launching: Slice) -> tuple[float, float]:
    """When what was launched meanwhile, by whichever thread, ran on the GPU."""
    return _hull([k for at, k in profile.kernels if launching.start <= at <= launching.end], launching)


def _hull(slices: list[Slice], around: Slice) -> tuple[float, float]:
    if not slices:
        return around.end, around.end
    return min(s.start for s in slices), max(s.end for s in slices)


def _between_messages(profile: Profile, position: int) -> list[Done]:
    """Schedule1F1B's operations: a run of operators, forward or backward, is one of them.

    A forward follows a message that brings its input, but on the first rank. Other operators, which cut the
    batch, scale gradients or update weights, belong to no operation.
    """
    messengers = {s.thread for s in profile.operators if s.name.startswith(MESSAGES)}
    runs: list[tuple[Kind, Slice]] = []
    running: Kind | None = None  # what the last operator belongs to
    arrived = is_first = position == 0
    for operator in profile.operators:
        is_backward = operator.name.startswith(BACKWARD_NODE)
        kind = Kind.B if is_backward else Kind.F
        if operator.name.startswith((*MESSAGES, OPTIMIZER)):
            arrived |= "recv" in operator.name
            running = None
        elif messengers and operator.thread not in messengers and not is_backward:
            continue
        elif running is kind:
            began = runs[-1][1]
            runs[-1] = kind, began._replace(end=max(began.end, operator.end))
        elif is_backward or arrived:
            runs.append((kind, operator))
            running, arrived = kind, is_first
    while runs and runs[-1][0] is Kind.F:  # behind the last backward
        runs.pop()
    return _numbered(profile, runs)


def _numbered(profile: Profile, runs: list[tuple[Kind, Slice]]) -> list[Done]:
    """1F1B's forwards take the micro-batches in order, and so do its backwards."""
    seen = {Kind.F: 0, Kind.B: 0}
    found = []
    for kind, run in runs:
        span = _kernels_of(profile, run) if profile.kernels else (run.start, run.end)
        found.append(Done(kind, None, seen[kind], 0, *span))
        seen[kind] += 1
    require(
        seen[Kind.F] == seen[Kind.B],
        "a profile without labels holds one step of 1F1B, a forward and a backward for each micro-batch",
        got=f"{profile.path}: {seen[Kind.F]} forwards and {seen[Kind.B]} backwards between its messages",
        where=WHERE,
        remedy="with torch.profiler.profile() as prof: schedule.step(...)",
    )
    return found


def _ops(step: Sequence[Done], position: int) -> dict[Op, tuple[float, float]]:
    """When each operation ran, in the order in which they began; without a label's, the rank's own stage."""
    ran = sorted(step, key=lambda done: done.start)
    return {
        Op(d.kind, position if d.stage is None else d.stage, d.microbatch, d.segment): (d.start, d.end)
        for d in ran
    }


def _schedule(rows: Sequence[tuple[Op, ...]]) -> Schedule:
    """What the ranks did, as a schedule that is checked like any other."""
    homes: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for op in row:
            require(
                homes.setdefault(op.stage, rank) == rank,
                "every stage is on one rank",
                got=f"stage {op.stage} in the files of two ranks",
                where=WHERE,
                remedy="give the files of one pipeline: of replicas, those of one",
            )
    require(
        sorted(homes) == list(range(len(homes))),
        "the files are those of every rank of a pipeline",
        got=f"stages {', '.join(map(str, sorted(homes)))}",
        where=WHERE,
        remedy='read_profile("rank*.json")',
    )
    microbatches = {op.microbatch for row in rows for op in row}
    require(
        microbatches == set(range(len(microbatches))),
        "a step has every micro-batch from 0 on",
        got=f"{len(microbatches)} micro-batches, up to number {max(microbatches)}",
        where=WHERE,
    )
    places = tuple(homes[stage] for stage in range(len(homes)))
    schedule = Schedule("as profiled", len(microbatches), places, tuple(rows))
    validate(schedule)
    return schedule


Times = dict[Op, tuple[float, float]]  # when each operation began and ended


def _shifts(rows: Sequence[Times], schedule: Schedule, hosts: Sequence[str]) -> list[float]:
    """What to add to each rank's times, in µs, for every operation to begin after what it needs has ended.

    Messages both ways leave a span, of which the middle is taken, as in NTP; on one host nothing is added
    where that is in the span.
    """
    ran = {op: span for row in rows for op, span in row.items()}
    least: dict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))  # of the second beyond the first
    for op, (start, _) in ran.items():
        for needed in dependencies(op, schedule):
            pair = schedule.rank_of[needed], schedule.rank_of[op]
            least[pair] = max(least[pair], ran[needed][1] - start)
    shifts: list[float] = [0.0]
    for rank in range(1, len(rows)):
        low = max(shifts[other] + least[other, rank] for other in range(rank))
        high = min(shifts[other] - least[rank, other] for other in range(rank))
        require(
            low <= high + SLACK_US,
            "the files are of one step, in which nothing begins before what it needs has ended",
            got=f"rank {rank}: an operation {(low - high) / 1000:.3g} ms too early on any clock",
            where=WHERE,
            remedy="profile the same step on every rank",
        )
        same_host = hosts[rank] == hosts[0] and low - SLACK_US <= 0 <= high + SLACK_US
        bounds = [bound for bound in (low, high) if abs(bound) != float("inf")]
        shifts.append(0.0 if same_host or not bounds else sum(bounds) / len(bounds))
    return shifts


def _trace(rows: Sequence[Times], shifts: Sequence[float], schedule: Schedule, device: str) -> Trace:
    began = min(start + shift for row, shift in zip(rows, shifts, strict=True) for start, _ in row.values())
    events = [
        Event(rank, COMPUTE_LANE, op, (start + shift - began) / 1000, (end + shift - began) / 1000)
        for rank, (row, shift) in enumerate(zip(rows, shifts, strict=True))
        for op, (start, end) in row.items()
    ]
    return Trace(
        tuple(sorted(events, key=lambda e: (e.start_ms, e.rank))),
        MEASURED,
        schedule,
        device=f"{device}, profiled by torch",
    )
