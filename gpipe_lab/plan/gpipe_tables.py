"""The GPipe paper's Tables 1 to 3, beside what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

from .catalogue import read
from .choosing import fullest_rank
from .comparison import ANY_DEVICE, GIB, GOOD, Comparison, reason
from .costing import Setting
from .layer_costs import Stages, layers_of
from .models import Model, Precision
from .partition import uniform
from .recompute import with_recompute
from .schedules import gpipe
from .simulate import Costs, simulate

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
