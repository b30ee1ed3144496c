"""What the tests of plan/ compare with: the rules of a pipeline, written a second time from their definition.

Nothing here calls `dependencies`, `walk` or `validate`.
"""

from __future__ import annotations

import random
from collections import defaultdict

from gpipe_lab import Costs, Kind, Op, Schedule

F, B, I, W, R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
COMPUTED = {F, B, I, W, R}
GRIDS = [(p, m) for p in range(1, 9) for m in range(1, 9)]
LARGE = [(2, 64), (16, 5), (16, 64), (32, 33)]


def allowed(name: str, shapes: list[tuple[int, int]] = GRIDS) -> list[tuple[int, int]]:
    """The (P, M) among `shapes` that a schedule exists for: interleaved wants M a multiple of P."""
    return [(p, m) for p, m in shapes if name != "interleaved" or m % p == 0]


def authored(*rows: str, place: tuple[int, ...] | None = None, waits: bool = False) -> Schedule:
    """A schedule from rows of text such as "0F0 0B0"; one stage a rank unless placed otherwise."""
    ops = tuple(tuple(Op.parse(word) for word in row.split()) for row in rows)
    num_microbatches = 1 + max((op.microbatch for row in ops for op in row), default=0)
    return Schedule("authored", num_microbatches, place or tuple(range(len(rows))), ops, waits)


def indexed(schedule: Schedule) -> dict[tuple[int, int], set[Op]]:
    """(stage, micro-batch) -> its operations, wherever they run."""
    index: dict[tuple[int, int], set[Op]] = defaultdict(set)
    for row in schedule.ops:
        for op in row:
            index[op.stage, op.microbatch].add(op)
    return index


def needed(op: Op, schedule: Schedule, index: dict[tuple[int, int], set[Op]] | None = None) -> set[Op]:
    """The computations whose results `op` uses, wherever they run."""
    index = indexed(schedule) if index is None else index
    stage, m = op.stage, op.microbatch
    own = index[stage, m]
    segments = [o.segment for o in own if o.kind is B] or [0]
    gradient: set[Op] = set()
    if stage + 1 < len(schedule.stage_to_rank):
        split = Op(I, stage + 1, m)
        gradient = {split if split in index[stage + 1, m] else Op(B, stage + 1, m, 0)}
    if op.kind is F:
        return {Op(F, stage - 1, m)} if stage else set()
    if op.kind is W:
        return {Op(I, stage, m)}
    if op.kind is R:
        waits = schedule.recompute_waits and op.segment == max(segments)
        return {Op(F, stage, m)} | (gradient if waits else set())
    uses = {Op(F, stage, m)} | ({Op(R, stage, m, op.segment)} & own)
    return uses | (gradient if op.segment == max(segments) else {Op(B, stage, m, op.segment + 1)})


def crossing(schedule: Schedule) -> list[tuple[Op, Op]]:
    """The (send, receive) pairs that the placement of the stages makes necessary."""
    home = schedule.stage_to_rank
    trains = any(op.kind in (B, I, W) for row in schedule.ops for op in row)
    pairs = []
    for stage in range(len(home) - 1):
        if home[stage] == home[stage + 1]:
            continue
        for m in range(schedule.num_microbatches):
            pairs.append((Op(SEND_F, stage, m), Op(RECV_F, stage + 1, m)))
            if trains:
                pairs.append((Op(SEND_B, stage + 1, m), Op(RECV_B, stage, m)))
    return pairs


