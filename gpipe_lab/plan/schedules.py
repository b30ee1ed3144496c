"""The built-in schedules: each a picture, and the few lines that say what a rank runs in which order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from .errors import require, require_count
from .ops import B, F, I, Kind, Op, W
from .schedule import Schedule

# What the constructors are put together from


def check_counts(constructor: str, **counts: int) -> None:
    """Raise `InputError` unless every count is a whole number of at least 1."""
    call = f"{constructor}({', '.join(counts)})"
    for name, count in counts.items():
        require_count(count, name, where=call)


def build(
    name: str, num_microbatches: int, stage_to_rank: Sequence[int], row: Callable[[int], list[Op]]
) -> Schedule:
    """The schedule whose rank k runs row(k)."""
    place = tuple(int(rank) for rank in stage_to_rank)
    ops = tuple(tuple(row(rank)) for rank in range(1 + max(place)))
    return Schedule(name, int(num_microbatches), place, ops)


def loop_placement(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod P: the stages go round the ranks `num_chunks` times."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and up again: the first and the last stage share rank 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def each(kind: Kind, stage: int, num_microbatches: int) -> list[Op]:
    """One operation of a stage for every micro-batch, in order."""
    return [Op(kind, stage, m) for m in range(num_microbatches)]


def alternate(forwards: list[Op], backwards: list[Op], num_warmup: int) -> list[Op]:
    """Warmup: `num_warmup` forwards. Steady: one forward, one backward. Cooldown: the backwards left."""
    warmup, rest = forwards[:num_warmup], forwards[num_warmup:]
    steady = [op for pair in zip(rest, backwards, strict=False) for op in pair]
    return warmup + steady + backwards[len(rest) :]


def with_weights(order: list[Op], held_back: int) -> list[Op]:
    """Add the W's: each comes after the I that is `held_back` further on; those left over come last."""
    row: list[Op] = []
    waiting: deque[Op] = deque()
    for op in order:
        row.append(op)
        if op.kind is I:
            waiting.append(op._replace(kind=W))
            if len(waiting) > held_back:
                row.append(waiting.popleft())
    return row + list(waiting)


def spelled(letters: str, rank: int, num_ranks: int, num_microbatches: int) -> list[Op]:
    """The row of a rank with two stages in a V, spelled in letters, without micro-batches that do not exist.

    Capitals are its stage on the way down, small letters the one on the way up. Each F, and each B or I, is
    of its stage's next micro-batch; each W of the oldest I of its stage that has none yet. A `*` is the W of
    the oldest I of either stage.
    """
    so_far: Counter[tuple[int, bool]] = Counter()
    put_off: list[Op] = []
    row = []
    for letter in letters:
        stage = rank if letter.isupper() else 2 * num_ranks - 1 - rank
        if letter in "Ww*":
            oldest = next(op for op in put_off if letter == "*" or op.stage == stage)
            put_off.remove(oldest)
            row.append(oldest._replace(kind=W))
        else:
            kind = Kind(letter.upper())
            row.append(Op(kind, stage, so_far[stage, kind is F]))
            so_far[stage, kind is F] += 1
            if kind is I:
                put_off.append(row[-1])
    return [op for op in row if op.microbatch < num_microbatches]


# The schedules


