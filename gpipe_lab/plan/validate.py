"""Refuse a schedule that cannot run, and say which operation breaks which rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter

from .errors import ScheduleError
from .ops import COMPUTE, ONCE_A_STEP, TRANSFERS, Kind, Op, peer
from .schedule import Schedule, first_of_replica, send_of


def validate(schedule: Schedule) -> None:
    """Raise `ScheduleError` (rule, got, where, remedy, marked grid) unless every rank can run to its end.

    The rules: every operation names an existing stage and micro-batch and is on its stage's rank; each
    is there exactly once, with a forward for every stage and micro-batch and, in training, exactly one
    backward (B, or I and W); no rank runs an operation before what it needs, and a stage's REDUCE and STEP
    need all of its backwards; and nothing waits in a circle. A lowered schedule hangs where program order,
    dependencies and the order of transfers, taken together, have a cycle; that cycle is named.
    """
    if isinstance(schedule, Schedule) and VALID in schedule.__dict__:
        return
    _check_types(schedule)
    _check_shape(schedule)
    _check_places(schedule)
    _check_complete(schedule)
    if schedule.walked.is_stuck:
        _check_local_order(schedule)  # an operation before what it needs stops its rank too
        raise _hang(schedule)
    schedule.__dict__[VALID] = True  # a schedule does not change, so it is checked once


VALID = "_is_valid"


def marked_grid(schedule: Schedule, marked: set[Op]) -> str:
    """Every rank's operations in program order, those in `marked` as >>2F0<<."""

    def cell(op: Op) -> str:
        label = schedule.label(op)
        return f">>{label}<<" if op in marked else label

    rows = (" ".join(cell(op) for op in ops) for ops in schedule.ops)
    return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def _error(schedule: Schedule, rule: str, *ops: Op, got: str, where: str = "", remedy: str) -> ScheduleError:
    place = f"schedule {schedule.name!r}" + (f", {where}" if where else "")
    return ScheduleError(rule, got=got, where=place, remedy=remedy, grid=marked_grid(schedule, set(ops)))


def _check_types(schedule: Schedule) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            "what is validated, simulated or run is a Schedule",
            got=f"{schedule!r}",
            remedy="gl.gpipe(4, 8), or gl.Schedule(name, num_microbatches, stage_to_rank, ops)",
        )
    place = f"schedule {schedule.name!r}"
    whole = (schedule.num_microbatches, schedule.num_replicas, *schedule.stage_to_rank)
    for number in whole:
        if not isinstance(number, int) or isinstance(number, bool):
            raise ScheduleError(
                "num_microbatches, num_replicas and the ranks in stage_to_rank are whole numbers",
                got=f"{number!r}",
                where=place,
                remedy=f"int({number!r})",
            )
    if schedule.num_replicas < 1 or len(schedule.ops) % schedule.num_replicas:
        raise ScheduleError(
            "replicas share the ranks evenly",
            got=f"num_replicas={schedule.num_replicas}, {len(schedule.ops)} lists of operations",
            where=place,
            remedy="gl.replicate(schedule, num_replicas)",
        )
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            is_op = type(op) is Op and type(op.kind) is Kind
            if not (is_op and type(op.stage) is type(op.microbatch) is type(op.segment) is int):
                raise ScheduleError(
                    "a rank's operations are Ops: a Kind, then whole numbers for stage, micro-batch, segment",
                    got=f"{op!r}",
                    where=f"{place}, rank {rank}",
                    remedy="Op(Kind.F, 0, 0)",
                )


def _check_shape(schedule: Schedule) -> None:
    placed = set(schedule.stage_to_rank)
    if schedule.num_microbatches < 1 or schedule.num_stages < 1:
        raise _error(
            schedule,
            "a schedule has at least one stage and one micro-batch",
            got=f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches",
            remedy="give stage_to_rank one entry per stage and num_microbatches at least 1",
        )
    if schedule.num_microbatches % schedule.num_replicas:
        raise _error(
            schedule,
            "replicas share the micro-batches evenly",
            got=f"num_replicas={schedule.num_replicas}, {schedule.num_microbatches} micro-batches",
            remedy="gl.replicate(schedule, num_replicas)",
        )
    if placed != set(range(schedule.ranks_per_replica)):
        raise _error(
            schedule,
            "every rank has a list of operations and holds at least one stage",
            got=f"stage_to_rank={schedule.stage_to_rank}, {schedule.num_ranks} lists of operations",
            remedy=f"stage_to_rank={tuple(range(schedule.ranks_per_replica))}",
        )


