"""Chapter 05, activation checkpointing: a stage's bytes by mode, and every how many layers to keep one."""

from __future__ import annotations

import math

from ...plan.memory import StageBytes, simulate_memory
from ...plan.recompute import with_recompute
from ...plan.schedules import gpipe
from ...plan.simulate import simulate
from ..exercise import Answer, Exercise, Mismatch, over

# The bytes that a stage keeps.


def kept_bytes(checkpoint, num_microbatches, saved, boundary):
    """Bytes that a stage of GPipe keeps at its peak, by checkpoint mode.

    saved: what one micro-batch saves on the stage, its input included. boundary: that input alone.
    """
    return {
        "never": num_microbatches * saved,
        "always": ...,
        "except_last": ...,
    }[checkpoint]


def kept_bytes_solution(checkpoint, num_microbatches, saved, boundary):
    # The two are equal: GPipe goes back with the last micro-batch first, while all the others are small.
    return {
        "never": num_microbatches * saved,
        "always": num_microbatches * boundary + (saved - boundary),
        "except_last": (num_microbatches - 1) * boundary + saved,
    }[checkpoint]


def restored(num_microbatches: int, saved: int, boundary: int) -> int:
    return num_microbatches * boundary + (saved - boundary)


@over(
    checkpoint=("never", "always", "except_last"), P=(1, 2, 4), M=range(1, 7), saved=(8, 32), boundary=(1, 3)
)
def equals_the_ledger(
    answer: Answer, checkpoint: str, P: int, M: int, saved: int, boundary: int
) -> Mismatch | None:
    """it is the peak of every stage in the simulated ledger of a GPipe step"""
    trace = simulate(with_recompute(gpipe(P, M), checkpoint))
    report = simulate_memory(trace, [StageBytes(saved=saved, boundary=boundary)] * P)
    peaks = {report.peak_bytes(rank) for rank in range(P)}
    got = answer(checkpoint, M, saved, boundary)
    if peaks == {got}:
        return None
    peak = report.peak(0)
    held = ", ".join(f"{name} {size}" for name, size in peak.bytes.items() if size)
    return Mismatch(f"{peak.total} B", f"{got} B", f"stage 0 at its peak, after {peak.op}: {held}")


KEPT_BYTES = Exercise(
    name="05-kept-bytes",
    statement=(
        'Fill two lines: the bytes that a stage of GPipe keeps at its peak with checkpoint="always" and '
        '"except_last", from M, the bytes that one micro-batch saves, and those of its input among them.'
    ),
    starter=kept_bytes,
    solution=kept_bytes_solution,
    properties=(equals_the_ledger,),
    hints=(
        "Stand at the moment before the first backward. Which inputs are kept, and what has been restored?",
        "A restored micro-batch saves `saved` bytes, but its input is among those that are kept already.",
        "always: M·b + (A − b). except_last: the last micro-batch goes back first. It holds A, and the "
        "other M − 1 hold b each.",
    ),
)


# The best k.


def best_every(num_layers, boundary, saved_per_layer, num_microbatches):
    """The k, from 1 to num_layers, at which a stage needs the fewest bytes; of equals the smallest."""
    raise NotImplementedError("count the bytes of one k, then take the best")


def solution(num_layers, boundary, saved_per_layer, num_microbatches):
    def peak(k):
        kept = num_microbatches * -(-num_layers // k) * boundary  # one input for each segment
        restored = k * saved_per_layer  # one segment of one micro-batch
        return kept + restored

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
)

EXERCISES = (KEPT_BYTES, BEST_EVERY)
