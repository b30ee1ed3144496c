"""Wrong answers to the exercises of chapter 05, which each of them must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpipe_lab.course.exercise import Answer
from gpipe_lab.course.exercises.ch05 import restored, solution


def _with_bytes(*, always: Callable[..., int], except_last: Callable[..., int] | None = None) -> Answer:
    """A wrong answer: these bytes, from (M, saved, boundary), in place of the right ones."""

    def answer(checkpoint: str, num_microbatches: int, saved: int, boundary: int) -> int:
        wrong = {"always": always, "except_last": except_last or always}.get(checkpoint)
        if wrong is None:
            return num_microbatches * saved
        return wrong(num_microbatches, saved, boundary)

    return answer


def square_root_of_layers(num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int) -> int:
    return max(1, round(math.sqrt(num_layers)))


def forgets_microbatches(num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int) -> int:
    return int(solution(num_layers, boundary, saved_per_layer, 1))


def whole_stage(num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int) -> int:
    return num_layers


def restores_every_microbatch(
    num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int
) -> int:
    return int(solution(num_layers, boundary, num_microbatches * saved_per_layer, num_microbatches))


def rounds_the_formula(num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int) -> int:
    k = math.sqrt(num_microbatches * num_layers * boundary / saved_per_layer)
    return max(1, min(num_layers, round(k)))


def segments_rounded_down(num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int) -> int:
    def peak(k: int) -> int:
        return num_microbatches * (num_layers // k) * boundary + k * saved_per_layer

    return min(range(1, num_layers + 1), key=peak)


MUTANTS = {
    "05-kept-bytes": {
        "the restored micro-batch left out": _with_bytes(always=lambda M, A, b: M * b),
        "its input counted twice": _with_bytes(always=lambda M, A, b: M * b + A),
        "every micro-batch restored at once": _with_bytes(always=lambda M, A, b: M * A),
        "one micro-batch alone": _with_bytes(always=lambda M, A, b: A),
        "the last kept beside a restored one": _with_bytes(
            always=restored, except_last=lambda M, A, b: (M - 1) * b + A + (A - b)
        ),
        "except_last counted without the last": _with_bytes(
            always=restored, except_last=lambda M, A, b: (M - 1) * b + (A - b)
        ),
    },
    "05-best-every": {
        "√layers, the rule for one device": square_root_of_layers,
        "micro-batches forgotten": forgets_microbatches,
        "always the whole stage": whole_stage,
        "every micro-batch restored at once": restores_every_microbatch,
        "√(M·layers·b/a) rounded": rounds_the_formula,
        "a last, shorter segment forgotten": segments_rounded_down,
    },
}