def _check_places(schedule: Schedule) -> None:
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    per_replica, place = schedule.microbatches_per_replica, schedule.stage_to_rank
    for rank, ops in enumerate(schedule.ops):
        replica, rank_within = divmod(rank, schedule.ranks_per_replica)
        for op in ops:
            _, stage, microbatch, segment = op
            if not (0 <= stage < num_stages and 0 <= microbatch < num_microbatches and segment >= 0):
                raise _error(
                    schedule,
                    "an operation names a stage and a micro-batch that exist",
                    op,
                    got=f"{op}; {num_stages} stages, {num_microbatches} micro-batches",
                    where=f"rank {rank}",
                    remedy="both count from 0",
                )
            if place[stage] != rank_within or microbatch // per_replica != replica:
                home = schedule.home(stage, microbatch)
                raise _error(
                    schedule,
                    "an operation runs on the rank that holds its stage",
                    op,
                    got=f"{op} on rank {rank}",
                    where=f"rank {rank}",
                    remedy=f"move {op} to rank {home}",
                )
    if sum(map(len, schedule.graph.at.values())) == len(schedule.graph.ops):
        return
    counts = Counter(op for ops in schedule.ops for op in ops)
    op, count = next((op, count) for op, count in counts.items() if count > 1)
    raise _error(
        schedule,
        "each operation is there once",
        op,
        got=f"{op} {count} times",
        where=f"rank {schedule.rank_of[op]}",
        remedy=f"keep one {op}",
    )


def _check_complete(schedule: Schedule) -> None:
    rows: dict[int, dict[tuple[Kind, int], dict[int, int]]] = defaultdict(dict)
    for (kind, stage, segment), row in schedule.graph.at.items():
        if kind in COMPUTE:
            rows[stage][kind, segment] = row
    num_microbatches = schedule.num_microbatches
    for stage in range(schedule.num_stages):
        same = all(len(row) == num_microbatches for row in rows[stage].values())
        patterns: dict[
            tuple[tuple[Kind, int], ...], int
        ] = {}  # what is there of the first micro-batch with it
        for m in range(1 if same else num_microbatches):
            patterns.setdefault(tuple(part for part, row in rows[stage].items() if m in row), m)
        for pattern, m in patterns.items():
            _check_microbatch(schedule, stage, m, [Op(kind, stage, m, s) for kind, s in pattern])
    if schedule.kinds & TRANSFERS:
        _check_transfers(schedule)
    for op, rank in schedule.rank_of.items() if schedule.kinds & ONCE_A_STEP else ():
        if op.kind in ONCE_A_STEP and op != _for_all_microbatches(op, schedule):
            raise _error(
                schedule,
                "a stage sums its gradients and steps once, after its backwards: the operation carries the "
                "number of the replica's first micro-batch",
                op,
                got=f"{op}" if schedule.trains else f"{op} without backwards",
                where=f"rank {rank}",
                remedy=f"{_for_all_microbatches(op, schedule)}" if schedule.trains else f"drop {op}",
            )


def _for_all_microbatches(op: Op, schedule: Schedule) -> Op | None:
    """The REDUCE or STEP of the same stage and replica as it has to be; None where nothing is trained."""
    return Op(op.kind, op.stage, first_of_replica(op.microbatch, schedule)) if schedule.trains else None


