"""The papers' tables, and what the planner and the simulator say to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ..plan import formulas
from ..plan.memory import peak_in_flight
from ..plan.partition import uniform
from ..plan.recompute import with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES, gpipe, interleaved
from ..plan.simulate import Costs, simulate
from .choose import fullest_rank
from .costs import Setting, Stages, layers_of
from .models import Device, Model, Precision, read

GIB = 2**30
GOOD = 0.05  # a prediction within so much of what was published needs no reason
ANY_DEVICE = Device(
    name="any", title="any", memory_bytes=1, peak_tflops=1, node_gb_s=1, link_gb_s=1, per_node=1
)  # for bytes alone


class Comparison(NamedTuple):
    """One published value, its prediction (None: cannot be predicted), and why they differ."""

    table: str
    case: str
    quantity: str
    unit: str
    published: float
    predicted: float | None
    why: str

    @property
    def error(self) -> float | None:
        """predicted / published - 1."""
        return None if self.predicted is None else self.predicted / self.published - 1


def reason(published: float, predicted: float, above: str, below: str) -> str:
    """Why the published value lies above or below the prediction; nothing where it is near."""
    if abs(predicted / published - 1) <= GOOD:
        return ""
    return above if published > predicted else below


# GPipe Table 1, its caption: 12 bytes a parameter, itself and RMSProp's two accumulators, all in fp32.
GPIPE_PRECISION = Precision(parameter_bytes=4, gradient_bytes=0, optimizer_bytes=8, value_bytes=4)
GPIPE_BATCH, GPIPE_MICROBATCHES = 32, 32


def gpipe_sizes() -> Iterator[Comparison]:
    """GPipe's Table 1: parameters, bytes of the model (12 a parameter), bytes of activations."""
    for row in read("tables/gpipe_table1")[1]:
        is_transformer = row["model"] == "Transformer"
        case = f"{row['model']} {row['setting']}, {row['size']}"
        parameters = float(row["parameters"])
        model_gb, activation_gb = float(row["model_memory_gb"]), float(row["peak_activation_gb"])
        if is_transformer:
            model = gpipe_transformer(int(row["size"].removeprefix("L=")))
            yield Comparison(
                "GPipe 1", case, "parameters", "", parameters, float(model.parameters),
                reason(parameters, model.parameters, *["the shape counts other parameters"] * 2),
            )  # fmt: skip
        held = parameters * GPIPE_PRECISION.held_bytes / GIB
        exchanged = abs(held / activation_gb - 1) < GOOD and abs(held / model_gb - 1) > 0.5
        why = (
            "the prediction is what the row gives for activations: the two columns stand exchanged"
            if exchanged
            else reason(
                model_gb, held,
                "more than 12 bytes a parameter: a convolutional net's buffers and padded weights",
                "fewer than 12 bytes a parameter",
            )
        )  # fmt: skip
        yield Comparison("GPipe 1", case, "model memory", "GiB", model_gb, held, why)
        k = int(row["partitions"])
        if not is_transformer or row["setting"].startswith("Naive"):
            missing = "the batch size of this row" if is_transformer else "the shapes of AmoebaNet's cells"
            yield Comparison(
                "GPipe 1", case, "peak activations", "GiB", activation_gb, None,
                f"cannot be predicted without {missing}",
            )  # fmt: skip
            continue
        predicted = k * _gpipe_activations(model, k) / GIB
        why = reason(
            activation_gb, predicted,
            "more was held than inputs and one recomputed micro-batch: working space is not in the formula",
            "less was held than the formula counts",
        )  # fmt: skip
        yield Comparison("GPipe 1", case, "peak activations", "GiB", activation_gb, predicted, why)


def gpipe_transformer(layers: int) -> Model:
    """GPipe's Transformer-L (§3: 2048 wide, 8192 in the feed-forward, 32 heads, 32k words)."""
    return Model(
        name=f"Transformer-{layers}", layers=layers, hidden=2048, heads=32, ffn=8192, vocab=32000,
        sequence=1024, dropout=True,
    )  # fmt: skip


def _gpipe_activations(model: Model, k: int) -> float:
    """Of one of k accelerators: inputs of all micro-batches, and one micro-batch of its layers recomputed."""
    m = GPIPE_BATCH // GPIPE_MICROBATCHES
    layers = layers_of(model, ANY_DEVICE, microbatch_size=m, fused_attention=False, precision=GPIPE_PRECISION)
    spans = uniform(len(layers), k)
    stages = Stages(tuple(tuple(layers[s.start : s.stop]) for s in spans), "always")
    setting = Setting(
        num_stages=k, microbatch_size=m, num_microbatches=GPIPE_MICROBATCHES, schedule="gpipe",
        checkpoint="always",
    )  # fmt: skip
    _, parts = fullest_rank(stages, setting, GPIPE_PRECISION)
    return parts["boundary"] + parts["recomputed"]


