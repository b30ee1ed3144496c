"""Chapter 12, the capstone: clipping by the norm of all stages, and a layout for thousands of cards."""

from __future__ import annotations

import math
import random
from itertools import product

from ...plan.formulas import bubble_fraction
from ..exercise import Answer, Case, Exercise, Mismatch, over_cases

# a) Clipping.


def clip_factor(stage_norms, max_norm):
    """The factor for every gradient of every stage, so that the norm of them all is at most max_norm."""
    raise NotImplementedError("one line, from the norms of the stages")


def solution_clip(stage_norms, max_norm):
    total = math.sqrt(sum(norm**2 for norm in stage_norms))
    return min(1.0, max_norm / total) if total > 0 else 1.0


def gradients(seed: int, num_stages: int) -> list[list[float]]:
    """The gradients of each stage, as lists of numbers."""
    draw = random.Random(seed)
    return [[draw.uniform(-2, 2) for _ in range(draw.randint(1, 5))] for _ in range(num_stages)]


def _norm(numbers: list[float]) -> float:
    return math.sqrt(sum(x * x for x in numbers))


def _clip_cases() -> list[Case]:
    return [
        {"seed": seed, "num_stages": stages, "max_norm": limit}
        for seed in range(6)
        for stages in (1, 2, 4)
        for limit in (0.5, 1.0, 100.0)
    ]


@over_cases(*_clip_cases())
def as_one_process(answer: Answer, seed: int, num_stages: int, max_norm: float) -> Mismatch | None:
    """the clipped gradients are those of one process that clips them all together"""
    parts = gradients(seed, num_stages)
    whole = [x for part in parts for x in part]
    expected = min(1.0, max_norm / _norm(whole))
    got = answer([_norm(part) for part in parts], max_norm)
    if math.isclose(got, expected, rel_tol=1e-9):
        return None
    norms = ", ".join(f"{_norm(part):.3f}" for part in parts)
    detail = f"norms of the stages: {norms}; of all: {_norm(whole):.3f}"
    return Mismatch(f"{expected:.6f}", f"{got:.6f}", detail)


@over_cases({"num_stages": 1}, {"num_stages": 3})
def nothing_to_clip(answer: Answer, num_stages: int) -> Mismatch | None:
    """gradients that are all zero stay as they are"""
    got = answer([0.0] * num_stages, 1.0)
    return None if got == 1.0 else Mismatch(1.0, got)


CLIP = Exercise(
    name="12-clip",
    statement=(
        "Every stage knows the norm of its own gradients. Give the one factor by which all stages multiply "
        "theirs, so that the norm over all of them is at most max_norm."
    ),
    starter=clip_factor,
    solution=solution_clip,
    properties=(as_one_process, nothing_to_clip),
    hints=(
        "A norm is the root of a sum of squares. What does the sum over all stages look like?",
        "Square the stages' norms, add, take the root: that is the norm of all gradients together.",
        "min(1, max_norm / total), since clipping never makes a gradient larger; and mind a total of 0.",
    ),
    imports="import math",
)


# b) A layout.

BYTES_PER_PARAMETER = 16  # weight and gradient in 16 bits, Adam's two averages and a master copy in 32


def layout(num_devices, batch_size, num_layers, parameters, sample_bytes, card_bytes, per_node):
    """(T, P, D): tensor parallel, pipeline stages, replicas; T·P·D = num_devices.

    A card holds 16 bytes for each of its parameters/(T·P) parameters, and 1F1B's activations on stage 0:
    min(P, M) micro-batches of one sample, sample_bytes/(T·P) each. M = batch_size/D.
    """
    raise NotImplementedError("try every split of the devices, keep those that fit, take the smallest bubble")


def solution_layout(num_devices, batch_size, num_layers, parameters, sample_bytes, card_bytes, per_node):
    fitting = []
    for T in (t for t in range(1, per_node + 1) if num_devices % t == 0):
        for P in (p for p in range(1, num_layers + 1) if num_devices % (T * p) == 0 and num_layers % p == 0):
            D = num_devices // (T * P)
            if batch_size % D:
                continue
            M = batch_size // D
            held = (16 * parameters + min(P, M) * sample_bytes) / (T * P)
            if held <= card_bytes:
                fitting.append(((P - 1) / (M + P - 1), T, P, D))
    _, T, P, D = min(fitting)
    return T, P, D


