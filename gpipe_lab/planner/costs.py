"""What a plan costs: time, memory and bytes of one training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..plan.errors import require
from ..plan.memory import MemoryReport, StageBytes, simulate_memory
from ..plan.partition import balanced
from ..plan.recompute import with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES, chunks_of
from ..plan.simulate import Costs, simulate
from ..plan.trace import Trace
from ..plan.units import format_bytes
from .models import Device, Model, Precision

if TYPE_CHECKING:
    import pandas


MESSAGES_HELD = 3  # two receives posted ahead and one send under way


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer on one micro-batch on one device. weight_ms is the part of the backward nobody waits for."""

    name: str
    parameters: float
    forward_ms: float
    backward_ms: float
    weight_ms: float
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    exchanged_bytes: int = 0  # sent by one of the devices that share the layer, forward and backward


def layers_of(
    model: Model,
    device: Device,
    *,
    microbatch_size: int = 1,
    tensor_parallel: int = 1,
    fused_attention: bool = True,
    efficiency: float = 0.5,
    precision: Precision | None = None,
) -> tuple[Layer, ...]:
    """Embedding, blocks and head of a model as one of `tensor_parallel` devices has them.

    efficiency: the share of a device's peak that its matrix products reach. Tensor parallelism with sequence
    parallelism divides weights, work and activations, and adds four exchanges of s·b·h values a layer, two
    each way (Korthikanti et al. 2022, §4.2.2), on the links of a node.
    """
    value = (precision or Precision()).value_bytes
    b, t = microbatch_size, tensor_parallel
    boundary = model.boundary_bytes(b, value_bytes=value)
    exchange_ms = 2 * device.travel_ms(2 * (t - 1) / t * boundary, t) if t > 1 else 0.0

    def layer(
        name: str, parameters: int, flops: float, scores: float, saved: int, given: int, made: int
    ) -> Layer:
        forward = device.compute_ms(flops / t, efficiency)
        exchanges = exchange_ms if name.startswith("block") else 0.0
        return Layer(
            name=name,
            parameters=parameters / t,
            forward_ms=forward + exchanges,
            backward_ms=2 * forward + exchanges,
            weight_ms=device.compute_ms((flops - scores) / t, efficiency),
            saved_bytes=saved // t,
            input_bytes=given // t,
            output_bytes=made // t,
            exchanged_bytes=8 * (t - 1) * boundary // t if name.startswith("block") else 0,
        )

    tokens = model.embedding_saved_bytes(b)
    saved = model.layer_saved_bytes(b, fused_attention=fused_attention, value_bytes=value)
    head_saved = model.head_saved_bytes(b, value_bytes=value)
    head_parameters = model.head_parameters + (model.vocab * model.hidden if model.tied else 0)  # a copy
    blocks = [
        layer(
            f"block {i}",
            model.layer_parameters,
            model.layer_flops(b),
            model.score_flops(b),
            saved,
            boundary,
            boundary,
        )
        for i in range(model.layers)
    ]
    return (
        layer("embedding", model.embedding_parameters, 0.0, 0.0, tokens, tokens, boundary),
        *blocks,
        layer("head", head_parameters, model.head_flops(b), 0.0, head_saved, boundary, 0),
    )


