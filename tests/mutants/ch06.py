"""Wrong answers to the exercises of chapter 06, which each of them must refuse."""

from __future__ import annotations

import math

from gpipe_lab.course.exercises.card_runs import Setting, Task
from gpipe_lab.course.exercises.ch06 import settings_of, smallest_m_solution


def forgets_the_share_left(launch_ms: float, sample_ms: float, share: float) -> int:
    return max(1, math.ceil(share * launch_ms / sample_ms))


def rounds_down(launch_ms: float, sample_ms: float, share: float) -> int:
    return max(1, math.floor(share / (1 - share) * launch_ms / sample_ms))


def one_too_many(launch_ms: float, sample_ms: float, share: float) -> int:
    return smallest_m_solution(launch_ms, sample_ms, share) + 1


def not_below_one(launch_ms: float, sample_ms: float, share: float) -> int:
    return math.ceil(share / (1 - share) * launch_ms / sample_ms - 1e-9)


def most_microbatches(task: Task) -> Setting:
    return max(settings_of(task), key=lambda s: (s[2], task.speed(*s)))


def smallest_bubble(task: Task) -> Setting:
    return min(settings_of(task), key=lambda s: ((s[0] - 1) / (s[2] + s[0] - 1), -s[2]))


def largest_microbatch(task: Task) -> Setting:
    return max(settings_of(task), key=lambda s: (s[1], task.speed(*s)))


def most_stages(task: Task) -> Setting:
    P = max(s[0] for s in settings_of(task))
    return max((s for s in settings_of(task) if s[0] == P), key=lambda s: task.speed(*s))


def forgets_the_limit(task: Task) -> Setting:
    """One card has no bubble; whether the model is on it is another question."""
    return 1, task.max_batch, 1


def forgets_the_weights(task: Task) -> Setting:
    """Fills the card with activations alone."""
    return max(
        (
            (P, m, M)
            for P in range(1, task.max_stages + 1)
            for m in range(1, task.max_batch + 1)
            for M in range(1, task.max_batch // m + 1)
            if -(-task.num_layers // P) * M * m * task.saved_bytes <= task.limit_bytes
        ),
        key=lambda s: task.speed(*s),
    )


MUTANTS = {
    "06-smallest-m": {
        "u in place of u/(1 − u)": forgets_the_share_left,
        "rounded down": rounds_down,
        "one too many": one_too_many,
        "no sample at all where nothing is launched": not_below_one,
    },
    "06-beat-the-tuner": {
        "max M: as many micro-batches as fit": most_microbatches,
        "min bubble": smallest_bubble,
        "as large micro-batches as fit": largest_microbatch,
        "all the cards there are": most_stages,
        "one card, whatever fits": forgets_the_limit,
        "activations alone, weights forgotten": forgets_the_weights,
    },
}
