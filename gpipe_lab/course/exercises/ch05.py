"""Chapter 05, activation checkpointing: keep every k-th layer's input, and which k is best?"""

from __future__ import annotations

import math

from ..exercise import Answer, Exercise, Mismatch, over


def best_every(num_layers, boundary, saved_per_layer, num_microbatches):
    """The k, from 1 to num_layers, at which a stage needs the fewest bytes; of equals the smallest."""
    raise NotImplementedError("count the bytes of one k, then take the best")


def solution(num_layers, boundary, saved_per_layer, num_microbatches):
    def peak(k):
        kept = num_microbatches * -(-num_layers // k) * boundary  # one input for each segment
        restored = k * saved_per_layer  # one segment of one micro-batch
        return kept + restored

    return min(range(1, num_layers + 1), key=peak)


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


def peak_bytes(
    num_layers: int, boundary: int, saved_per_layer: int, num_microbatches: int, every: int
) -> int:
    """Bytes of one stage at its peak: every micro-batch's kept inputs, and one restored segment."""
    num_segments = math.ceil(num_layers / every)
    return num_microbatches * num_segments * boundary + every * saved_per_layer


@over(num_layers=(8, 1, 2, 3, 4, 6, 12), boundary=(1,), saved_per_layer=(4, 1, 2, 16), M=(16, 1, 2, 4, 8))
def no_k_needs_less(
    answer: Answer, num_layers: int, boundary: int, saved_per_layer: int, M: int
) -> Mismatch | None:
    """no other k needs fewer bytes, and no smaller k as few"""
    got = answer(num_layers, boundary, saved_per_layer, M)
    table = {k: peak_bytes(num_layers, boundary, saved_per_layer, M, k) for k in range(1, num_layers + 1)}
    best = min(table, key=lambda k: table[k])
    if got == best:
        return None
    bytes_of = ", ".join(f"k={k}: {size}" for k, size in table.items())
    return Mismatch(f"k={best}", f"k={got}", f"bytes by k: {bytes_of}")


BEST_EVERY = Exercise(
    name="05-best-every",
    statement=(
        "A stage of `num_layers` layers keeps the input of every k-th layer (`boundary` bytes each) for each "
        "of M micro-batches in flight. A backward restores one segment of k layers at a time, "
        "`saved_per_layer` bytes a layer. Give the k that needs the fewest bytes; of equals the smallest."
    ),
    starter=best_every,
    solution=solution,
    properties=(no_k_needs_less,),
    hints=(
        "Write down the bytes for one k first: what is kept for all micro-batches, what is restored for one?",
        "A stage has ⌈layers / k⌉ segments. All M micro-batches keep an input for each of them.",
        "There are few k to try: take the minimum of M·⌈layers/k⌉·boundary + k·saved_per_layer.",
    ),
    mutants={
        "√layers, the rule for one device": square_root_of_layers,
        "micro-batches forgotten": forgets_microbatches,
        "always the whole stage": whole_stage,
        "every micro-batch restored at once": restores_every_microbatch,
        "√(M·layers·b/a) rounded": rounds_the_formula,
        "a last, shorter segment forgotten": segments_rounded_down,
    },
)

EXERCISES = (BEST_EVERY,)