@dataclass(frozen=True)
class Stages:
    """The stages of a cut, each the sum of its layers; times in ms and bytes of one micro-batch."""

    layers: tuple[tuple[Layer, ...], ...]
    checkpoint: str

    @cached_property
    def costs(self) -> Costs:
        def each(name: str) -> list[float]:
            return [sum(getattr(layer, name) for layer in stage) for stage in self.layers]

        backward, weight = each("backward_ms"), each("weight_ms")
        inputs = [b - w for b, w in zip(backward, weight, strict=True)]
        return Costs(
            forward=each("forward_ms"), backward=backward, backward_input=inputs, backward_weight=weight
        )

    @property
    def recomputes(self) -> bool:
        return self.checkpoint != "never"

    @cached_property
    def saved(self) -> tuple[int, ...]:
        return tuple(sum(layer.saved_bytes for layer in stage) for stage in self.layers)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """What a micro-batch in flight keeps: everything, or with checkpointing the inputs of segments."""
        if not self.recomputes:
            return self.saved
        every = self.checkpoint == "every:1"
        inputs = [[layer.input_bytes for layer in stage] for stage in self.layers]
        return tuple(sum(stage) if every else stage[0] for stage in inputs)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """What one recompute restores at a time: the largest segment, less its kept input."""
        if not self.recomputes:
            return (0,) * len(self.layers)
        found = []
        for stage, saved in zip(self.layers, self.saved, strict=True):
            parts = [layer.saved_bytes - layer.input_bytes for layer in stage]
            whole = saved - stage[0].input_bytes
            found.append(max(0, max(parts) if self.checkpoint == "every:1" else whole))
        return tuple(found)

    @cached_property
    def communication(self) -> tuple[int, ...]:
        """Messages under way at most, to and from the neighbours."""
        crossing = [stage[-1].output_bytes for stage in self.layers[:-1]]
        around = [crossing[max(k - 1, 0) : k + 1] for k in range(len(self.layers))]
        return tuple(MESSAGES_HELD * max(sizes, default=0) for sizes in around)


def cut(layers: Sequence[Layer], num_stages: int) -> tuple[range, ...]:
    """The cut by time: the slowest stage is as fast as can be."""
    return balanced([layer.forward_ms + layer.backward_ms for layer in layers], num_stages)


def held_weights(layers: Sequence[Layer], precision: Precision, num_sharers: int = 1) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, the last divided among `num_sharers` (ZeRO-1)."""
    count = sum(layer.parameters for layer in layers)
    return {
        "parameters": round(count * precision.parameter_bytes),
        "gradients": round(count * precision.gradient_bytes),
        "optimizer": round(count * precision.optimizer_bytes / num_sharers),
    }


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is chosen: P stages, D copies, T devices that share each layer, m samples, M micro-batches."""

    num_stages: int
    num_replicas: int = 1
    tensor_parallel: int = 1
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "one_f_one_b"
    checkpoint: str = "never"

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas * self.tensor_parallel

    @property
    def batch_size(self) -> int:
        return self.num_replicas * self.num_microbatches * self.microbatch_size

    @property
    def num_chunks(self) -> int:
        return chunks_of(self.schedule)

    def build(self) -> Schedule:
        """The schedule of one copy, without recomputes: `checkpoint` adds them."""
        return SCHEDULES[self.schedule](self.num_stages, self.num_microbatches)

    def __str__(self) -> str:
        tensor = f", T = {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return (
            f"P = {self.num_stages}{tensor}, D = {self.num_replicas}, m = {self.microbatch_size}, "
            f"M = {self.num_microbatches}, {self.schedule}, checkpoint {self.checkpoint}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting and what it is estimated to take. Bytes are of one device of each stage's rank.

    trace is simulated and memory read off it; link_bytes are bytes a step: "pipeline" through the busiest
    link between neighbours, both directions; "data" and "tensor" that one device sends.
    """

    setting: Setting
    spans: tuple[range, ...]
    trace: Trace
    memory: MemoryReport
    reduce_ms: float
    link_bytes: dict[str, int]
    flops: float  # of the step's samples, forward and backward, without recomputes; 0 where not known
    peak_flops_per_ms: float  # of all devices together
    source: str

    @property
    def step_ms(self) -> float:
        """The pipeline's makespan, then the sum of gradients over the copies, not overlapped."""
        return self.trace.makespan_ms + self.reduce_ms

    @property
    def bubble_fraction(self) -> float:
        return self.trace.bubble_fraction

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.setting.batch_size / self.step_ms

    @property
    def model_flops_utilisation(self) -> float:
        """MFU: the model's own operations over what the devices could do in the step."""
        return self.flops / (self.step_ms * self.peak_flops_per_ms) if self.peak_flops_per_ms else 0.0

    @cached_property
    def peak_bytes(self) -> int:
        """Of the rank that holds most."""
        return max(self.memory.peak_bytes(rank) for rank in self.memory.ranks)

    @property
    def fits(self) -> bool:
        limit = self.memory.limit_bytes
        return limit is None or self.peak_bytes <= limit

    def frame(self) -> pandas.DataFrame:
        """One row a rank: its layers, and at the peak the bytes of every category."""
        import pandas

        rows = []
        place = self.trace.schedule.stage_to_rank if self.trace.schedule else ()
        for rank in self.memory.ranks:
            held = self.memory.peak(rank)
            mine = [self.spans[stage] for stage, home in enumerate(place) if home == rank]
            layers = " and ".join(f"{span.start}-{span.stop - 1}" for span in mine)
            rows.append({"rank": rank, "layers": layers, **held.bytes, "peak": held.total})
        return pandas.DataFrame(rows).fillna(0).set_index("rank")

    def __str__(self) -> str:
        return (
            f"{self.setting}: {self.source}: {self.step_ms:.4g} ms a step, "
            f"{self.samples_per_s:.4g} samples/s, "
            f"bubble {100 * self.bubble_fraction:.1f} %, peak {format_bytes(self.peak_bytes)}"
            + ("" if self.fits else f", over the limit of {format_bytes(self.memory.limit_bytes or 0)}")
        )

    __repr__ = __str__