TOKENS = 4096
SHAPES = {  # layers, width, parameters
    "7B": (32, 4096, 7_000_000_000),
    "70B": (80, 8192, 70_000_000_000),
    "405B": (126, 16384, 405_000_000_000),
}


def _layout_cases() -> list[Case]:
    sizes = (
        ("7B", 8, 64, 80),
        ("7B", 64, 256, 40),
        ("7B", 16, 64, 40),
        ("70B", 64, 256, 80),
        ("70B", 64, 512, 40),
        ("70B", 512, 1024, 80),
        ("405B", 1008, 2016, 80),
        ("405B", 16128, 2016, 80),
    )
    return [
        {
            "num_devices": devices,
            "batch_size": batch,
            "num_layers": num_layers,
            "parameters": parameters,
            "sample_bytes": 34 * TOKENS * width * num_layers,  # Korthikanti et al. 2022, fused attention
            "card_bytes": card * 10**9,
            "per_node": 8,
        }
        for name, devices, batch, card in sizes
        for num_layers, width, parameters in [SHAPES[name]]
    ]


def held_bytes(case: Case, T: int, P: int, M: int) -> float:
    """Bytes on a card of stage 0."""
    return (BYTES_PER_PARAMETER * case["parameters"] + min(P, M) * case["sample_bytes"]) / (T * P)


def allowed(case: Case) -> list[tuple[int, int, int]]:
    """Every layout that is whole and fits."""
    found = []
    for T, P in product(range(1, case["per_node"] + 1), range(1, case["num_layers"] + 1)):
        if case["num_devices"] % (T * P) == 0 and case["num_layers"] % P == 0:
            D = case["num_devices"] // (T * P)
            whole = case["batch_size"] % D == 0
            if whole and held_bytes(case, T, P, case["batch_size"] // D) <= case["card_bytes"]:
                found.append((T, P, D))
    return found


@over_cases(*_layout_cases())
def is_whole(answer: Answer, **case: int) -> Mismatch | None:
    """T·P·D is the number of devices, T stays within a node, P divides the layers and D the batch"""
    T, P, D = answer(**case)
    whole = (
        case["num_devices"] == T * P * D
        and 1 <= T <= case["per_node"]
        and case["num_layers"] % P == 0
        and case["batch_size"] % D == 0
    )
    return None if whole else Mismatch("a layout that is whole", f"T = {T}, P = {P}, D = {D}")


@over_cases(*_layout_cases())
def it_fits(answer: Answer, **case: int) -> Mismatch | None:
    """a card of stage 0 holds its weights and its micro-batches in flight"""
    T, P, D = answer(**case)
    held = held_bytes(case, T, P, case["batch_size"] // D)
    if held <= case["card_bytes"]:
        return None
    return Mismatch(
        f"at most {case['card_bytes'] / 1e9:.0f} GB", f"{held / 1e9:.1f} GB at T = {T}, P = {P}, D = {D}"
    )


@over_cases(*_layout_cases())
def smallest_bubble(answer: Answer, **case: int) -> Mismatch | None:
    """no other layout that fits has a smaller bubble"""
    T, P, D = answer(**case)
    got = bubble_fraction(P, case["batch_size"] // D)
    best = min(allowed(case), key=lambda entry: bubble_fraction(entry[1], case["batch_size"] // entry[2]))
    least = bubble_fraction(best[1], case["batch_size"] // best[2])
    if got <= least + 1e-12:
        return None
    return Mismatch(f"{least:.2%}, as T, P, D = {best} has", f"{got:.2%} at T, P, D = {(T, P, D)}")


LAYOUT = Exercise(
    name="12-layout",
    statement=(
        "Lay a model out on many cards: T tensor parallel within a node, P stages of 1F1B, D replicas, "
        "micro-batches of one sample. Of all layouts that are whole and fit, give one with the least bubble."
    ),
    starter=layout,
    solution=solution_layout,
    properties=(is_whole, it_fits, smallest_bubble),
    hints=(
        "There are few layouts: every T up to per_node, every P that divides the layers; D follows.",
        "M = batch_size/D. Stage 0 of 1F1B holds min(P, M) micro-batches, each sample_bytes/(T·P) on a card.",
        "Keep (bubble, T, P, D) of those that fit, and take the minimum.",
    ),
)

EXERCISES = (CLIP, LAYOUT)
