"""Chapter 06, three knobs: the smallest micro-batch that pays, and the best setting of P, m and M."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..exercise import Answer, Exercise, Mismatch, over, over_cases
from .card_runs import TASKS, Setting, Task, does_not_fit

# The smallest micro-batch at which kernels are used well enough.


def smallest_m(launch_ms, sample_ms, share):
    """The least m at which the samples' own work is at least `share` of a micro-batch's time.

    A micro-batch of m samples takes launch_ms + m · sample_ms.
    """
    return 1  # change this line


def smallest_m_solution(launch_ms, sample_ms, share):
    return max(1, math.ceil(share / (1 - share) * launch_ms / sample_ms - 1e-9))


@over(launch_ms=(4.0, 0.0, 1.0, 2.5), sample_ms=(1.0, 0.3, 2.0), share=(0.5, 0.7, 0.8))
def reaches_the_share_first(
    answer: Answer, launch_ms: float, sample_ms: float, share: float
) -> Mismatch | None:
    """m samples use at least that share of the time, and m − 1 samples would not"""

    def used(m: int) -> float:
        return m * sample_ms / (launch_ms + m * sample_ms) if m else 0.0

    got = answer(launch_ms, sample_ms, share)
    right = next(m for m in range(1, 10_000) if used(m) >= share - 1e-9)
    if got == right:
        return None
    return Mismatch(f"m = {right}, which uses {used(right):.0%}", f"m = {got!r}")


SMALLEST_M = Exercise(
    name="06-smallest-m",
    statement=(
        "Change one line: the least m, at least 1, at which a micro-batch's own work m · sample_ms is at "
        "least `share` of its time launch_ms + m · sample_ms."
    ),
    starter=smallest_m,
    solution=smallest_m_solution,
    properties=(reaches_the_share_first,),
    hints=(
        "Write down m·s / (c + m·s) ≥ u and solve for m.",
        "m ≥ u/(1 − u) · c/s: the same shape as chapter 03's M ≥ (P − 1)·u/(1 − u).",
        "A micro-batch is a whole number of samples, at least one: math.ceil and max. "
        "Subtract 1e-9 before rounding up, or a division that should be exact gives one too many.",
    ),
    imports="import math",
)


# The best setting.


def choose(task):
    """(P, m, M) for a card: it fits, and a card trains as many samples a second as it can.

    task.num_layers      equal layers, cut as evenly as can be: the largest stage has ⌈layers / P⌉
    task.max_stages      the most cards there are
    task.max_batch       the largest M · m that training allows
    task.launch_ms       of one layer and micro-batch forward, whatever its size
    task.sample_ms       of one layer forward, more for each sample; a backward takes twice a forward
    task.weight_bytes    of one layer: its weights and their gradients
    task.saved_bytes     of one layer and sample, from forward until backward
    task.message_bytes   of one sample between two stages; a card may hold M + 2 micro-batches of messages,
                         those it sent and nobody took yet and two that it expects
    task.limit_bytes     of a card
    """
    raise NotImplementedError("choose P, m and M")


def solution(task):
    def samples_per_second_and_card(P, m, M):
        largest = -(-task.num_layers // P)
        slot_ms = 3 * largest * (task.launch_ms + m * task.sample_ms)
        return 1000 * M * m / ((M + P - 1) * slot_ms * P)

    def fits(P, m, M):
        largest = -(-task.num_layers // P)
        held = largest * (task.weight_bytes + M * m * task.saved_bytes)
        messages = (M + 2) * m * task.message_bytes if P > 1 else 0
        return held + messages <= task.limit_bytes

    settings = [
        (P, m, M)
        for P in range(1, min(task.max_stages, task.num_layers) + 1)
        for m in range(1, task.max_batch + 1)
        for M in range(1, task.max_batch // m + 1)
        if fits(P, m, M)
    ]
    return max(settings, key=lambda setting: samples_per_second_and_card(*setting))


def settings_of(task: Task) -> Iterator[Setting]:
    for P in range(1, min(task.max_stages, task.num_layers) + 1):
        for m in range(1, task.max_batch + 1):
            for M in range(1, task.max_batch // m + 1):
                if task.peak_bytes(P, m, M) <= task.limit_bytes:
                    yield P, m, M


@over_cases(*({"task": task} for task in TASKS))
def is_a_setting(answer: Answer, task: Task) -> Mismatch | None:
    """three whole numbers: P at most max_stages and the layers, M · m at most max_batch"""
    got = answer(task)
    if (
        isinstance(got, tuple | list)
        and len(got) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in got)
        and got[0] <= min(task.max_stages, task.num_layers)
        and got[1] * got[2] <= task.max_batch
    ):
        return None
    return Mismatch("(P, m, M) within the task's bounds", got)


@over_cases(*({"task": task} for task in TASKS))
def fits_when_run(answer: Answer, task: Task) -> Mismatch | None:
    """it fits: P worker processes run one step of such a model, and the ledger enforces the limit"""
    failure = does_not_fit(task, *answer(task))
    return Mismatch("a step that fits", f"P, m, M = {answer(task)}", failure) if failure else None


@over_cases(*({"task": task} for task in TASKS))
def close_to_the_best(answer: Answer, task: Task) -> Mismatch | None:
    """at least 95 % of the samples a second and card that the best setting reaches"""
    best = max(settings_of(task), key=lambda s: task.speed(*s))
    got = tuple(answer(task))
    share = task.speed(*got) / task.speed(*best)
    if share >= 0.95:
        return None
    return Mismatch(f"95 % of what P, m, M = {best} reaches", f"{share:.0%}, with {got}", task.account(*got))


BEST_SETTING = Exercise(
    name="06-beat-the-tuner",
    statement=(
        "Write choose(task): (P, m, M) such that a step fits on every card and each card trains as many "
        "samples a second as it can. It is graded on models you have not seen: the setting is run on real "
        "workers under the limit, and its speed must be at least 95 % of the best."
    ),
    starter=choose,
    solution=solution,
    properties=(is_a_setting, fits_when_run, close_to_the_best),
    hints=(
        "Write two functions first: the bytes of the fullest card, and the samples a second and card. "
        "Both follow from the fields of the task and from chapters 03 and 04.",
        "Speed: M·m samples in (M + P − 1) slots, and P cards are busy with it. A slot is three times "
        "⌈layers / P⌉·(launch + m·sample). Bytes: ⌈layers / P⌉·(weights + M·m·saved), (M + 2)·m messages.",
        "There are few settings: try them all and take the best of those that fit.",
    ),
    on_ranks=True,
)

EXERCISES = (SMALLEST_M, BEST_SETTING)
