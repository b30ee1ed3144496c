"""A model as a list of layers with their times and bytes, and what a cut makes of them, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .models import Device, Model, Precision
from .partition import balanced
from .simulate import Costs

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
