"""What a setting takes in time and memory: the one estimate, of measured layers and of worked-out ones.

A setting's schedule is simulated over its stages, and the bytes are read off the simulated trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from ..plan.errors import require
from ..plan.memory import MemoryReport, MemoryRow, Moment, StageBytes, peak_in_flight, simulate_memory
from ..plan.ops import BACKWARD, COMPUTE, Kind
from ..plan.partition import balanced, uniform
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from ..plan.simulate import Costs, simulate
from ..plan.trace import Trace
from ..plan.units import format_bytes
from .models import Device
from .traffic import all_reduce_bytes

if TYPE_CHECKING:
    import pandas

TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")
RECEIVES_AHEAD = 2  # messages that a stage is ready to receive before it needs them


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer on one micro-batch on one device: ms, and bytes.

    weight_ms is the part of the backward nobody waits for. exchanged_bytes: sent by one of the devices that
    share the layer, forward and backward.
    """

    forward_ms: float
    backward_ms: float
    weight_ms: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    exchanged_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of its parameters, with their gradients and what the optimizer holds for them."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


Stages = Sequence[Sequence[Layer]]


class MeasuredLayer(Protocol):
    """What one layer costs on one micro-batch; `engine.profile.LayerProfile` is one."""

    @property
    def parameter_bytes(self) -> int: ...
    @property
    def forward_ms(self) -> float: ...
    @property
    def backward_ms(self) -> float: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...


class Measured(Protocol):
    """A profile: `engine.profile.Profile` is one."""

    @property
    def layers(self) -> Sequence[MeasuredLayer]: ...


def measured_layers(
    profile: Measured, *, input_bytes: int = 0, weight_copies: int = 2, slower: float = 1.0
) -> tuple[Layer, ...]:
    """A profile's layers. weight_copies: a weight, its gradient, and what the optimizer holds for it."""
    inputs = [input_bytes, *(layer.output_bytes for layer in profile.layers)]
    return tuple(
        Layer(
            forward_ms=slower * layer.forward_ms,
            backward_ms=slower * layer.backward_ms,
            weight_ms=slower * layer.backward_ms / 2,
            parameter_bytes=layer.parameter_bytes,
            gradient_bytes=layer.parameter_bytes,
            optimizer_bytes=(weight_copies - 2) * layer.parameter_bytes,
            saved_bytes=layer.saved_bytes,
            input_bytes=given,
            output_bytes=layer.output_bytes,
        )
        for layer, given in zip(profile.layers, inputs, strict=False)
    )


def lay_out(
    schedule: Schedule,
    profile: Measured,
    *,
    input_bytes: int = 0,
    weight_copies: int = 2,
    limit_bytes: int | None = None,
) -> tuple[Trace, MemoryReport]:
    """The simulated trace of `schedule` over a profiled model, cut uniformly, and the bytes it would hold.

    input_bytes: of one micro-batch at the model's input. weight_copies: what is held for each weight: 2 for
    it and its gradient, 4 with Adam's two moments. Messages under way are counted at their most: two
    expected, and those sent. With recompute a rank is fullest in a backward, when all it sent but one has
    arrived; without, at its last forward, when a slow neighbour may have taken none of them yet.
    """
    layers = measured_layers(profile, input_bytes=input_bytes, weight_copies=weight_copies)
    spans = uniform(len(layers), schedule.num_stages)
    return _simulated(schedule, _stages(layers, spans), limit_bytes=limit_bytes)


def estimated_peak(
    schedule: Schedule, profile: Measured, *, input_bytes: int = 0, weight_copies: int = 2
) -> int:
    """Bytes of the fullest rank, as `lay_out` estimates them."""
    _, memory = lay_out(schedule, profile, input_bytes=input_bytes, weight_copies=weight_copies)
    return max(memory.peak_bytes(rank) for rank in memory.ranks)


def _stages(layers: Sequence[Layer], spans: Sequence[range]) -> Stages:
    return [layers[span.start : span.stop] for span in spans]


def _simulated(
    schedule: Schedule,
    stages: Stages,
    *,
    every: int | None = None,
    send_ms: float = 0.0,
    limit_bytes: int | None = None,
) -> tuple[Trace, MemoryReport]:
    """The estimate. every: how many layers a recomputed segment of the schedule has."""

    def each(name: str) -> list[float]:
        return [sum(getattr(layer, name) for layer in stage) for stage in stages]

    backward, weight = each("backward_ms"), each("weight_ms")
    costs = Costs(
        forward=each("forward_ms"),
        backward=backward,
        backward_input=[b - w for b, w in zip(backward, weight, strict=True)],
        backward_weight=weight,
        send=send_ms,
    )
    trace = simulate(schedule, costs)
    held = simulate_memory(trace, list(_sizes(schedule, stages, every)), limit_bytes=limit_bytes)
    rows = sorted((*held.rows, *_gradients(trace, stages)), key=lambda row: row.time_ms)
    return trace, replace(held, rows=tuple(rows))