def is_complete(schedule: Schedule) -> bool:
    """Whether everything is there once, on its rank, and nothing else."""
    flat = [(rank, op) for rank, row in enumerate(schedule.ops) for op in row]
    home = schedule.stage_to_rank
    if len(set(flat)) != len(flat) or len({op for _, op in flat}) != len(flat):
        return False
    for rank, op in flat:
        exists = 0 <= op.stage < len(home) and 0 <= op.microbatch < schedule.num_microbatches
        if not exists or op.segment < 0 or home[op.stage] != rank:
            return False
    trains = any(op.kind in (B, I, W) for _, op in flat)
    held: dict[tuple[int, int], set[tuple[Kind, int]]] = defaultdict(set)
    for _, op in flat:
        if op.kind in COMPUTED:
            held[op.stage, op.microbatch].add((op.kind, op.segment))
    for stage in range(len(home)):
        for m in range(schedule.num_microbatches):
            have = held[stage, m]
            if not trains:
                allowed = [{(F, 0)}]
            else:
                allowed = [{(F, 0), (B, 0)}, {(F, 0), (I, 0), (W, 0)}, {(F, 0), (R, 0), (I, 0), (W, 0)}]
                n = sum(kind is R for kind, _ in have)
                if n:
                    allowed.append({(F, 0)} | {(kind, s) for s in range(n) for kind in (R, B)})
            if have not in allowed:
                return False
    transfers = {op for _, op in flat if op.kind not in COMPUTED}
    return not transfers or transfers == {op for pair in crossing(schedule) for op in pair}


def graph(schedule: Schedule) -> dict[object, set]:
    """node -> nodes that must finish first. A send and its receive are one node: a rendezvous.

    Edges: a rank's computations run one after another; its transfers are posted when the computations
    written before them are done, and start in the order in which they are written; a computation waits
    for the messages and results that it uses.
    """
    pair_of = {op: pair for pair in crossing(schedule) for op in pair}
    is_lowered = any(op.kind not in COMPUTED for row in schedule.ops for op in row)
    home = schedule.stage_to_rank
    before: dict[object, set] = {}
    index = indexed(schedule)
    for row in schedule.ops:
        computation: Op | None = None
        transfer: object = None
        for op in row:
            node = op if op.kind in COMPUTED else pair_of[op]
            edges = before.setdefault(node, set())
            if computation is not None:
                edges.add(computation)
            if op.kind in COMPUTED:
                computation = op
                for source in needed(op, schedule, index):
                    if is_lowered and home[source.stage] != home[op.stage]:
                        kind = RECV_F if op.kind is F else RECV_B
                        edges.add(pair_of[Op(kind, op.stage, op.microbatch)])
                    else:
                        edges.add(source)
            else:
                if transfer is not None:
                    edges.add(transfer)
                transfer = node
                if op.kind is SEND_F:
                    edges.add(Op(F, op.stage, op.microbatch))
                elif op.kind is SEND_B:
                    split = Op(I, op.stage, op.microbatch)
                    is_split = split in index[op.stage, op.microbatch]
                    edges.add(split if is_split else Op(B, op.stage, op.microbatch))
    return before


