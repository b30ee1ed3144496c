"""Plan published models on published devices: one setting, or the best of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import TypeVar

from ..plan.errors import require, require_count
from ..plan.units import parse_bytes
from .choose import CHECKPOINTS, PROPOSED, Plans, choose
from .estimate import Layer, Plan, Setting, plan_of
from .models import DEVICES, MODELS, Device, Model, Precision

T = TypeVar("T")


def layers_of(
    model: Model,
    device: Device,
    *,
    microbatch_size: int = 1,
    tensor_parallel: int = 1,
    fused_attention: bool = True,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    optimizer_shards: int = 1,
) -> tuple[Layer, ...]:
    """Embedding, blocks and head of a model as one of `tensor_parallel` devices has them.

    efficiency: the share of a device's peak that its matrix products reach. Tensor parallelism with sequence
    parallelism divides weights, work and activations, and adds four exchanges of s·b·h values a layer, two
    each way (Korthikanti et al. 2022, §4.2.2), on the links of a node. optimizer_shards: copies that divide
    the optimizer's state among them (ZeRO-1).
    """
    precision = precision or Precision()
    value, b, t = precision.value_bytes, microbatch_size, tensor_parallel
    boundary = model.boundary_bytes(b, value_bytes=value)
    exchanged = 8 * (t - 1) * boundary // t  # by a block

    def layer(
        parameters: int,
        *,
        saved: int,
        given: int,
        made: int,
        flops: float = 0.0,
        scores: float = 0.0,
        sent: int = 0,
    ) -> Layer:
        forward_ms = device.compute_ms(flops / t, efficiency)
        exchange_ms = sent / 2 / (1e6 * device.ring_gb_s(t))
        return Layer(
            forward_ms=forward_ms + exchange_ms,
            backward_ms=2 * forward_ms + exchange_ms,
            weight_ms=device.compute_ms((flops - scores) / t, efficiency),
            parameter_bytes=round(parameters / t * precision.parameter_bytes),
            gradient_bytes=round(parameters / t * precision.gradient_bytes),
            optimizer_bytes=round(parameters / t * precision.optimizer_bytes / optimizer_shards),
            saved_bytes=saved // t,
            input_bytes=given // t,
            output_bytes=made // t,
            exchanged_bytes=sent,
        )

    tokens = model.embedding_saved_bytes(b)
    embedding = layer(model.embedding_parameters, saved=tokens, given=tokens, made=boundary)
    block = layer(
        model.layer_parameters,
        saved=model.layer_saved_bytes(b, fused_attention=fused_attention, value_bytes=value),
        given=boundary,
        made=boundary,
        flops=model.layer_flops(b),
        scores=model.score_flops(b),
        sent=exchanged,
    )
    head = layer(
        model.head_parameters + (model.vocab * model.hidden if model.tied else 0),  # tied: a copy
        saved=model.head_saved_bytes(b, value_bytes=value),
        given=boundary,
        made=0,
        flops=model.head_flops(b),
    )
    return (embedding, *[block] * model.layers, head)


def estimate(
    model: Model | str,
    device: Device | str,
    *,
    num_stages: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    num_replicas: int = 1,
    tensor_parallel: int = 1,
    schedule: str = "one_f_one_b",
    num_chunks: int = 2,
    checkpoint: str = "never",
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    memory_limit: str | int | None = None,
) -> Plan:
    """What one setting takes: time, bubble, bytes of every rank by category, bytes over links.

    num_stages: P, the ranks of one pipeline; schedules with several stages a rank cut the model finer.
    num_chunks: stages on each rank of an interleaved one. efficiency: the share of the device's peak that
    its matrix products reach, an assumption unless measured. shard_optimizer: the copies divide the
    optimizer's state among them (ZeRO-1). memory_limit: of one device; its own memory unless given.

    Raises `InputError` for what cannot be planned: no such model, device or schedule, too few layers.
    """
    setting = Setting(
        num_stages=num_stages,
        num_replicas=num_replicas,
        tensor_parallel=tensor_parallel,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
        checkpoint=checkpoint,
    )
    for name in ("num_replicas", "tensor_parallel", "microbatch_size"):
        require_count(getattr(setting, name), name, where="estimate")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)
    layers = layers_of(
        shape,
        card,
        microbatch_size=microbatch_size,
        tensor_parallel=tensor_parallel,
        fused_attention=fused_attention,
        efficiency=efficiency,
        precision=precision,
        optimizer_shards=num_replicas if shard_optimizer else 1,
    )
    return plan_of(
        setting,
        layers,
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        flops=_step_flops(shape, setting.batch_size),
    )


def propose(
    model: Model | str,
    device: Device | str,
    num_devices: int,
    *,
    batch_size: int,
    memory_limit: str | int | None = None,
    num_stages: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] = (1,),
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    schedules: Sequence[str] = PROPOSED,
    num_chunks: Sequence[int] = (2,),
    checkpoints: Sequence[str] = CHECKPOINTS,
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    most: int = 6,
) -> Plans:
    """The settings of a model on `num_devices` devices for one step of `batch_size` sequences, ranked.

    D = devices / (P·T) copies, M = batch / (D·m) micro-batches each. num_stages: the P to try; the divisors
    of the devices unless given. The `most` fastest of those that fit are returned, all of them simulated.
    The rest is as in `estimate`.
    """
    require_count(num_devices, "num_devices", where="plan")
    require_count(batch_size, "batch_size", where="plan")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)

    @cache
    def layers(microbatch_size: int, t: int, num_replicas: int) -> tuple[Layer, ...]:
        return layers_of(
            shape,
            card,
            microbatch_size=microbatch_size,
            tensor_parallel=t,
            fused_attention=fused_attention,
            efficiency=efficiency,
            precision=precision,
            optimizer_shards=num_replicas if shard_optimizer else 1,
        )

    def settings() -> Iterator[Setting]:
        for t in tensor_parallel:
            for p, m in product(num_stages or _divisors(num_devices // t), microbatch_sizes):
                d = num_devices // (p * t)
                for name, mode in product(schedules, checkpoints):
                    for chunks in num_chunks if name == "interleaved" else num_chunks[:1]:
                        yield Setting(
                            num_stages=p,
                            num_replicas=d,
                            tensor_parallel=t,
                            microbatch_size=m,
                            num_microbatches=batch_size // (d * m) if d else 0,
                            schedule=name,
                            num_chunks=chunks,
                            checkpoint=mode,
                        )

    def refuses(setting: Setting) -> None:
        p, t, d = setting.num_stages, setting.tensor_parallel, setting.num_replicas
        refuse = partial(require, where="plan")
        refuse(d * p * t == num_devices, f"P·T divides the {num_devices} devices", got=p * t)
        refuse(
            t == 1 or (shape.key_heads % t == 0 and t <= card.per_node),
            f"T divides {shape.key_heads} key heads and stays within a node of {card.per_node}",
            got=t,
        )
        is_whole = setting.batch_size == batch_size and setting.num_microbatches >= 1
        refuse(is_whole, f"D·m divides the batch of {batch_size}", got=d * setting.microbatch_size)

    return choose(
        settings(),
        lambda setting: layers(setting.microbatch_size, setting.tensor_parallel, setting.num_replicas),
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        flops=_step_flops(shape, batch_size),
        refuses=refuses,
        most=most,
    )


def known_model(model: Model | str) -> Model:
    """A model, or the one of `gl.MODELS` with that name."""
    return _known(model, MODELS, Model, remedy='"llama3-8b"')


def known_device(device: Device | str) -> Device:
    """A device, or the one of `gl.DEVICES` with that name."""
    return _known(device, DEVICES, Device, remedy='"h100"')


def _known(asked: T | str, catalogue: Mapping[str, T], kind: type[T], *, remedy: str) -> T:
    found = catalogue.get(asked) if isinstance(asked, str) else asked
    require(
        isinstance(found, kind),
        f"a {kind.__name__.lower()} is a gl.{kind.__name__} or one of {', '.join(catalogue)}",
        got=repr(asked),
        where="plan",
        remedy=remedy,
    )
    assert found is not None
    return found


def _step_flops(model: Model, batch_size: int) -> float:
    """Forward and backward of one step's sequences: three times the forward's."""
    return 3.0 * batch_size * (model.layers * model.layer_flops(1) + model.head_flops(1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_efficiency(efficiency: float) -> None:
    require(
        isinstance(efficiency, int | float) and 0 < efficiency <= 1,
        "efficiency is a share of the device's peak, above 0 and at most 1",
        got=f"efficiency={efficiency!r}",
        where="plan",
        remedy="efficiency=0.5",
    )