def gpipe_speeds() -> Iterator[Comparison]:
    """GPipe's Tables 2 and 3: speed against the table's first entry, from simulated equal stages."""
    for row in read("tables/gpipe_table2")[1]:
        m, table = int(row["microbatches"]), row["table"]
        reference = _speed(2, 1) if table == "2" else _speed(2, m)
        for k in (2, 4, 8):
            published = float(row[f"K{k}"])
            case = f"{row['model']}, K = {k}, M = {m}"
            if (k, m) == (2, 1) or (table == "3" and k == 2):
                continue  # the entry that the others are counted in
            if row["model"] == "AmoebaNet":
                yield Comparison(
                    f"GPipe {table}", case, "speed-up", "×", published, None,
                    "cannot be predicted without the paper's times of its cells, which differ",
                )  # fmt: skip
                continue
            predicted = _speed(k, m) / reference
            why = reason(
                published, predicted,
                "above what equal stages allow at one batch size: the settings differ in more than K and M",
                "below what equal stages and free messages allow: messages, launches, uneven ends",
            )  # fmt: skip
            yield Comparison(f"GPipe {table}", case, "speed-up", "×", published, predicted, why)


def _speed(k: int, m: int) -> float:
    """Samples a unit of time of GPipe with recompute on k equal stages, at a fixed batch."""
    schedule = with_recompute(gpipe(k, m), "always")
    share = 1 / (k * m)  # of the batch's work, in one operation
    return 1 / simulate(schedule, Costs(forward=share, backward=2 * share)).makespan_ms


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


def comparisons() -> tuple[Comparison, ...]:
    """Every published value of `data/tables`, table by table."""
    return (*zero_bubble(), *gpipe_sizes(), *gpipe_speeds(), *torchgpipe(), *schedule_formulas())


def torchgpipe() -> Iterator[Comparison]:
    for row in read("tables/torchgpipe")[1]:
        if row["partitions"] == "baseline":
            continue
        micro = f", m = {row['microbatches']}" if row["microbatches"] else ""
        yield Comparison(
            "torchgpipe", f"{row['model']}, n = {row['partitions']}{micro}", "throughput", "samples/s",
            float(row["samples_per_s"]), None,
            "cannot be predicted without the times of a convolutional net's layers on a P40",
        )  # fmt: skip


def schedule_formulas(p: int = 4, m: int = 12) -> Iterator[Comparison]:
    """The published closed forms at one P and M, beside the simulated bubble time and the counted peak."""
    forward, inputs, weights, v = 3.0, 3.0, 2.0, 2
    names = {
        "GPipe": "gpipe",
        "1F1B": "one_f_one_b",
        "Interleaved (v chunks)": "interleaved",
        "ZB-H1": "zero_bubble_h1",
        "ZB-H2": "zero_bubble_h2",
    }
    letters = {"p": p, "m": m, "F": forward, "B": inputs, "W": weights, "v": v, "M": 1}
    for row in read("tables/schedule_formulas")[1]:
        name = row["schedule"]
        case = f"{name}, p = {p}, m = {m}"
        if name not in names:
            missing = "the time of a forward and a backward that overlap (F&B), and of whole pairs of them"
            yield Comparison(
                f"formulas ({row['source']})", case, "peak activations", "",
                evaluate(row["peak_activation"], letters), None, f"cannot be predicted without {missing}",
            )  # fmt: skip
            continue
        chunks = v if name.startswith("Interleaved") else 1
        schedule = SCHEDULES[names[name]](p, m)
        trace = simulate(
            schedule,
            Costs(
                forward=forward / chunks,
                backward=(inputs + weights) / chunks,
                backward_input=inputs,
                backward_weight=weights,
            ),
        )
        rows = [[e for e in trace.computations if e.rank == rank] for rank in range(p)]
        longest = max(row[-1].end_ms - row[0].start_ms for row in rows)
        bubble = longest - m * (forward + inputs + weights)
        held = max(peak_in_flight(schedule)) / chunks
        for quantity, text, predicted in (
            ("bubble time", row["bubble_time"], bubble),
            ("peak activations", row["peak_activation"], held),
        ):
            published = evaluate(text, letters)
            differs = "the simulated schedule is not the published one"
            why = reason(published, predicted, differs, differs)
            yield Comparison(f"formulas ({row['source']})", case, quantity, "", published, predicted, why)


def evaluate(formula: str, letters: dict[str, float]) -> float:
    """The value of a formula as papers write it: "(p-1)(F+B-2W)", with a number for each letter."""
    spelled = re.sub(r"(?<=[\d)])(?=[A-Za-z(])", "*", formula)
    assert re.fullmatch(r"[\d\s.()+*/A-Za-z-]+", spelled) is not None, formula
    return float(eval(spelled, {"__builtins__": {}}, dict(letters)))
