"""The Zero Bubble paper's measured rates, bytes and speeds, beside what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

from . import formulas
from .catalogue import read
from .comparison import ANY_DEVICE, GIB, Comparison, reason
from .interleaved import interleaved
from .layer_costs import Stages, layers_of
from .models import Model, Precision
from .partition import uniform
from .schedule import Schedule
from .schedules import SCHEDULES
from .simulate import Costs, simulate


def zero_bubble() -> Iterator[Comparison]:
    """Bubble rates simulated with the paper's profiled times; bytes from the models' shapes."""
    profiles = {row["model"]: row for row in read("tables/zero_bubble_profile")[1]}
    seen = set()
    for row in read("tables/zero_bubble")[1]:
        profile = profiles[row["model"]]
        p, m, name = int(row["gpus"]), int(row["microbatches"]), row["schedule"]
        case = f"{row['model']}, p = {p}, m = {m}, {name}"
        if row["bubble_rate"]:
            yield _bubble_rate(case, name, p, m, float(row["bubble_rate"]), profile)
        if row["memory_gb"] and (row["model"], name) not in seen:  # the same for every m
            seen.add((row["model"], name))
            yield _zero_bubble_memory(case, name, p, m, float(row["memory_gb"]), profile)
        if row["samples_per_gpu_s"]:
            yield Comparison(
                "Zero Bubble", case, "throughput", "samples/s", float(row["samples_per_gpu_s"]), None,
                "cannot be predicted without the times of optimizer step and input, which are not published",
            )  # fmt: skip


def _bubble_rate(
    case: str, name: str, p: int, m: int, published: float, profile: dict[str, str]
) -> Comparison:
    times = [float(profile[f"{kind}_ms"]) for kind in ("forward", "backward_input", "backward_weight")]
    forward, inputs, weights = times
    chunks = _chunks(profile, p)
    built: dict[str, tuple[Schedule, int]] = {}
    if name == "1F1B-I":
        built[name] = (interleaved(p, m, num_chunks=chunks), chunks)
    known = {"1F1B": "one_f_one_b", "ZB-H1": "zero_bubble_h1", "ZB-H2": "zero_bubble_h2"}
    if name in known:
        built[name] = (SCHEDULES[known[name]](p, m), 1)
    if name not in built:
        return Comparison(
            "Zero Bubble", case, "bubble rate", "", published, None,
            "cannot be predicted without the schedule itself, which the paper's own search found",
        )  # fmt: skip
    schedule, v = built[name]
    costs = Costs(
        forward=forward / v,
        backward=(inputs + weights) / v,
        backward_input=inputs / v,
        backward_weight=weights / v,
        send=float(profile["send_ms"]),
    )
    trace = simulate(schedule, costs)
    spans: dict[int, tuple[float, float]] = {}
    for e in trace.computations:
        first, last = spans.get(e.rank, (e.start_ms, e.end_ms))
        spans[e.rank] = (min(first, e.start_ms), max(last, e.end_ms))
    longest = max(last - first for first, last in spans.values())  # the paper's measure: the longest stage
    predicted = 1 - m * sum(times) / longest
    why = reason(
        published, predicted,
        "the paper's schedule waits longer than the simulated one",
        "the paper's schedule waits less than the simulated one: its order of chunks is not published",
    )  # fmt: skip
    return Comparison("Zero Bubble", case, "bubble rate", "", published, predicted, why)


def _chunks(profile: dict[str, str], p: int) -> int:
    """One block a chunk; the ends hold one block fewer each, beside embedding and head."""
    return (int(profile["layers"]) + 2) // p


def _zero_bubble_memory(
    case: str, name: str, p: int, m: int, published: float, profile: dict[str, str]
) -> Comparison:
    hidden = int(profile["hidden"])
    model = Model(
        name=profile["model"], layers=int(profile["layers"]), hidden=hidden, heads=int(profile["heads"]),
        ffn=4 * hidden, vocab=int(profile["vocab"]), sequence=int(profile["sequence"]),
        dropout=True, biases=True, positions=int(profile["sequence"]),
    )  # fmt: skip
    layers = layers_of(
        model, ANY_DEVICE, microbatch_size=int(profile["microbatch_size"]), fused_attention=False
    )
    v = _chunks(profile, p) if name == "1F1B-I" else 1
    spans = uniform(len(layers), p * v)
    stages = Stages(tuple(tuple(layers[s.start : s.stop]) for s in spans), "never")
    held = {
        "1F1B": lambda rank: min(p - rank, m),
        "1F1B-I": lambda rank: formulas.interleaved_peak(p, m, v, rank),
        "ZB-1p": lambda rank: p,
        "ZB-2p": lambda rank: 2 * p,
    }[name]
    peak = max(
        sum(
            Precision().held_bytes * sum(layer.parameters for layer in stages.layers[stage])
            for stage in range(rank, p * v, p)
        )
        + held(rank) * sum(stages.saved[stage] for stage in range(rank, p * v, p)) / v
        for rank in range(p)
    )
    why = reason(
        published, peak / GIB,
        "more was held than weights and activations in flight: buffers and reserves are not in the formula",
        "less is kept than the formula counts, which has attention's scores whole",
    )  # fmt: skip
    return Comparison("Zero Bubble", case, "peak memory", "GiB", published, peak / GIB, why)