def _crossing(place: Sequence[int], stages: Stages) -> list[int]:
    """Bytes of the message from every stage to the next, 0 within a rank."""
    return [
        stage[-1].output_bytes if home != following else 0
        for stage, (home, following) in zip(stages, pairwise(place), strict=False)
    ]


def _sizes(schedule: Schedule, stages: Stages, every: int | None) -> Iterator[StageBytes]:
    recomputes = Kind.R in schedule.kinds
    in_flight = peak_in_flight(schedule)
    crossing = [0, *_crossing(schedule.stage_to_rank, stages), 0]
    for k, (stage, rank) in enumerate(zip(stages, schedule.stage_to_rank, strict=True)):
        sends = 1 if recomputes else math.ceil(in_flight[rank] / len(schedule.stages_of(rank)))
        parts = [stage[start : start + (every or 1)] for start in range(0, len(stage), every or 1)]
        weights = {
            "parameters": sum(layer.parameter_bytes for layer in stage),
            "optimizer": sum(layer.optimizer_bytes for layer in stage),
            "communication": (RECEIVES_AHEAD + sends) * max(crossing[k : k + 2]),
        }
        segments = tuple((part[0].input_bytes, _saved(part)) for part in parts)
        saved, boundary = _saved(stage), stage[0].input_bytes
        yield StageBytes(saved=saved, boundary=boundary, weights=weights, segments=segments)


def _saved(layers: Sequence[Layer]) -> int:
    """What layers keep of a micro-batch for their backward, their input at least."""
    return max(sum(layer.saved_bytes for layer in layers), layers[0].input_bytes)


