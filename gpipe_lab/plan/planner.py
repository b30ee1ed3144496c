"""Choose P, T, D, m, M, schedule and checkpointing for a model on so many devices, under a memory limit.

Every setting of a grid is estimated from closed forms; those that do not fit are rejected with the reason;
the fastest of the rest are simulated and ranked by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import TypeVar

from .catalogue import DEVICES, MODELS
from .choosing import CHECKPOINTS, SCHEDULES, Plans, choose
from .costing import Plan, Setting, lay_out
from .errors import require, require_count
from .layer_costs import Layer, layers_of
from .models import Device, Model, Precision
from .units import parse_bytes

T = TypeVar("T")


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
    checkpoint: str = "never",
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    memory_limit: str | int | None = None,
) -> Plan:
    """What one setting takes: time, bubble, bytes of every rank by category, bytes over links.

    efficiency: the share of the device's peak that its matrix products reach, an assumption unless measured.
    shard_optimizer: the copies divide the optimizer's state among them (ZeRO-1). memory_limit: of one
    device; its own memory unless given.
    """
    setting = Setting(
        num_stages=num_stages,
        num_replicas=num_replicas,
        tensor_parallel=tensor_parallel,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        checkpoint=checkpoint,
    )
    for name in ("num_replicas", "tensor_parallel", "microbatch_size"):
        require_count(getattr(setting, name), name, where="estimate")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)
    precision = precision or Precision()
    layers = layers_of(
        shape,
        card,
        microbatch_size=microbatch_size,
        tensor_parallel=tensor_parallel,
        fused_attention=fused_attention,
        efficiency=efficiency,
        precision=precision,
    )
    return lay_out(
        setting,
        layers,
        precision=precision,
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        shard_optimizer=shard_optimizer,
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
    schedules: Sequence[str] = SCHEDULES,
    checkpoints: Sequence[str] = CHECKPOINTS,
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    most: int = 6,
) -> Plans:
    """The settings of a model on `num_devices` devices for one step of `batch_size` sequences, ranked.

    D = devices / (P·T) copies, M = batch / (D·m) micro-batches each. num_stages: the P to try; the divisors
    of the devices that leave a layer for every stage unless given. `most` of those that fit, the fastest by
    their closed forms, are simulated and returned. The rest is as in `estimate`.
    """
    require_count(num_devices, "num_devices", where="plan")
    require_count(batch_size, "batch_size", where="plan")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)
    precision = precision or Precision()

    @cache
    def layers(microbatch_size: int, t: int) -> tuple[Layer, ...]:
        return layers_of(
            shape,
            card,
            microbatch_size=microbatch_size,
            tensor_parallel=t,
            fused_attention=fused_attention,
            efficiency=efficiency,
            precision=precision,
        )

    def settings() -> Iterator[Setting]:
        for t in tensor_parallel:
            for p in num_stages or _divisors(num_devices // t if num_devices % t == 0 else 1):
                for m in microbatch_sizes:
                    d = num_devices // (p * t)
                    micro = batch_size // (d * m) if d else 0
                    for name, mode in product(schedules, checkpoints):
                        yield Setting(
                            num_stages=p,
                            num_replicas=d,
                            tensor_parallel=t,
                            microbatch_size=m,
                            num_microbatches=micro,
                            schedule=name,
                            checkpoint=mode,
                        )

    def refuses(setting: Setting) -> str:
        p, t, d = setting.num_stages, setting.tensor_parallel, setting.num_replicas
        if d * p * t != num_devices:
            return f"P·T = {p * t} does not divide {num_devices} devices"
        if t > 1 and (shape.key_heads % t or t > card.per_node):
            return f"T = {t} divides {shape.key_heads} key heads and stays within a node of {card.per_node}"
        if setting.batch_size != batch_size or setting.num_microbatches < 1:
            return f"D·m = {d * setting.microbatch_size} does not divide a batch of {batch_size}"
        return ""

    return choose(
        settings(),
        lambda setting: layers(setting.microbatch_size, setting.tensor_parallel),
        precision=precision,
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        shard_optimizer=shard_optimizer,
        flops=_step_flops(shape, batch_size),
        refuses=refuses,
        most=most,
    )


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
