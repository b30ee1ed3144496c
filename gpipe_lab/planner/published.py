"""The papers' tables, `data/tables`, and what the planner and the simulator say to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..plan.data import read
from ..plan.memory import peak_in_flight
from ..plan.recompute import with_recompute
from ..plan.schedules import gpipe
from ..plan.simulate import Costs, simulate
from .estimate import Plan, Setting, cut_evenly, plan_of
from .models import Device, Model, Precision
from .propose import layers_of

GIB = 2**30
GOOD = 0.05  # a prediction within so much of what was published needs no reason
ANY_DEVICE = Device(
    name="any", memory_bytes=1, peak_tflops=1, node_gb_s=1, link_gb_s=1, per_node=1
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


def _compare(
    table: str,
    case: str,
    quantity: str,
    unit: str,
    published: float,
    predicted: float,
    above: str,
    below: str,
) -> Comparison:
    """With the reason why the published value lies above or below the prediction, where it is not near."""
    is_near = abs(predicted / published - 1) <= GOOD
    why = "" if is_near else above if published > predicted else below
    return Comparison(table, case, quantity, unit, published, predicted, why)


def _missing(table: str, case: str, quantity: str, unit: str, published: float, missing: str) -> Comparison:
    why = f"cannot be predicted without {missing}"
    return Comparison(table, case, quantity, unit, published, None, why)


def comparisons() -> tuple[Comparison, ...]:
    """Every value that the papers measured or searched for, table by table."""
    return (*zero_bubble(), *gpipe_sizes(), *gpipe_speeds(), *torchgpipe())


def _bytes_of(model: Model, setting: Setting, precision: Precision) -> Plan:
    """The plan of a model for its bytes: cut evenly, attention's scores kept whole."""
    layers = layers_of(
        model,
        ANY_DEVICE,
        microbatch_size=setting.microbatch_size,
        fused_attention=False,
        precision=precision,
    )
    return plan_of(setting, layers, cut=cut_evenly)


# GPipe Table 1, its caption: 12 bytes a parameter, itself and RMSProp's two accumulators, all in fp32.
GPIPE_PRECISION = Precision(parameter_bytes=4, gradient_bytes=0, optimizer_bytes=8, value_bytes=4)
GPIPE_BATCH, GPIPE_MICROBATCHES = 32, 32


def gpipe_transformer(layers: int) -> Model:
    """GPipe's Transformer-L (§3: 2048 wide, 8192 in the feed-forward, 32 heads, 32k words)."""
    return Model(
        name=f"Transformer-{layers}", layers=layers, hidden=2048, heads=32, ffn=8192, vocab=32000,
        sequence=1024, dropout=True,
    )  # fmt: skip


def gpipe_sizes() -> Iterator[Comparison]:
    """GPipe's Table 1: parameters, bytes of the model (12 a parameter), bytes of activations."""
    for row in read("tables/gpipe_table1")[1]:
        is_transformer = row["model"] == "Transformer"
        case = f"{row['model']} {row['setting']}, {row['size']}"
        parameters = float(row["parameters"])
        model_gib, activation_gib = float(row["model_memory_gb"]), float(row["peak_activation_gb"])
        if is_transformer:
            model = gpipe_transformer(int(row["size"].removeprefix("L=")))
            other = "the shape counts other parameters"
            yield _compare("GPipe 1", case, "parameters", "", parameters, model.parameters, other, other)
        held = parameters * GPIPE_PRECISION.held_bytes / GIB
        exchanged = abs(held / activation_gib - 1) < GOOD and abs(held / model_gib - 1) > 0.5
        above = "more than 12 bytes a parameter: a convolutional net's buffers and padded weights"
        if exchanged:
            above = "the prediction is what the row gives for activations: the two columns stand exchanged"
        below = "fewer than 12 bytes a parameter"
        yield _compare("GPipe 1", case, "model memory", "GiB", model_gib, held, above, below)
        if not is_transformer or row["setting"].startswith("Naive"):
            missing = "the batch size of this row" if is_transformer else "the shapes of AmoebaNet's cells"
            yield _missing("GPipe 1", case, "peak activations", "GiB", activation_gib, missing)
            continue
        setting = Setting(
            num_stages=int(row["partitions"]),
            microbatch_size=GPIPE_BATCH // GPIPE_MICROBATCHES,
            num_microbatches=GPIPE_MICROBATCHES,
            schedule="gpipe",
            checkpoint="always",
        )
        plan = _bytes_of(model, setting, GPIPE_PRECISION)
        fullest, _ = plan.fullest
        kept = plan.memory.peak_bytes(fullest, ("boundary", "recomputed"))
        yield _compare(
            "GPipe 1", case, "peak activations", "GiB", activation_gib, setting.num_stages * kept / GIB,
            "more was held than inputs and one recomputed micro-batch: working space is not in the formula",
            "less was held than the formula counts",
        )  # fmt: skip


def gpipe_speeds() -> Iterator[Comparison]:
    """GPipe's Tables 2 and 3: speed against the table's first entry, from simulated equal stages."""
    for row in read("tables/gpipe_table2")[1]:
        m, table = int(row["microbatches"]), row["table"]
        reference = _speed(2, 1) if table == "2" else _speed(2, m)
        for k in (2, 4, 8):
            published = float(row[f"K{k}"])
            of = f"GPipe {table}", f"{row['model']}, K = {k}, M = {m}", "speed-up", "×", published
            if (k, m) == (2, 1) or (table == "3" and k == 2):
                continue  # the entry that the others are counted in
            if row["model"] == "AmoebaNet":
                yield _missing(*of, "the paper's times of its cells, which differ")
                continue
            yield _compare(
                *of, _speed(k, m) / reference,
                "above what equal stages allow at one batch size: the settings differ in more than K and M",
                "below what equal stages and free messages allow: messages, launches, uneven ends",
            )  # fmt: skip