def plan_of(
    setting: Setting,
    layers: Sequence[Layer],
    *,
    precision: Precision,
    device: Device | None = None,
    limit_bytes: int | None = None,
    shard_optimizer: bool = False,
    flops: float = 0.0,
    source: str = "estimated, simulated",
) -> Plan:
    """Simulate a setting over a list of layers: its trace, the memory along it, the bytes over links.

    Without a device, messages and sums take no time. Raises `InputError` where there are fewer layers than
    stages, or no such schedule (interleaved wants M a multiple of P).
    """
    require(
        setting.checkpoint in ("never", "always", "every:1"),
        'a plan checkpoints "never", "always" (a stage\'s input is kept) or "every:1" (each layer\'s)',
        got=repr(setting.checkpoint),
        where="plan",
    )
    spans = cut(layers, setting.num_stages * setting.num_chunks)
    stages = Stages(tuple(tuple(layers[span.start : span.stop]) for span in spans), setting.checkpoint)
    message = max([stage[-1].output_bytes for stage in stages.layers[:-1]], default=0)
    neighbours = setting.num_stages * setting.tensor_parallel
    send = device.travel_ms(message, neighbours) if device else 0.0
    costs = stages.costs
    schedule = setting.build()
    counts = [len(stage) for stage in stages.layers]
    lasting = with_recompute(schedule, setting.checkpoint, layers_per_stage=counts)
    trace = simulate(
        lasting,
        Costs(
            forward=costs.forward,
            backward=costs.backward,
            backward_input=costs.backward_input,
            backward_weight=costs.backward_weight,
            send=send,
        ),
    )
    sharers = setting.num_replicas if shard_optimizer else 1
    sizes = [
        StageBytes(
            saved=saved,
            boundary=stage[0].input_bytes,
            weights={**held_weights(stage, precision, sharers), "communication": under_way},
            segments=tuple((layer.input_bytes, layer.saved_bytes) for layer in stage),
        )
        for stage, saved, under_way in zip(stages.layers, stages.saved, stages.communication, strict=True)
    ]
    gradient_bytes = max(
        sum(held_weights(stages.layers[stage], precision)["gradients"] for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    )
    d = setting.num_replicas
    summed = 2 * (d - 1) / d * gradient_bytes
    exchanged = max(
        sum(layer.exchanged_bytes for stage in schedule.stages_of(rank) for layer in stages.layers[stage])
        for rank in range(schedule.num_ranks)
    )
    return Plan(
        setting=setting,
        spans=spans,
        trace=trace,
        memory=simulate_memory(trace, sizes, limit_bytes=limit_bytes),
        reduce_ms=device.travel_ms(summed, setting.num_devices) if device else 0.0,
        link_bytes={
            "pipeline": 2 * message * setting.num_microbatches,
            "data": round(summed),
            "tensor": exchanged * setting.num_microbatches,
        },
        flops=flops,
        peak_flops_per_ms=setting.num_devices * device.peak_tflops * 1e9 if device else 0.0,
        source=source,
    )