def naive(num_stages: int, num_microbatches: int = 1) -> Schedule:
    """One micro-batch in the pipeline at a time: never two ranks busy (GPipe §1, the baseline).

    >>> print(naive(3, 2).grid())
    F0 .  .  .  .  B0 F1 .  .  .  .  B1
    .  F0 .  .  B0 .  .  F1 .  .  B1 .
    .  .  F0 B0 .  .  .  .  F1 B1 .  .
    """
    check_counts("naive", num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        return [Op(kind, stage, m) for m in range(num_microbatches) for kind in (F, B)]

    return build("naive", num_microbatches, loop_placement(num_stages), row)


def forward_only(
    num_stages: int, num_microbatches: int, *, stage_to_rank: Sequence[int] | None = None
) -> Schedule:
    """Inference, and the laundry: every micro-batch goes down the pipeline, nothing comes back.

    >>> print(forward_only(3, 4).grid())
    F0 F1 F2 F3 .  .
    .  F0 F1 F2 F3 .
    .  .  F0 F1 F2 F3

    stage_to_rank: where the stages are; one on each rank unless given. A rank with several takes its forwards
    by micro-batch + stage, the slot that each would have if every stage had a rank of its own.
    """
    check_counts("forward_only", num_stages=num_stages, num_microbatches=num_microbatches)
    place = loop_placement(num_stages) if stage_to_rank is None else stage_to_rank

    def row(rank: int) -> list[Op]:
        here = [each(F, stage, num_microbatches) for stage in range(num_stages) if place[stage] == rank]
        return sorted((op for ops in here for op in ops), key=lambda op: (op.microbatch + op.stage, op.stage))

    return build("forward_only", num_microbatches, place, row)


def gpipe(num_stages: int, num_microbatches: int, *, backward: str = "reversed") -> Schedule:
    """All forwards, then all backwards in reverse order (GPipe §2.3, figure 2c).

    >>> print(gpipe(3, 4).grid())
    F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
    .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .

    backward="fifo" runs the backwards first in, first out, in the order of the forwards, as torch's
    ScheduleGPipe does: the same peak and, for equal stages, the same makespan.
    """
    check_counts("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)
    require(
        backward in ("reversed", "fifo"),
        'gpipe\'s backwards run "reversed" or "fifo": first in, first out',
        got=f"backward={backward!r}",
        where="gpipe(num_stages, num_microbatches, backward=...)",
        remedy='backward="reversed"',
    )

    def row(stage: int) -> list[Op]:
        backwards = each(B, stage, num_microbatches)
        return each(F, stage, num_microbatches) + (backwards[::-1] if backward == "reversed" else backwards)

    return build("gpipe", num_microbatches, loop_placement(num_stages), row)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Each backward as early as possible (PipeDream-Flush; Megatron-LM, arXiv 2104.04473 §2.2.1).

    >>> print(one_f_one_b(3, 4).grid())
    F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Warmup: as many forwards as there are stages behind. Steady: one forward, one backward. Cooldown:
    the backwards that are left. Stage k holds at most min(P - k, M) micro-batches.
    """
    check_counts("one_f_one_b", num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        forwards, backwards = each(F, stage, num_microbatches), each(B, stage, num_microbatches)
        return alternate(forwards, backwards, num_warmup=num_stages - 1 - stage)

    return build("one_f_one_b", num_microbatches, loop_placement(num_stages), row)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: `num_chunks` stages on each rank (Megatron-LM, arXiv 2104.04473 §2.2.2).

    >>> print(interleaved(2, 4).grid())
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Stage s is on rank s mod P. Micro-batches go in groups of P: a rank runs a whole group through one of
    its stages, then through its next; so M is a multiple of P. Between warmup and cooldown one forward
    and one backward alternate, as in 1F1B. The bubble *time* falls by the number of chunks v, the bubble
    fraction is (P-1)/(vM+P-1); a step sends 2M(vP-1) messages, and for M > P rank 0 holds 1+(P-1)/(Pv)
    times what 1F1B holds. One chunk is 1F1B with a deeper warmup. Raises `InputError` for other M.
    """
    check_counts("interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    multiple = num_ranks * -(-num_microbatches // num_ranks)
    require(
        num_microbatches % num_ranks == 0,
        "interleaved runs micro-batches in groups of P: num_microbatches is a multiple of num_ranks",
        got=f"num_microbatches={num_microbatches}, num_ranks={num_ranks}",
        where="interleaved(num_ranks, num_microbatches, num_chunks)",
        remedy=f"num_microbatches={multiple}",
    )

    def group_by_group(kind: Kind, stages: Sequence[int]) -> list[Op]:
        groups = range(0, num_microbatches, num_ranks)
        return [Op(kind, s, first + i) for first in groups for s in stages for i in range(num_ranks)]

    def row(rank: int) -> list[Op]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        num_warmup = (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
        return alternate(group_by_group(F, stages), group_by_group(B, stages[::-1]), num_warmup)

    return build("interleaved", num_microbatches, loop_placement(num_ranks, num_chunks), row)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with its W's put off, at 1F1B's peak memory (Zero Bubble §2.1, ZB-H1).

    >>> print(zero_bubble_h1(3, 4).grid())
    F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Stage k warms up with P-1-k forwards and holds back up to k W's, so every stage holds min(P, M)
    micro-batches at its peak. Bubble time for M ≥ P: (P-1)(F+I-W) where W is the shortest of the three.
    """
    return _handcrafted("zero_bubble_h1", num_stages, num_microbatches, depth=1)


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Twice the warmup and twice the W's held back (Zero Bubble §2.2, ZB-H2).

    >>> print(zero_bubble_h2(3, 5).grid())
    F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    Every stage holds min(2P-1, M) micro-batches at its peak. For M ≥ 2P-1, from a rank's first operation
    to its last, the longest bubble is (P-1)(F+I-2W), and none where F = I = W: all ranks work without a
    pause, each starting one F after the one before it. The makespan on one clock adds that start.
    """
    return _handcrafted("zero_bubble_h2", num_stages, num_microbatches, depth=2)


def _handcrafted(name: str, num_stages: int, num_microbatches: int, depth: int) -> Schedule:
    check_counts(name, num_stages=num_stages, num_microbatches=num_microbatches)

    def row(stage: int) -> list[Op]:
        forwards, inputs = each(F, stage, num_microbatches), each(I, stage, num_microbatches)
        order = alternate(forwards, inputs, num_warmup=depth * (num_stages - 1 - stage))
        return with_weights(order, held_back=depth * stage)

    return build(name, num_microbatches, loop_placement(num_stages), row)


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, down the ranks and up again (Zero Bubble §6, ZB-V).

    >>> print(zero_bubble_v(2, 3).grid())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Stages s and 2P-1-s are on rank s, so a micro-batch turns round on the last rank and its loss is on
    the first, where its backward starts at once. A rank holds at most 2P of its half stages: what 1F1B
    holds on rank 0. For M ≥ 2P-1 and F = I = W no rank pauses between its first operation and its last.
    With fewer micro-batches it is the order of 2P-1 micro-batches with those that do not exist left out.
    """
    check_counts("zero_bubble_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks - 1)

    def row(rank: int) -> list[Op]:
        behind = num_ranks - 1 - rank
        letters = (
            "F" * (2 * behind + 1)
            + "fF" * rank
            + "fiw" * (behind + 1)
            + "FIWfiw" * (total - num_ranks - behind)
            + "IWfiw" * behind
            + "Ii" * rank
            + "IW" * (behind + 1)
            + "w" * rank
            + "W" * rank
        )
        return spelled(letters, rank, num_ranks, num_microbatches)

    return build("zero_bubble_v", num_microbatches, v_placement(num_ranks), row)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank in a V, one stage's forward beside the other's backward (DeepSeek's DualPipeV).

    >>> print(dualpipe_v(2, 4).grid())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    DualPipe (DeepSeek-V3, arXiv 2412.19437 §3.2.1) feeds micro-batches from both ends, so every rank keeps
    two stages' weights and every weight is there twice. DualPipeV is one half of that picture: stages s and
    2P-1-s on rank s, each weight once. In its steady part a rank pairs the forward of one stage with the
    backward of the other, so that on a GPU the messages inside one (of experts, of tensor parallel) travel
    under the other's arithmetic. Here the two run one after the other, which costs nothing but that overlap.
    Most backwards are whole; those that fill and drain are split, and W's run first in, first out.
    A rank holds at most 2P+1 of its half stages. For M ≥ 2P and F = I = W the bubble time is (P-1)F of one
    stage. With fewer micro-batches it is the order of 2P with those that do not exist left out.
    """
    check_counts("dualpipe_v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    total = max(num_microbatches, 2 * num_ranks)

    def row(rank: int) -> list[Op]:
        behind = num_ranks - 1 - rank
        turns = "bB" * (rank + 1)
        letters = (
            "F" * (2 * behind)
            + "Ff" * (rank + 1)
            + "iwf" * behind
            + "FbfB" * (total - 2 * num_ranks + rank + 1)
            + "bfB" * behind
            + turns[: rank + 1]
            + turns[rank + 1 :].replace("b", "i").replace("B", "I")
            + "*I" * behind
            + "*" * (rank + 1)
        )
        return spelled(letters, rank, num_ranks, num_microbatches)

    return build("dualpipe_v", num_microbatches, v_placement(num_ranks), row)


def replicate(schedule: Schedule, num_replicas: int) -> Schedule:
    """`num_replicas` copies of a pipeline side by side, as one schedule.

    >>> print(replicate(gpipe(2, 2), 2).grid())
    F0 F1 .  .  B1 B0
    .  F0 F1 B1 B0 .
    F2 F3 .  .  B3 B2
    .  F2 F3 B3 B2 .

    Replica r takes the ranks rP … rP+P-1 and the micro-batches rM … rM+M-1 of a pipeline of P ranks and M
    micro-batches; nothing passes between replicas until gradients are summed. Raises `InputError` for what
    is no schedule, or one that is replicated already.
    """
    require_count(num_replicas, "num_replicas", where="replicate")
    if num_replicas == 1:
        return schedule
    require(
        isinstance(schedule, Schedule) and schedule.num_replicas == 1,
        "what is replicated is a schedule of one pipeline",
        got=f"{getattr(schedule, 'num_replicas', type(schedule).__name__)} replicas",
        where="replicate",
        remedy="gl.replicate(gl.gpipe(num_stages, num_microbatches), 2)",
    )
    num_microbatches = schedule.num_microbatches
    rows = tuple(
        tuple(op._replace(microbatch=op.microbatch + replica * num_microbatches) for op in row)
        for replica in range(num_replicas)
        for row in schedule.ops
    )
    return replace(
        schedule, num_microbatches=num_replicas * num_microbatches, ops=rows, num_replicas=num_replicas
    )


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    make.__name__: make
    for make in (
        naive,
        forward_only,
        gpipe,
        one_f_one_b,
        interleaved,
        zero_bubble_h1,
        zero_bubble_h2,
        zero_bubble_v,
        dualpipe_v,
    )
}