def _gradients(trace: Trace, stages: Stages) -> Iterator[MemoryRow]:
    """Gradients come with each stage's first backward, layer by layer, while its activations go.

    What they add at most within that backward is dated to its start, all of them to its end.
    """
    assert trace.schedule is not None
    for rank, timed in enumerate(trace.rows):
        arrived, seen = 0, set()
        computed = [op for op in trace.schedule.ops[rank] if op.kind in COMPUTE]
        for index, op in enumerate(computed):
            if op.kind not in BACKWARD or op.stage in seen:
                continue
            seen.add(op.stage)
            come = gone = most = 0
            for layer in reversed(stages[op.stage]):
                come += layer.gradient_bytes
                most = max(most, come - gone)
                gone += layer.saved_bytes
            yield MemoryRow(rank, index, timed.starts[index], "gradients", arrived + most, op)
            arrived += come
            yield MemoryRow(rank, index, timed.ends[index], "gradients", arrived, op)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is chosen: P ranks a pipeline, D copies, T devices that share a layer, m samples, M micro-batches.

    num_chunks: stages on each rank of an interleaved pipeline; other schedules say themselves how many.
    """

    num_stages: int
    num_replicas: int = 1
    tensor_parallel: int = 1
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "one_f_one_b"
    num_chunks: int = 2
    checkpoint: str = "never"

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas * self.tensor_parallel

    @property
    def batch_size(self) -> int:
        return self.num_replicas * self.num_microbatches * self.microbatch_size

    def build(self) -> Schedule:
        """The schedule of one copy, without recomputes: `checkpoint` adds them. Raises `InputError`."""
        require(
            self.schedule in TRAINING,
            f"a plan's schedule trains: one of {', '.join(TRAINING)}",
            got=repr(self.schedule),
            where="plan",
            remedy='schedule="one_f_one_b"',
        )
        chunks = {"num_chunks": self.num_chunks} if self.schedule == "interleaved" else {}
        return SCHEDULES[self.schedule](self.num_stages, self.num_microbatches, **chunks)

    def __str__(self) -> str:
        tensor = f", T = {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        chunks = f" of {self.num_chunks} chunks" if self.schedule == "interleaved" else ""
        return (
            f"P = {self.num_stages}{tensor}, D = {self.num_replicas}, m = {self.microbatch_size}, "
            f"M = {self.num_microbatches}, {self.schedule}{chunks}, checkpoint {self.checkpoint}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting and what it is estimated to take. Bytes are of one device of each stage's rank.

    trace is simulated and memory read off it; link_bytes are bytes a step: "pipeline" through the busiest
    link between two ranks, both directions; "data" and "tensor" that one device sends.
    """

    setting: Setting
    spans: tuple[range, ...]
    trace: Trace
    memory: MemoryReport
    reduce_ms: float
    link_bytes: dict[str, int]
    flops: float  # of the step's samples, forward and backward, without recomputes; 0 where not known
    peak_flops_per_ms: float  # of all devices together

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
    def ms_per_sample(self) -> float:
        """A device's: what a sample costs when twice the devices ought to train twice the samples."""
        return self.step_ms * self.setting.num_devices / self.setting.batch_size

    @property
    def model_flops_utilisation(self) -> float:
        """MFU: the model's own operations over what the devices could do in the step."""
        return self.flops / (self.step_ms * self.peak_flops_per_ms) if self.peak_flops_per_ms else 0.0

    @cached_property
    def fullest(self) -> tuple[int, Moment]:
        """(the rank that holds most, what it holds at its peak)"""
        peaks = {rank: self.memory.peak(rank) for rank in self.memory.ranks}
        return max(peaks.items(), key=lambda peak: peak[1].total)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that holds most."""
        return self.fullest[1].total

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
            f"{self.setting}: estimated, simulated: {self.step_ms:.4g} ms a step, "
            f"{self.samples_per_s:.4g} samples/s, "
            f"bubble {100 * self.bubble_fraction:.1f} %, peak {format_bytes(self.peak_bytes)}"
            + ("" if self.fits else f", over the limit of {format_bytes(self.memory.limit_bytes or 0)}")
        )

    __repr__ = __str__


def cut_by_time(layers: Sequence[Layer], num_stages: int) -> tuple[range, ...]:
    """The slowest stage is as fast as can be."""
    return _balanced(tuple(layer.forward_ms + layer.backward_ms for layer in layers), num_stages)


_balanced = lru_cache(maxsize=1000)(balanced)  # many settings share a cut


def cut_evenly(layers: Sequence[Layer], num_stages: int) -> tuple[range, ...]:
    """As many layers for each stage, as `partition="uniform"` cuts."""
    return uniform(len(layers), num_stages)


def plan_of(
    setting: Setting,
    layers: Sequence[Layer],
    *,
    cut: Callable[[Sequence[Layer], int], tuple[range, ...]] = cut_by_time,
    device: Device | None = None,
    limit_bytes: int | None = None,
    flops: float = 0.0,
) -> Plan:
    """The plan of a setting over a model's layers on one of its micro-batches.

    Without a device, messages and sums take no time. Raises `InputError` where there is no such schedule
    (interleaved wants M a multiple of P), no such checkpoint mode, or a stage without a layer.
    """
    schedule = setting.build()
    spans = cut(layers, schedule.num_stages)
    stages = _stages(layers, spans)
    crossing = _crossing(schedule.stage_to_rank, stages)
    links: Counter[frozenset[int]] = Counter()
    for ends, size in zip(pairwise(schedule.stage_to_rank), crossing, strict=True):
        links[frozenset(ends)] += 2 * setting.num_microbatches * size
    ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    of_ranks = [[layer for k in mine for layer in stages[k]] for mine in ranks]
    gradients = max(sum(layer.gradient_bytes for layer in mine) for mine in of_ranks)
    exchanged = max(sum(layer.exchanged_bytes for layer in mine) for mine in of_ranks)
    summed = all_reduce_bytes(gradients, setting.num_replicas)
    send_ms = reduce_ms = 0.0
    if device is not None:
        t, next_copy = setting.tensor_parallel, setting.num_stages * setting.tensor_parallel
        send_ms = max(crossing, default=0) / (1e6 * device.send_gb_s(setting.num_stages, t))
        reduce_ms = summed / (1e6 * device.ring_gb_s(setting.num_replicas, next_copy))
    trace, memory = _simulated(
        with_recompute(schedule, setting.checkpoint, layers_per_stage=[len(stage) for stage in stages]),
        stages,
        every=parse_mode(setting.checkpoint),
        send_ms=send_ms,
        limit_bytes=limit_bytes,
    )
    return Plan(
        setting=setting,
        spans=spans,
        trace=trace,
        memory=memory,
        reduce_ms=reduce_ms,
        link_bytes={
            "pipeline": max(links.values(), default=0),
            "data": round(summed),
            "tensor": exchanged * setting.num_microbatches,
        },
        flops=flops,
        peak_flops_per_ms=setting.num_devices * device.peak_tflops * 1e9 if device else 0.0,
    )
