"""Wrong answers to the exercises of chapter 04, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch04 import Curve, Sizes, most_microbatches_solution, solution
from gpipe_lab.plan.ops import Kind
from gpipe_lab.plan.schedule import Schedule
from gpipe_lab.plan.simulate import Costs, simulate


def _rooms(limit: int, weights: Sizes, saved: Sizes) -> list[int]:
    return [(limit - w) // a for w, a in zip(weights, saved, strict=True)]


def weights_forgotten(limit: int, weights: Sizes, saved: Sizes) -> int:
    return min(limit // a for a in saved)


def roomiest_stage_decides(limit: int, weights: Sizes, saved: Sizes) -> int:
    return max(0, *_rooms(limit, weights, saved))


def first_stage_decides(limit: int, weights: Sizes, saved: Sizes) -> int:
    return max(0, _rooms(limit, weights, saved)[0])


def largest_activations_decide(limit: int, weights: Sizes, saved: Sizes) -> int:
    fullest = saved.index(max(saved))
    return max(0, _rooms(limit, weights, saved)[fullest])


def full_to_the_byte_refused(limit: int, weights: Sizes, saved: Sizes) -> int:
    return most_microbatches_solution(limit - 1, weights, saved)


def one_card_holds_all(limit: int, weights: Sizes, saved: Sizes) -> int:
    return max(0, (limit - sum(weights)) // sum(saved))


def fewer_than_none(limit: int, weights: Sizes, saved: Sizes) -> int:
    return min(_rooms(limit, weights, saved))


def _curves(
    schedule: Schedule, costs: Costs, *, take: Kind, give: set[Kind], at: str = "end_ms"
) -> list[Curve]:
    """A wrong answer: counts up at `take`, down at `give`, at the start or the end of the operation."""
    curves: list[Curve] = [[] for _ in range(schedule.num_ranks)]
    count = [0] * schedule.num_ranks
    for event in sorted(simulate(schedule, costs).computations, key=lambda event: event.end_ms):
        count[event.rank] += (event.op.kind is take) - (event.op.kind in give)
        curves[event.rank].append((getattr(event, at), count[event.rank]))
    return curves


def never_freed(schedule: Schedule, costs: Costs) -> list[Curve]:
    return _curves(schedule, costs, take=Kind.F, give=set())


def freed_at_backward_input(schedule: Schedule, costs: Costs) -> list[Curve]:
    return _curves(schedule, costs, take=Kind.F, give={Kind.B, Kind.I})


def counted_at_the_start(schedule: Schedule, costs: Costs) -> list[Curve]:
    return _curves(schedule, costs, take=Kind.F, give={Kind.B, Kind.W}, at="start_ms")


def always_all(schedule: Schedule, costs: Costs) -> list[Curve]:
    trace = simulate(schedule, costs)
    return [
        [(event.end_ms, schedule.num_microbatches) for event in trace.computations if event.rank == rank]
        for rank in range(schedule.num_ranks)
    ]


def all_ranks_together(schedule: Schedule, costs: Costs) -> list[Curve]:
    """Every rank is charged with what the others hold as well."""
    merged = sorted(point for curve in solution(schedule, costs) for point in curve)
    return [merged for _ in range(schedule.num_ranks)]


MUTANTS = {
    "04-most-microbatches": {
        "weights forgotten": weights_forgotten,
        "the stage with the most room decides": roomiest_stage_decides,
        "the first stage decides": first_stage_decides,
        "the largest A decides, whatever its weights": largest_activations_decide,
        "full to the byte refused": full_to_the_byte_refused,
        "one card holds all stages": one_card_holds_all,
        "less than none where the weights exceed a card": fewer_than_none,
    },
    "04-held": {
        "never freed": never_freed,
        "freed at backward_input, while W still needs them": freed_at_backward_input,
        "counted when an operation starts": counted_at_the_start,
        "M at all times": always_all,
        "all ranks counted together": all_ranks_together,
    },
}