def _check_microbatch(schedule: Schedule, stage: int, m: int, found: list[Op]) -> None:
    rank = schedule.home(stage, m)
    whole = [op for op in found if op.kind is Kind.B]
    split = [op for op in found if op.kind in (Kind.I, Kind.W)]
    if whole and split:
        raise _error(
            schedule,
            "a backward is whole (B) or split (I and W), not both",
            *whole,
            *split,
            got=f"both {whole[0]} and a split backward",
            where=f"rank {rank}",
            remedy=f"drop {whole[0]}, or the I and W of the same stage and micro-batch",
        )
    segments = range(1 + max((op.segment for op in whole), default=0))
    needed = [Op(Kind.F, stage, m)]
    if split:
        needed += [Op(Kind.I, stage, m), Op(Kind.W, stage, m)]
    elif schedule.trains:
        needed += [Op(Kind.B, stage, m, s) for s in segments[: len(whole) + 1]]
    for op in needed:
        if op not in schedule.rank_of:
            raise _error(
                schedule,
                "every stage runs every micro-batch once forward and, in training, once backward",
                got=f"no {op}",
                where=f"rank {rank}",
                remedy=f"add {op} to rank {rank}",
            )
    recomputes = [op for op in found if op.kind is Kind.R]
    restored = [Op(Kind.R, stage, m, s) for s in segments] if schedule.trains else []
    alone = set(recomputes) ^ set(restored) if recomputes or len(segments) > 1 else set()
    for op in sorted(alone, key=lambda op: op.segment):
        raise _error(
            schedule,
            "a recompute restores what one backward of the same segment needs",
            op if op in schedule.rank_of else Op(Kind.B, stage, m, op.segment),
            got=f"{op} without its backward" if op in schedule.rank_of else f"no {op}",
            where=f"rank {rank}",
            remedy="one R and one backward for every segment, or neither",
        )
    for op in found:
        if op.segment > 0 and op.kind not in (Kind.B, Kind.R):
            raise _error(
                schedule,
                "only whole backwards and recomputes go segment by segment",
                op,
                got=str(op),
                where=f"rank {rank}",
                remedy=f"drop {op}",
            )


def _check_transfers(schedule: Schedule) -> None:
    """In a lowered schedule every result that another rank needs is sent and received, and nothing else."""
    present = schedule.rank_of
    sends = [send for op in present if (send := send_of(op, schedule)) is not None]
    needed = [op for send in sends for op in (send, peer(send))]
    for op in needed:
        if op not in present:
            other = peer(op)
            raise _error(
                schedule,
                "every send has its receive and every receive its send",
                other,
                got=f"no {op}" + (f" for {other}" if other in present else ""),
                where=f"rank {schedule.home(op.stage, op.microbatch)}",
                remedy=f"add {op}",
            )
    allowed = set(needed)
    for op, rank in present.items():
        if op.kind in TRANSFERS and op not in allowed:
            raise _error(
                schedule,
                "a transfer takes a result to another rank that needs it",
                op,
                got=f"{op}, which nothing needs",
                where=f"rank {rank}",
                remedy=f"drop {op}",
            )


def _check_local_order(schedule: Schedule) -> None:
    graph = schedule.graph
    if not graph.misplaced:
        return
    number, need = min(graph.misplaced, key=itemgetter(0))
    rank, op, needed = graph.ranks[number], graph.ops[number], graph.ops[need]
    raise _error(
        schedule,
        "an operation comes after what it needs",
        op,
        needed,
        got=f"{op} before {needed}",
        where=f"rank {rank}, position {number - graph.rows[rank].start}",
        remedy=f"move {needed} ahead of {op}",
    )


def _hang(schedule: Schedule) -> ScheduleError:
    circle = schedule.walked.circle
    ranks = [schedule.rank_of[op] for op in circle]
    lines = [
        f"rank {rank} stands at {op} and waits until rank {next_rank} gets past {next_op}"
        for rank, op, next_rank, next_op in zip(
            ranks, circle, ranks[1:] + ranks[:1], circle[1:] + circle[:1], strict=True
        )
    ]
    return _error(
        schedule,
        "no rank may wait for one that waits for it",
        *circle,
        got="a circle: " + "; ".join(lines),
        where="ranks " + ", ".join(map(str, sorted(set(ranks)))),
        remedy="on one of these ranks, move what the others wait for ahead of the operation it stands at",
    )
