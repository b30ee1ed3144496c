"""What a cut, a schedule and a micro-batch cost: time from the simulator, bytes by category, bytes by link.

A model comes as a list of layers, worked out from its shape (`layers_of`) or measured on this machine
(`engine.profile`): the rest does not care which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .errors import require
from .layer_costs import Layer, Stages, cut, held_weights
from .memory import MemoryReport, StageBytes, simulate_memory
from .models import Device, Precision
from .recompute import with_recompute
from .schedule import Schedule
from .schedules import SCHEDULES
from .simulate import Costs, simulate
from .trace import Trace
from .units import format_bytes

if TYPE_CHECKING:
    import pandas

CHUNKS = {"interleaved": 2, "zero_bubble_v": 2}  # stages on each rank


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
        return CHUNKS.get(self.schedule, 1)

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


def lay_out(
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