def _speed(k: int, m: int) -> float:
    """Samples a unit of time of GPipe with recompute on k equal stages, at a fixed batch."""
    schedule = with_recompute(gpipe(k, m), "always")
    share = 1 / (k * m)  # of the batch's work, in one operation
    return 1 / simulate(schedule, Costs(forward=share, backward=2 * share)).makespan_ms


# What is run for a schedule of the paper's. ZB-1p and ZB-2p are its search's: of them only what they hold is
# known, the micro-batches of ZB-H1, and one more than those of ZB-H2.
ZERO_BUBBLE = {
    "1F1B": "one_f_one_b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zero_bubble_h1",
    "ZB-H2": "zero_bubble_h2",
    "ZB-1p": "zero_bubble_h1",
    "ZB-2p": "zero_bubble_h2",
}


def zero_bubble() -> Iterator[Comparison]:
    """Bubble rates simulated with the paper's profiled times; bytes from the models' shapes."""
    profiles = {row["model"]: row for row in read("tables/zero_bubble_profile")[1]}
    seen = set()
    for row in read("tables/zero_bubble")[1]:
        profile, name = profiles[row["model"]], row["schedule"]
        p, m = int(row["gpus"]), int(row["microbatches"])
        of = "Zero Bubble", f"{row['model']}, p = {p}, m = {m}, {name}"
        setting = Setting(
            num_stages=p,
            microbatch_size=int(profile["microbatch_size"]),
            num_microbatches=m,
            schedule=ZERO_BUBBLE[name],
            # One block a chunk; the ends hold one block fewer each, beside embedding and head.
            num_chunks=(int(profile["layers"]) + 2) // p,
        )
        if row["bubble_rate"]:
            rate = *of, "bubble rate", "", float(row["bubble_rate"])
            if name in ("ZB-1p", "ZB-2p"):
                yield _missing(*rate, "the schedule itself, which the paper's own search found")
            else:
                yield _compare(
                    *rate, _bubble_rate(setting, profile),
                    "the paper's schedule waits longer than the simulated one",
                    "the paper's schedule waits less than the simulated one: its order of chunks is not "
                    "published",
                )  # fmt: skip
        more = 1 if name == "ZB-2p" else 0  # micro-batches than what is run for it
        if row["memory_gb"] and (row["model"], name) not in seen:  # the same for every m
            seen.add((row["model"], name))
            yield _compare(
                *of, "peak memory", "GiB", float(row["memory_gb"]), _peak(setting, profile, more) / GIB,
                "more was held than weights and activations in flight: buffers and reserves are not in the "
                "formula",
                "less is kept than the formula counts, which has attention's scores whole",
            )  # fmt: skip
        if row["samples_per_gpu_s"]:
            missing = "the times of optimizer step and input, which are not published"
            yield _missing(*of, "throughput", "samples/s", float(row["samples_per_gpu_s"]), missing)


def _bubble_rate(setting: Setting, profile: dict[str, str]) -> float:
    """Idle share of the longest stage's time, from its first operation to its last: the paper's measure."""
    forward, inputs, weights = (
        float(profile[f"{kind}_ms"]) for kind in ("forward", "backward_input", "backward_weight")
    )
    schedule = setting.build()
    v = schedule.num_stages // schedule.num_ranks
    costs = Costs(
        forward=forward / v,
        backward=(inputs + weights) / v,
        backward_input=inputs / v,
        backward_weight=weights / v,
        send=float(profile["send_ms"]),
    )
    longest = max(row.ends[-1] - row.starts[0] for row in simulate(schedule, costs).rows)
    return 1 - setting.num_microbatches * (forward + inputs + weights) / longest


def _peak(setting: Setting, profile: dict[str, str], more: int) -> float:
    """Bytes of the fullest rank, messages apart, if every rank held so many micro-batches more."""
    hidden = int(profile["hidden"])
    model = Model(
        name=profile["model"], layers=int(profile["layers"]), hidden=hidden, heads=int(profile["heads"]),
        ffn=4 * hidden, vocab=int(profile["vocab"]), sequence=int(profile["sequence"]),
        dropout=True, biases=True, positions=int(profile["sequence"]),
    )  # fmt: skip
    memory = _bytes_of(model, setting, Precision()).memory
    kept = ("parameters", "gradients", "optimizer", "saved")
    in_flight = peak_in_flight(setting.build())
    return max(
        memory.peak_bytes(rank, kept) + more * memory.peak_bytes(rank, "saved") / in_flight[rank]
        for rank in memory.ranks
    )


def torchgpipe() -> Iterator[Comparison]:
    for row in read("tables/torchgpipe")[1]:
        if row["partitions"] == "baseline":
            continue
        micro = f", m = {row['microbatches']}" if row["microbatches"] else ""
        yield _missing(
            "torchgpipe", f"{row['model']}, n = {row['partitions']}{micro}", "throughput", "samples/s",
            float(row["samples_per_s"]), "the times of a convolutional net's layers on a P40",
        )  # fmt: skip