def is_acyclic(before: dict[object, set]) -> bool:
    after = defaultdict(list)
    for node, sources in before.items():
        for source in sources:
            after[source].append(node)
    missing = {node: len(sources) for node, sources in before.items()}
    ready = [node for node, count in missing.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for node in after[ready.pop()]:
            missing[node] -= 1
            if missing[node] == 0:
                ready.append(node)
    return done == len(before)


def can_run(schedule: Schedule) -> bool:
    """The verdict that the validator must reach, by brute force.

    A send written before what it sends is refused although it could be posted late.
    """
    if not is_complete(schedule):
        return False
    for row in schedule.ops:
        place = {op: index for index, op in enumerate(row)}
        for op in row:
            if op.kind is SEND_F and place[Op(F, op.stage, op.microbatch)] > place[op]:
                return False
            if op.kind is SEND_B:
                split = Op(I, op.stage, op.microbatch)
                source = split if split in place else Op(B, op.stage, op.microbatch)
                if place[source] > place[op]:
                    return False
    return is_acyclic(graph(schedule))


def random_schedule(
    rng: random.Random, place: tuple[int, ...], num_microbatches: int, kind: str = "B"
) -> Schedule:
    """A valid schedule: a random order of all operations in which each follows what it uses, dealt to ranks.

    `kind`: "F" inference, "B" whole backwards, "IW" split ones, "RB" recomputed ones, "RB2" in two segments.
    """
    parts = {
        "F": [(F, 0)],
        "B": [(F, 0), (B, 0)],
        "IW": [(F, 0), (I, 0), (W, 0)],
        "RB": [(F, 0), (R, 0), (B, 0)],
        "RB2": [(F, 0), (R, 1), (B, 1), (R, 0), (B, 0)],
    }[kind]
    every = [
        Op(k, stage, m, segment)
        for stage in range(len(place))
        for m in range(num_microbatches)
        for k, segment in parts
    ]
    waits = rng.random() < 0.5
    whole = Schedule("random", num_microbatches, place, (tuple(every),), waits)
    index = indexed(whole)
    missing = {op: needed(op, whole, index) for op in every}
    rows: list[list[Op]] = [[] for _ in range(1 + max(place))]
    while missing:
        op = rng.choice([op for op, sources in missing.items() if not sources])
        rows[place[op.stage]].append(op)
        del missing[op]
        for sources in missing.values():
            sources.discard(op)
    return Schedule("random", num_microbatches, place, tuple(map(tuple, rows)), waits)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Megatron-LM's order of several stages a rank; num_microbatches is a multiple of num_ranks."""
    total = num_microbatches * num_chunks

    def at(index: int, rank: int, *, forward: bool) -> Op:
        group, place = divmod(index, num_ranks * num_chunks)
        chunk = place // num_ranks if forward else num_chunks - 1 - place // num_ranks
        return Op(F if forward else B, chunk * num_ranks + rank, group * num_ranks + place % num_ranks)

    rows = []
    for rank in range(num_ranks):
        warmup = min(total, (num_ranks - rank - 1) * 2 + (num_chunks - 1) * num_ranks)
        forwards = [at(i, rank, forward=True) for i in range(total)]
        backwards = [at(i, rank, forward=False) for i in range(total)]
        pairs = zip(forwards[warmup:], backwards, strict=False)
        steady = [op for pair in pairs for op in pair]
        rows.append(tuple(forwards[:warmup] + steady + backwards[total - warmup :]))
    place = tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))
    return Schedule("interleaved", num_microbatches, place, tuple(rows))


def loop(num_ranks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * 2


def v_shape(num_ranks: int) -> tuple[int, ...]:
    return (*range(num_ranks), *reversed(range(num_ranks)))


def laid_out(schedule: Schedule, costs: Costs) -> dict[Op, tuple[float, float]]:
    """(start, end) of every operation, from `graph`: each starts when the last of what it waits for is over.

    A computation's result reaches another rank `send` later, unless the schedule holds its transfers.
    """
    before = graph(schedule)
    rank_of = {op: rank for rank, row in enumerate(schedule.ops) for op in row}
    is_lowered = any(op.kind not in COMPUTED for op in rank_of)
    times: dict[object, tuple[float, float]] = {}

    def over(source: object, node: object) -> float:
        start, end = times[source]
        if not isinstance(source, Op):
            return end if isinstance(node, Op) else start  # of a transfer before it, only its start
        crosses = isinstance(node, Op) and rank_of[source] != rank_of[node]
        return end + costs.delay_ms(source, schedule) if crosses and not is_lowered else end

    remaining = dict(before)
    while remaining:
        for node in [node for node, sources in remaining.items() if sources <= times.keys()]:
            start = max([over(source, node) for source in remaining.pop(node)], default=0.0)
            is_pair = not isinstance(node, Op)
            lasts = costs.delay_ms(node[0], schedule) if is_pair else costs.duration_ms(node, schedule)
            times[node] = (start, start + lasts)
    return {op: when for node, when in times.items() for op in ([node] if isinstance(node, Op) else node)}
