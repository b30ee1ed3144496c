"""Chapter 11, beyond GPipe: 1F1B, where the W's go, and a schedule of your own."""

from __future__ import annotations

import math
from functools import partial

from ...plan.formulas import pipeline_ms
from ...plan.memory import peak_in_flight
from ...plan.ops import Kind, Op
from ...plan.schedule import Schedule
from ...plan.schedules import one_f_one_b
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over, over_cases
from ..race import share_of_a_rank
from .schedules import is_built_in, not_runnable, with_rows

IMPORTS = "from gpipe_lab import Kind, Op, Schedule"

# a) 1F1B.


def my_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [Op(Kind.B, stage, m) for m in range(num_microbatches)]
        rows.append(tuple(forwards + backwards))  # this is GPipe's order, first in, first out
    raise NotImplementedError("let every backward come as early as it can, then delete this line")
    return Schedule("my 1F1B", num_microbatches, tuple(range(num_stages)), tuple(rows))


def solution(num_stages: int, num_microbatches: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        forwards = [Op(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [Op(Kind.B, stage, m) for m in range(num_microbatches)]
        # As many forwards as there are stages behind; with fewer micro-batches, all there are.
        num_warmup = min(num_stages - 1 - stage, num_microbatches)
        row = forwards[:num_warmup]
        for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
            row += [forward, backward]
        row += backwards[num_microbatches - num_warmup :]
        rows.append(tuple(row))
    return Schedule("my 1F1B", num_microbatches, tuple(range(num_stages)), tuple(rows))


@over(P=range(1, 6), M=range(1, 9))
def it_runs(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every stage runs every micro-batch forward and backward, in an order that can run"""
    return not_runnable(answer(P, M), P=P, M=M)


@over(P=range(1, 6), M=range(1, 9))
def holds_least(answer: Answer, P: int, M: int) -> Mismatch | None:
    """stage k holds min(P − k, M) micro-batches at its peak"""
    schedule = answer(P, M)
    expected = tuple(min(P - stage, M) for stage in range(P))
    got = peak_in_flight(schedule)
    return None if got == expected else Mismatch(expected, got, schedule.grid())


@over(P=range(1, 6), M=range(1, 9), backward_ms=(1.0, 2.0, 3.5))
def on_time(answer: Answer, P: int, M: int, backward_ms: float) -> Mismatch | None:
    """the whole step takes GPipe's (M + P − 1)(Tf + Tb), with Tf = 1 ms"""
    schedule = answer(P, M)
    makespan = simulate(schedule, Costs(forward=1.0, backward=backward_ms)).makespan_ms
    expected = pipeline_ms(P, M, 1.0, backward_ms)
    if math.isclose(makespan, expected, rel_tol=1e-9):
        return None
    return Mismatch(f"{expected:g} ms", f"{makespan:g} ms", schedule.grid())


ONE_F_ONE_B = Exercise(
    name="11-1f1b",
    statement=(
        "Write 1F1B: every stage starts each backward as early as it can. Stage k holds min(P − k, M) "
        "micro-batches at its peak, and the step takes as long as GPipe's. M may be smaller than P."
    ),
    starter=my_one_f_one_b,
    solution=solution,
    properties=(it_runs, holds_least, on_time),
    hints=(
        "Three parts: a warmup of forwards; then one forward, one backward in turn; then the backwards left.",
        "The last stage has no warmup: F0 B0 F1 B1 … Each stage above needs one forward more before its "
        "first gradient can be there.",
        "num_warmup = min(P − 1 − stage, M). The backwards left over at the end are as many as the warmup.",
    ),
    imports=IMPORTS,
)


# b) Where the W's go.


def place_weights(order: list[Op], stage: int, num_stages: int) -> list[Op]:
    """The stage's operations with a W for every I.

    order: its F's and I's, as 1F1B runs its F's and B's. op._replace(kind=Kind.W) is the W of an I.
    """
    raise NotImplementedError("put the W's in, then delete this line")
    return order


def solution_weights(order: list[Op], stage: int, num_stages: int) -> list[Op]:
    row, waiting = [], []
    for op in order:
        row.append(op)
        if op.kind is Kind.I:
            waiting.append(op._replace(kind=Kind.W))
            # Stage k may fall k W's behind: it holds P − k micro-batches in 1F1B, so k more are P.
            if len(waiting) > stage:
                row.append(waiting.pop(0))
    return row + waiting


def hold_back(order: list[Op], stage: int, num_stages: int, *, by: str) -> list[Op]:
    """A wrong answer: another number of W's is put off."""
    held = {"none": 0, "all": len(order), "P": num_stages, "most at the top": num_stages - 1 - stage}[by]
    return solution_weights(order, held, num_stages)


def inputs_of_1f1b(stage: int, P: int, M: int) -> list[Op]:
    """1F1B's order on a stage, with I in the place of B."""
    row = one_f_one_b(P, M).ops[stage]
    return [op._replace(kind=Kind.I) if op.kind is Kind.B else op for op in row]


def placed(answer: Answer, P: int, M: int) -> Schedule:
    """The schedule that the answer makes of 1F1B."""
    rows = [answer(inputs_of_1f1b(stage, P, M), stage, P) for stage in range(P)]
    return with_rows("placed W's", M, rows)


@over(P=range(1, 6), M=range(1, 8))
def split_runs(answer: Answer, P: int, M: int) -> Mismatch | None:
    """every micro-batch has its F, I and W on every stage, in an order that can run"""
    schedule = placed(answer, P, M)
    found = not_runnable(schedule, P=P, M=M)
    if found is not None:
        return found
    missing = [
        Op(Kind.W, s, m) for s in range(P) for m in range(M) if Op(Kind.W, s, m) not in schedule.rank_of
    ]
    return Mismatch("a W for every I", f"no {missing[0]}", schedule.grid()) if missing else None


@over(P=range(1, 6), M=range(1, 11))
def holds_at_most_p(answer: Answer, P: int, M: int) -> Mismatch | None:
    """no stage holds more than P micro-batches, from F until W"""
    schedule = placed(answer, P, M)
    got = peak_in_flight(schedule)
    return None if max(got) <= P else Mismatch(f"at most {P} on each stage", got, schedule.grid())


@over(P=range(2, 6), M=range(5, 10), weight_ms=(1.0, 0.75))
def shorter(answer: Answer, P: int, M: int, weight_ms: float) -> Mismatch | None:
    """shorter than 1F1B, and than with each W right after its I, where F = I = 1 ms"""
    schedule = placed(answer, P, M)
    costs = Costs(forward=1.0, backward=1.0 + weight_ms, backward_input=1.0, backward_weight=weight_ms)
    at_once = placed(partial(hold_back, by="none"), P, M)
    best = min(simulate(other, costs).makespan_ms for other in (one_f_one_b(P, M), at_once))
    makespan = simulate(schedule, costs).makespan_ms
    if makespan < best - 1e-9:
        return None
    return Mismatch(f"less than {best:g} ms", f"{makespan:g} ms", schedule.grid())


PLACE_WEIGHTS = Exercise(
    name="11-place-weights",
    statement=(
        "1F1B's backwards have been split: each B is now an I, which the stage above waits for, and a W, for "
        "which nobody waits. Put the W's in. No stage may hold more than P micro-batches, and the step must "
        "be shorter than 1F1B's, also shorter than with each W right after its I."
    ),
    starter=place_weights,
    solution=solution_weights,
    properties=(split_runs, holds_at_most_p, shorter),
    hints=(
        "A W right after its I fills no idle slot: it only makes the next I or F later, which others need.",
        "A micro-batch is held until its W. How many more than P − k may stage k hold, if P is the limit?",
        "Keep a list of W's put off. When it is longer than the stage's number, run the oldest.",
    ),
    imports="from gpipe_lab import Kind, Op",
)


# c) A schedule of your own.


def my_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Any placement, whole or split backwards. Schedule(name, M, stage_to_rank, ops by rank)."""
    raise NotImplementedError("invent one, then delete this line")


def solution_own(num_ranks: int, num_microbatches: int) -> Schedule:
    """Greedy, slot by slot: an I for the stage above; else an F, while there is room; else a W."""
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]
    ended: dict[Op, int] = {}  # the slot at which each operation's result is there
    done = [dict.fromkeys((Kind.F, Kind.I, Kind.W), 0) for _ in range(num_ranks)]
    slot = 0
    while len(ended) < 3 * num_ranks * num_microbatches:
        for stage in range(num_ranks):
            count = done[stage]
            gradient, activation = Op(Kind.I, stage + 1, count[Kind.I]), Op(Kind.F, stage - 1, count[Kind.F])
            may = {
                Kind.I: count[Kind.I] < count[Kind.F]
                and (stage == num_ranks - 1 or ended.get(gradient, slot + 1) <= slot),
                Kind.F: count[Kind.F] < num_microbatches
                and count[Kind.F] - count[Kind.W] < num_ranks
                and (stage == 0 or ended.get(activation, slot + 1) <= slot),
                Kind.W: count[Kind.W] < count[Kind.I],
            }
            kind = next((kind for kind in (Kind.I, Kind.F, Kind.W) if may[kind]), None)
            if kind is not None:
                op = Op(kind, stage, count[kind])
                rows[stage].append(op)
                count[kind] += 1
                ended[op] = slot + 1
        slot += 1
    return Schedule("greedy", num_microbatches, tuple(range(num_ranks)), tuple(map(tuple, rows)))


SIZES = tuple({"P": P, "M": M} for P, M in ((2, 4), (3, 6), (4, 8)))


@over_cases(*SIZES)
def own_runs(answer: Answer, P: int, M: int) -> Mismatch | None:
    """it trains every micro-batch on P ranks, in an order that can run"""
    return not_runnable(answer(P, M), P=P, M=M, any_placement=True)


@over_cases(*SIZES)
def is_new(answer: Answer, P: int, M: int) -> Mismatch | None:
    """it is none of the built-in schedules under another name"""
    schedule = answer(P, M)
    name = is_built_in(schedule)
    return None if name is None else Mismatch("an order of its own", f"the order of {name}", schedule.grid())


@over_cases(*SIZES)
def holds_no_more(answer: Answer, P: int, M: int) -> Mismatch | None:
    """no rank holds more than stage 0 of 1F1B does: the activations of P micro-batches on 1/P of the model"""
    schedule = answer(P, M)
    held = [peak * share_of_a_rank(schedule) for peak in peak_in_flight(schedule)]
    return None if max(held) <= P else Mismatch(f"at most {P}", f"{max(held):g}", schedule.grid())


@over_cases(*SIZES)
def beats_1f1b(answer: Answer, P: int, M: int) -> Mismatch | None:
    """it is faster than 1F1B, where F, I and W of a rank's share of the model take 1 ms each"""
    schedule = answer(P, M)
    share = share_of_a_rank(schedule)
    costs = Costs(forward=share, backward=2 * share)
    makespan, least = simulate(schedule, costs).makespan_ms, pipeline_ms(P, M, 1.0, 2.0)
    if makespan < least - 1e-9:
        return None
    return Mismatch(f"less than {least:g} ms", f"{makespan:g} ms", schedule.grid())


INVENT = Exercise(
    name="11-invent",
    statement=(
        "Invent a schedule for P ranks. Any placement of stages, whole or split backwards. It has to be an "
        "order of its own, hold no more than 1F1B's stage 0, and be faster than 1F1B."
    ),
    starter=my_schedule,
    solution=solution_own,
    properties=(own_runs, is_new, holds_no_more, beats_1f1b),
    hints=(
        "Begin with a schedule that is nearly there, and move the W's. Does a W have to wait for its turn?",
        "Or let a rule decide: go through the slots of time, and let every rank take the most urgent "
        "operation that can start. Which is most urgent, I, F or W?",
        "I first, for a stage waits for it; then F, as long as fewer than P micro-batches are held; W else.",
    ),
    imports=IMPORTS,
)

EXERCISES = (ONE_F_ONE_B, PLACE_WEIGHTS, INVENT)
