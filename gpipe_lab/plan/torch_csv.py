"""Schedules read and written in the CSV format of torch.distributed.pipelining.

One row a rank, one cell an operation such as "2F0"; an empty cell is an idle slot of torch's drawing. With
communication ("compute_comms") there are cells such as "2SEND_F0" too. Written against torch 2.13,
`_PipelineScheduleRuntime._load_csv` and `_dump_csv`.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from pathlib import Path

from .errors import InputError, ScheduleError, require
from .ops import COMPUTE, TRANSFERS, Kind, Op
from .schedule import Schedule
from .validate import marked_grid, validate

_KNOWN = COMPUTE - {Kind.R} | TRANSFERS
# "(0F1;3B0)OVERLAP_F_B": torch runs the two together; here one follows the other
_OVERLAP = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
# what becomes of weights that are sharded over other ranks is not the pipeline's business
_NO_COUNTERPART = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_csv(schedule: Schedule, path: str | Path | None = None) -> str:
    """The schedule as torch's CSV, also written to `path` if one is given.

    An authored schedule gives torch's "compute_only" format, a lowered one "compute_comms". Raises
    `InputError` for one with recompute, for which torch has no operation.
    """
    validate(schedule)
    strange = [op for op in schedule.rank_of if op.kind not in _KNOWN]
    require(
        not strange,
        "torch's schedules hold forwards, backwards, sends and receives, and no recompute",
        got=f"{strange[0] if strange else None} in schedule {schedule.name!r}",
        where="to_csv",
        remedy="write the schedule as it was before with_recompute, and wrap the layers for torch",
    )
    text = "".join(",".join(map(str, row)) + "\r\n" for row in schedule.ops)
    if path is not None:
        Path(path).write_text(text, newline="")
    return text


def from_csv(source: str | Path, *, name: str = "from_csv", comms: bool = False) -> Schedule:
    """The schedule in torch's CSV: a Path, the name of a file, or the text itself.

    The rank of each stage is the row it stands in, the number of micro-batches is what all stages agree
    on. Sends and receives are dropped, since `lower` adds them; with `comms` they are kept in torch's
    order. Two operations that torch overlaps follow each other. Weights' UNSHARD, RESHARD and
    REDUCE_GRAD are left out. Raises `ScheduleError` for a schedule that cannot run, with the reason:
    torch's own listing of 1F1B is one (its last rank has no F0).
    """
    rows = [[op for cell in row for op in _operations(cell, rank)] for rank, row in enumerate(_cells(source))]
    if not comms:
        rows = [[op for op in row if op.kind in COMPUTE] for row in rows]
    computed = [op for row in rows for op in row if op.kind in COMPUTE]
    require(
        bool(computed),
        "a schedule has a row of operations for every rank",
        got="no operation",
        where="from_csv",
        remedy='gl.from_csv("0F0,0B0")',
    )
    first_stage = {op.microbatch for op in computed if op.stage == 0 and op.kind is Kind.F}
    schedule = Schedule(name, max(1, len(first_stage)), _places(rows), tuple(map(tuple, rows)))
    _check_microbatches(schedule)
    validate(schedule)
    return schedule


def _cells(source: str | Path) -> list[list[str]]:
    """The cells of every line that has any; a string with a comma or several lines is text, not a file."""
    if isinstance(source, Path) or not ("," in source or "\n" in source):
        source = _decoded(Path(source))
    return [row for row in csv.reader(io.StringIO(source.removeprefix("\ufeff"))) if row]


def _decoded(path: Path) -> str:
    """A file's text, in UTF-8 or, as spreadsheets also write it, in UTF-16 with its byte-order mark."""
    content = path.read_bytes()
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if is_utf16 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "a schedule's file is text in UTF-8",
            got=str(error),
            where=str(path),
            remedy="save it from the spreadsheet as CSV UTF-8",
        ) from error


def _operations(cell: str, rank: int) -> list[Op]:
    """The operations of one cell: none, one, or the parts of an overlapped pair."""
    cell = cell.strip()
    if not cell or _NO_COUNTERPART.fullmatch(cell):
        return []
    overlapped = _OVERLAP.fullmatch(cell)
    try:
        ops = [Op.parse(part) for part in (overlapped["parts"].split(";") if overlapped else [cell])]
    except ValueError:
        ops = []
    require(
        bool(ops) and all(op.kind in _KNOWN and op.segment == 0 for op in ops),
        "a cell is empty or one of torch's operations: a stage, F, B, I, W or a transfer, a micro-batch",
        got=repr(cell),
        where=f"from_csv, row of rank {rank}",
        remedy="2F0",
    )
    return ops


def _places(rows: list[list[Op]]) -> tuple[int, ...]:
    """stage_to_rank, read off the rows: every stage from 0 on stands in exactly one."""
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for op in row:
            ranks.setdefault(op.stage, set()).add(rank)
    for stage in range(1 + max(ranks)):
        found = sorted(ranks.get(stage, ()))
        require(
            len(found) == 1,
            "every stage is on one rank",
            got=f"stage {stage} of {1 + max(ranks)} on " + (f"ranks {found}" if found else "none"),
            where="from_csv",
            remedy="stages count from 0, and one row holds all operations of a stage",
        )
    return tuple(min(ranks[stage]) for stage in range(len(ranks)))


def _check_microbatches(schedule: Schedule) -> None:
    """The file does not say how many micro-batches there are: every stage must run the same ones."""
    wanted = set(range(schedule.num_microbatches))
    for stage, rank in enumerate(schedule.stage_to_rank):
        forwards = [op for op in schedule.ops[rank] if op.stage == stage and op.kind is Kind.F]
        found = {op.microbatch for op in forwards}
        missing = [f"no {Op(Kind.F, stage, m)}" for m in sorted(wanted - found)]
        extra = [str(op) for op in forwards if op.microbatch not in wanted]
        if missing or extra:
            raise ScheduleError(
                "every stage runs the same micro-batches forward as the first, counted from 0",
                got=", ".join(missing + (["but " + ", ".join(extra)] if extra else [])),
                where=f"schedule {schedule.name!r}, rank {rank}; the first stage runs "
                f"{schedule.num_microbatches} micro-batches",
                remedy="number the micro-batches of every stage from 0",
                grid=marked_grid(schedule, {op for op in forwards if op.microbatch not in wanted}),
            )
